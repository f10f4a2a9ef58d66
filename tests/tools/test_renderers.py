"""Random calls, as the package renderers writes them, are read as it reads them."""

from __future__ import annotations

import json
import os
import random

import pytest
from families_of_calls import backend

from marft_jax.models.tokenizers.tokenizer import Tokenizer
from marft_jax.tools.calls import FORMS
from marft_jax.tools.forms import BROKEN

renderers = pytest.importorskip("renderers")
pytestmark = pytest.mark.release

IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
KIMI = ("tool_calls_section_begin", "tool_calls_section_end", "tool_call_begin", "tool_call_end")
DEEPSEEK = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "outputs▁begin", "outputs▁end")
FAMILIES = {
    "qwen3": ("hermes", (*IM, *TAGS)),
    "qwen3.5": ("qwen", (*IM, *TAGS, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
                         "<|video_pad|>")),
    "nemotron-3": ("qwen", (*IM, *TAGS)),
    "glm-4.5": ("glm", ("<|user|>", "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", *TAGS,
                        "<|assistant|>", "<|observation|>", "<arg_key>", "</arg_key>",
                        "<arg_value>", "</arg_value>", "/nothink")),
    "kimi-k2": ("kimi", ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>",
                         "<|im_system|>", "<|im_middle|>", "<|tool_call_argument_begin|>",
                         *(f"<|{name}|>" for name in KIMI))),
    "deepseek-v3": ("deepseek", ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>",
                                 "<｜Assistant｜>", "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>",
                                 "<｜tool▁output▁end｜>",
                                 *(f"<｜tool▁{name}｜>" for name in DEEPSEEK))),
    "minimax-m2": ("minimax", ("]~!b[", "[e~[", "]~b]", "<minimax:tool_call>",
                               "</minimax:tool_call>", "<think>", "</think>")),
    "gemma4": ("gemma", ("<bos>", "<turn|>", "<eos>", "<pad>", "<|turn>", "<|channel>",
                         "<channel|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>",
                         "<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>",
                         "<|image|>", "<|image>", "<image|>")),
    "llama-3": ("json", ("<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>", "<|python_tag|>",
                         "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>")),
}  # fmt: skip
PROPERTIES = {
    "a": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "b": {"type": "boolean"},
    "l": {"type": "array", "items": {}},
    "o": {"type": "object"},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {
        "type": "object", "properties": PROPERTIES}}}
    for name in ("add", "look_up.it")
]  # fmt: skip
LETTERS = "ab Z09{}[]()\"'\\/:,;=_é☃😀"


def drawn(draw, depth=2):
    """A JSON value."""
    kinds = [lambda: "".join(draw.choices(LETTERS, k=draw.randrange(12))).strip(),
             lambda: draw.randrange(-99, 99), lambda: draw.choice([True, False]),
             lambda: draw.randrange(-99, 99) / 8]  # fmt: skip
    if depth:
        kinds += [
            lambda: [drawn(draw, depth - 1) for _ in range(draw.randrange(3))],
            lambda: {f"k{i}": drawn(draw, depth - 1) for i in range(draw.randrange(3))},
        ]
    return draw.choice(kinds)()


def arguments(draw):
    kinds = {"a": str, "n": int, "x": float, "b": bool, "l": list, "o": dict}
    found = {}
    for name in draw.sample(sorted(kinds), draw.randrange(len(kinds) + 1)):
        value = drawn(draw)
        while type(value) is not kinds[name]:
            value = drawn(draw)
        found[name] = value
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_random_calls_are_read_as_another_package_reads_them(name):
    form, marks = FAMILIES[name]
    fast = backend(marks, template="{{ messages[0].content }}", end=marks[1])
    tokenizer, draw = Tokenizer(fast), random.Random(name)
    other = renderers.create_renderer(fast, renderers.config_from_name(name))
    user = {"role": "user", "content": "go"}
    before = other.render_ids([user], tools=TOOLS, add_generation_prompt=True)
    same = 0
    for n in range(500):
        function = {"name": draw.choice(TOOLS)["function"]["name"], "arguments": arguments(draw)}
        call = {"id": f"functions.{function['name']}:0", "type": "function", "function": function}
        told = {"role": "assistant", "content": "", "tool_calls": [call]}
        whole = other.render_ids([user, told], tools=TOOLS)
        common = len(os.path.commonprefix([before, whole]))
        ids = whole[common:]
        text = tokenizer.spell(ids, BROKEN)
        calls = FORMS[form].read(text, TOOLS)[1]
        assert [(c.name, json.loads(c.arguments)) for c in calls] == [
            (function["name"], function["arguments"])
        ], (n, text)
        theirs = other.parse_response(ids, tools=TOOLS).tool_calls
        same += [(c.name, c.arguments) for c in theirs] == [tuple(function.values())]
    assert same > 200  # it reads True, as Qwen writes it, as a text, and drops white space
