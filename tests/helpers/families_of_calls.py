"""Small tokenizers with the special tokens of families of models, and templates that write calls in
the form of each family. Ids below 256 are bytes; 257 ends a turn, as in the built-in model."""

from __future__ import annotations

import functools
from typing import NamedTuple

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from marft_jax.models.tokenizers.tokenizer import Tokenizer

_CHATML = ("<|im_start|>{role}\n", "<|im_end|>", "\n")


class Family(NamedTuple):
    """How a family writes a conversation.

    Attributes:
        form: the name of its form of calls.
        template: with the roles user, assistant and tool.
        marks: its special tokens; the second one ends a turn.
        plain: tokens at which a text is split and that are shown.
        more: further tokens that end a turn.
    """

    form: str
    template: str
    marks: tuple[str, ...]
    plain: tuple[str, ...] = ()
    more: tuple[str, ...] = ()


def _template(
    role: str, end: str, call: str, *, first: str = "", between: str = "", last: str = "",
    tool: str = "", names: str = "{{ m.role }}", strict: bool = False, system: str = "",
    opens: str = "", ask: str = "",
) -> str:  # fmt: skip
    """Writes a chat template.

    Args:
        role, end: begin and end a message; ``names`` writes the role in it.
        call: a call ``f``; ``first``, ``between`` and ``last`` stand around all calls.
        tool: the whole message of an answer.
        strict: answers without a call before them are refused.
        opens: stands before the assistant's text, in prompts too.
        ask: opens the assistant's message in a prompt.
    """
    refuse = (
        "{% if not (loop.index0 and (loop.previtem.tool_calls or loop.previtem.role == 'tool')) %}"
        "{{ raise_exception('no call before the answer') }}{% endif %}"
    )
    begin = role.replace("{role}", names)
    ask = ask or role.replace("{role}", "assistant")
    return (
        "{% if tools %}" + (system or role.replace("{role}", "system"))
        + "{% for t in tools %}{{ t.function | tojson }}\n{% endfor %}" + end + "{% endif %}"
        "{% for m in messages %}{% if m.role == 'tool' %}" + (refuse if strict else "") + tool
        + "{% else %}" + begin + "{% if m.role == 'assistant' %}" + opens + "{% endif %}"
        "{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
        "{% if loop.first %}" + first + "{% else %}" + between + "{% endif %}"
        + call + "{% if loop.last %}" + last + "{% endif %}{% endfor %}" + end + "{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}" + ask + opens + "{% endif %}"
    )  # fmt: skip


_IM = ("<|im_start|>", "<|im_end|>")
_ROLE, _END = "<|im_start|>{role}\n", "<|im_end|>\n"
_ASK = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_QWEN = (
    "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}"
    "<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
_JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_QUOTE = '<|"|>'

FAMILIES = {
    "hermes": Family(
        "hermes",
        _template(
            _ROLE, _END, f"<tool_call>\n{_JSON}\n</tool_call>", between="{{ '\n' }}", tool=_ASK
        ),
        _IM, _TAGS,
    ),
    "qwen3.5": Family(
        "qwen",
        _template(
            _ROLE, _END, _QWEN, between="{{ '\n' }}", tool=_ASK,
            opens="<think>\n{{ '\n</think>\n\n' if not enable_thinking }}",
        ),
        _IM, _TAGS,
    ),
    "nemotron3": Family("qwen", _template(_ROLE, _END, _QWEN, tool=_ASK), (*_IM, *_TAGS)),
    "llama3": Family(
        "json",
        _template(
            "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>",
            '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', between="; ",
            tool="<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}"
            "<|eot_id|>",
        ),
        ("<|start_header_id|>", "<|eot_id|>", "<|end_header_id|>", "<|python_tag|>"),
    ),
    "mistral": Family(
        "mistral",
        _template(
            "[INST]{role}:", "</s>", "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
            tool="[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]", strict=True,
        ),
        ("[INST]", "</s>", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
    "granite3": Family(
        "hermes",
        _template(
            "<|start_of_role|>{role}<|end_of_role|>", "<|end_of_text|>\n", _JSON,
            first="<|tool_call|>[", between=", ", last="]",
            tool="<|start_of_role|>tool_response<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
        ),
        ("<|start_of_role|>", "<|end_of_text|>", "<|end_of_role|>", "<|tool_call|>"),
    ),
    "gpt-oss": Family(
        "harmony",
        "{% for t in tools or [] %}<|start|>developer<|message|>{{ t.function | tojson }}<|end|>"
        "{% endfor %}{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if not loop.previtem.tool_calls %}{{ raise_exception('no call') }}{% endif %}"
        "<|start|>functions.{{ loop.previtem.tool_calls[0].function.name }} to=assistant"
        "<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>{% elif m.tool_calls %}"
        "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary "
        "json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>"
        "{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% else %}"
        "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ("<|start|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>", "<|end|>",
         "<|constrain|>"),
        more=("<|call|>",),
    ),
    "gemma4": Family(
        "gemma",
        "{% macro put(v) %}{% if v is string %}" + _QUOTE + "{{ v }}" + _QUOTE
        + "{% elif v is boolean %}{{ 'true' if v else 'false' }}{% elif v is mapping %}{"
        " {%- for k, x in v.items() %}"
        "{{ k }}:{{ put(x) }}{{ ',' if not loop.last }}{% endfor -%} }{% elif v is iterable %}["
        "{% for x in v %}{{ put(x) }}{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ v }}"
        "{% endif %}{% endmacro %}"
        + _template(
            "<|turn>{role}\n", "{{ '<turn|>\n' if not (m is defined and m.tool_calls) }}",
            "<|tool_call>call:{{ f.name }}{{ put(f.arguments) }}<tool_call|>",
            last="<|tool_response>",
            tool="response:{{ m.name }}{value:" + _QUOTE + "{{ m.content }}" + _QUOTE
            + "}<tool_response|>",
            names="{{ 'model' if m.role == 'assistant' else m.role }}",
            ask="{{ '<|turn>model\n' if messages[-1].role != 'tool' }}",
        ),
        ("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
         "<tool_response|>", "<|channel>", "<channel|>", _QUOTE),
        more=("<|tool_response>",),
    ),
    "lfm2": Family(  # older templates write no calls
        "lfm2",
        _template(_ROLE, _END, "", tool="<|im_start|>tool\n{{ m.content }}<|im_end|>\n"),
        (*_IM, "<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "lfm2.5": Family(
        "lfm2",
        _template(
            _ROLE, _END, "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ "
            "\"'\" + v + \"'\" if v is string else v }}{{ ', ' if not loop.last }}{% endfor %})",
            first="<|tool_call_start|>[", between=", ", last="]<|tool_call_end|>",
            tool="<|im_start|>tool\n{{ m.content }}<|im_end|>\n",
        ),
        (*_IM, "<|tool_call_start|>", "<|tool_call_end|>"), ("<think>", "</think>"),
    ),
    "olmo3": Family(
        "olmo",
        _template(
            _ROLE, _END, "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson "
            "}}{{ ', ' if not loop.last }}{% endfor %})",
            first="<function_calls>", between="{{ '\n' }}", last="</function_calls>",
            tool="<|im_start|>environment\n{{ m.content }}<|im_end|>\n",
        ),
        _IM, ("<function_calls>", "</function_calls>"),
    ),
    "glm": Family(
        "glm",
        _template(
            "<|{role}|>", "<|end|>",
            "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}"
            "<arg_key>{{ k }}</arg_key>\n"
            "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n"
            "{% endfor %}</tool_call>",
            tool="<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>\n<|end|>",
        ),
        ("<|observation|>", "<|end|>", "<|user|>", "<|assistant|>"),
        (*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "kimi": Family(
        "kimi",
        _template(
            "<|im_{role}|>{role}<|im_middle|>", "<|im_end|>",
            "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}"
            "<|tool_call_end|>",
            first="<|tool_calls_section_begin|>", last="<|tool_calls_section_end|>",
            tool="<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}"
            "<|im_end|>",
        ),
        ("<|im_middle|>", "<|im_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
         "<|tool_call_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "deepseek3": Family(
        "deepseek",
        _template(
            "<｜{role}｜>", "<｜end▁of▁sentence｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n"
            "{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜>",
            first="<｜tool▁calls▁begin｜>", between="{{ '\n' }}", last="<｜tool▁calls▁end｜>",
            tool="<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>",
        ),
        ("<｜user｜>", "<｜end▁of▁sentence｜>", "<｜assistant｜>", "<｜tool▁sep｜>",
         "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
         "<｜tool▁call▁end｜>"),
    ),
    "deepseek3.1": Family(
        "deepseek",
        _template(
            "<｜{role}｜>", "<｜end▁of▁sentence｜>",
            "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}"
            "<｜tool▁call▁end｜>",
            first="<｜tool▁calls▁begin｜>", last="<｜tool▁calls▁end｜>",
            tool="<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>",
        ),
        ("<｜user｜>", "<｜end▁of▁sentence｜>", "<｜assistant｜>", "<｜tool▁sep｜>",
         "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
         "<｜tool▁call▁end｜>"),
    ),
    "deepseek3.2": Family(
        "dsml",
        _template(
            "<｜{role}｜>", "<｜end▁of▁sentence｜>",
            '<｜DSML｜invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}'
            '<｜DSML｜parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">'
            "{{ v if v is string else v | tojson }}</｜DSML｜parameter>\n{% endfor %}"
            "</｜DSML｜invoke>",
            first="<｜DSML｜function_calls>\n", between="{{ '\n' }}",
            last="\n</｜DSML｜function_calls>",
            tool="<function_results>{{ m.content }}</function_results>",
        ),
        ("<｜user｜>", "<｜end▁of▁sentence｜>", "<｜assistant｜>", "｜DSML｜"),
    ),
    "minimax": Family(
        "minimax",
        _template(
            "]~b]{role}\n", "[e~[\n",
            '<invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}<parameter '
            'name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}'
            "</invoke>\n",
            first="\n<minimax:tool_call>\n", last="</minimax:tool_call>",
            tool="]~b]tool\n<response>{{ m.content }}</response>[e~[\n",
        ),
        ("]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"),
    ),
}  # fmt: skip

PLAIN = {
    "phi4": Family(
        "fenced",
        "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}",
        (*_IM, "<|im_sep|>"),
    ),
    "gemma3": Family(
        "fenced",
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<start_of_turn>", "<end_of_turn>"),
    ),
}
"""Families whose templates have no tools."""


def _bytes() -> list[str]:
    """Letters that stand for the bytes 0 to 255 in byte-level vocabularies."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (256 + n for n in range(256))
    return [chr(b) if b in kept else chr(next(others)) for b in range(256)]


def backend(marks=(), plain=(), template=None, end="<end>") -> PreTrainedTokenizerFast:
    own = Backend(models.BPE({letter: i for i, letter in enumerate(_bytes())}, []))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens(list(marks))
    own.add_tokens([AddedToken(token, normalized=False) for token in plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=own, chat_template=template, eos_token=end, pad_token=end
    )


@functools.cache
def tokenizer_of(name: str) -> Tokenizer:
    family = (FAMILIES | PLAIN)[name]
    fast = backend(family.marks, family.plain, family.template, family.marks[1])
    return Tokenizer(fast, map(fast.convert_tokens_to_ids, family.more), name)


@functools.cache
def _plain_bytes() -> Tokenizer:
    return Tokenizer(backend(("<a>", "<end>"), template="{{ messages[0].content }}"))


def sampled(tokenizer: Tokenizer, before: str, held: str, after: str) -> list[int]:
    """Ids of an action in which the text ``held`` is sampled as ordinary tokens, not special."""
    return [*tokenizer.encode(before), *_plain_bytes().encode(held), *tokenizer.encode(after)]


def call_of(name: str, arguments: dict) -> dict:
    function = {"name": name, "arguments": arguments}
    return {"id": "call00000", "type": "function", "function": function}
