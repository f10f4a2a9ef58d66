"""Texts that follow a JSON schema."""

from __future__ import annotations

import json
from collections import Counter

import bounds
import numpy as np
import pytest
import small
from families_of_calls import FAMILIES, tokenizer_of
from programs import LLAMA, MISTRAL, TAGGED, with_template
from scripted import Scripted
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from marft_jax.background import DaemonThreads
from marft_jax.errors import BadInput
from marft_jax.extras.structured import grammar
from marft_jax.extras.structured.grammar import check, constraint, violates
from marft_jax.models.tokenizers.tokenizer import FALLBACK_TEMPLATE, ByteTokenizer, Tokenizer
from marft_jax.rollout.rollout import Rollout
from marft_jax.sampling.protocol import Completion, Request
from marft_jax.settings import config as config_lib
from marft_jax.team.assemble import make_team
from marft_jax.team.profiles import Profile
from marft_jax.team.team_files import Blueprint, dump_team, load_team
from marft_jax.team.workflows import find_workflow
from marft_jax.tools import find_calls, form_of_call, form_with_calls
from marft_jax.types import MAIN, Sampling, StepResult, without_thinking

TOKENIZER = ByteTokenizer()
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yy"]}},
          "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
FORM = json.dumps(SCHEMA)


def drawn(tokenizer, form, rng, prefer=lambda able, ids: []):
    """Random choices among what a form allows, of those preferred if there are; did it end?"""
    allowed, ids = constraint(tokenizer, max(264, tokenizer.vocab_size), form), list[int]()
    while (mask := allowed(ids)) is not None and len(ids) < 600:
        able = np.flatnonzero(mask)
        ids.append(int(rng.choice(prefer(able, ids) or able)))
    return ids, mask is None


@pytest.mark.slow
def test_a_row_with_a_schema_writes_json_and_the_rows_beside_it_write_what_they_wrote_alone():
    """And log-probs are those among the tokens that may follow, by a full forward pass."""
    rng = np.random.default_rng(0)
    plain = [Request(rng.integers(0, 256, 9).astype(np.int32), i % 3, Sampling(40), (0, i, 0, 0))
             for i in range(6)]  # fmt: skip
    asked = [r._replace(form=FORM) if i % 2 else r for i, r in enumerate(plain)]
    sizes = dict(slots=4, context=64, longest=40, eos_ids=TOKENIZER.eos_ids)
    engine = small.engine(**sizes, forms=lambda form: constraint(TOKENIZER, 264, form))
    done, alone = small.answers(engine, asked), small.answers(small.engine(**sizes), plain[::2])
    for free, own in zip(done[::2], alone, strict=True):
        np.testing.assert_array_equal(free.ids, own.ids)
    for written in done[1::2]:
        found = json.loads(TOKENIZER.decode(written.ids.tolist()))
        assert written.reason == "end" and {*found} == {"a", "b"} and found["b"] in ("x", "yy")
        assert written.filtered_mass < 0.5
    scored = small.full_forward(
        small.adapters(3), [r.prompt for r in asked], [c.ids for c in done],
        [r.owner for r in asked], [1.0] * 6,
    )  # fmt: skip
    for request, written, logprobs in zip(asked, done, scored, strict=True):
        own = constraint(TOKENIZER, 264, FORM) if request.form else lambda ids: None
        expected = small.masked(logprobs, written.ids, own)
        np.testing.assert_allclose(written.logprobs, expected, atol=bounds.logprobs())


TOOL = {"type": "object", "properties": {"n": {"type": "boolean"}, "s": {"enum": ["x", "é"]}},
        "required": ["n"]}  # fmt: skip
MARKED = LLAMA.replace('{"name"', '<|system|>{"name"')
"""Calls behind a special token, as of Mistral."""


@pytest.mark.parametrize("template", [TAGGED, LLAMA, MISTRAL, MARKED, FALLBACK_TEMPLATE])
def test_every_text_of_random_choices_is_a_call_in_the_form_of_the_template(template):
    """Of a tool whose arguments follow its schema; or it follows the schema of an answer."""
    tokenizer, rng = with_template(template), np.random.default_rng(2)
    tools = [{"function": {"name": name, "parameters": TOOL}} for name in ("add", "ad")]
    answer = {"type": "object", "properties": {"nam": {"enum": ["ad", "x"]}},
              "required": ["nam"], "additionalProperties": False}  # fmt: skip
    ways = [*(form_of_call(tool, tokenizer) for tool in tools), [answer]]
    seen = set()
    for _ in range(60):
        ids, _ = drawn(tokenizer, json.dumps(ways), rng)
        assert (ids[0] == ByteTokenizer.SYSTEM) == (template == MARKED) or ids[0] == ord("{")
        text, calls = find_calls(ids, tools, tokenizer)
        assert [text, len(calls)] in (["", 1], ['{"nam": "ad"}', 0], ['{"nam": "x"}', 0])
        for call in calls:
            found = json.loads(call.arguments)
            assert {"n"} <= {*found} <= {"n", "s"} and found.get("s", "x") in ("x", "é")
            assert isinstance(found["n"], bool)
        seen.add(calls[0].name if calls else "JSON")
    assert seen == {"add", "ad", "JSON"}


MIXED = {"type": "object", "properties": {"n": {"type": "boolean"}, "e": {"enum": [1, 2]},
         "t": {"type": "string", "maxLength": 3}}, "required": ["n", "t"]}  # fmt: skip
QUOTES_BY_A_TOKEN = ("gemma4", "lfm2", "lfm2.5", "olmo3")


@pytest.mark.parametrize("with_calls", [False, True])
def test_json_stands_in_the_final_channel_of_a_model_that_writes_channels(with_calls):
    """It may think before, as it was trained to; a call has its own head."""
    tokenizer, rng = tokenizer_of("gpt-oss"), np.random.default_rng(5)
    tools = [{"function": {"name": "add", "parameters": TOOL}}]
    form, seen = form_with_calls(FORM, tools, tokenizer) if with_calls else FORM, set()
    check(form, "format", tokenizer)
    ends = [*tokenizer.encode("<|end|>"), ord("b")]
    for _ in range(40):
        ids, _ = drawn(tokenizer, form, rng, lambda able, ids: [i for i in able if i in ends])
        said = tokenizer.said([], ids)
        if not (calls := find_calls(ids, tools, tokenizer, form)[1]):
            assert {*json.loads(without_thinking(said))} == {"a", "b"}
            assert not violates(form, said)
        seen.add((len(calls), said.startswith("<think>")))
    assert len(seen) == 2 + 2 * with_calls


LIKE_CALLS = [{"name": "add", "arguments": {"n": True}}, {"name": "x", "parameters": {"n": 1}},
              {"t": '<tool_call> {"name": "add", "arguments": {}} </tool_call>'}]  # fmt: skip


@pytest.mark.parametrize("name", ["llama3", "mistral", "hermes", "qwen3.5", "glm", "deepseek3.1"])
@pytest.mark.parametrize("answer", [json.dumps(one) for one in LIKE_CALLS])
def test_an_answer_that_follows_the_schema_is_no_call(name, answer):
    """The grammar decides, as it does for a call, also where the answer looks like a call."""
    tokenizer = tokenizer_of(name)
    tools = [{"function": {"name": "add", "parameters": TOOL}}]
    form = form_with_calls('{"type": "object"}', tools, tokenizer)
    assert find_calls(tokenizer.encode(answer), tools, tokenizer, form)[1] == []
    call = tokenizer.encode(tokenizer.write_call("add", {"n": True}) or "")
    assert len(find_calls(call, tools, tokenizer, form)[1]) == 1


@pytest.mark.parametrize("name", sorted({*FAMILIES} - {*QUOTES_BY_A_TOKEN}))
def test_every_text_of_random_choices_is_a_call_in_the_form_of_a_family(name):
    tokenizer, rng = tokenizer_of(name), np.random.default_rng(3)
    tools = [{"function": {"name": "add", "parameters": MIXED}}]
    form, ended = json.dumps([form_of_call(tools[0], tokenizer)]), 0
    check(form, "tools", tokenizer)

    def prefer(able, ids):
        free = [i for i in able if i in [*b"ab<>/ \n\"'"]]
        return free if len(free) > 1 and rng.random() < 0.6 else []

    for _ in range(12):
        ids, is_whole = drawn(tokenizer, form, rng, prefer)
        if not is_whole:
            continue
        [call] = find_calls(ids, tools, tokenizer)[1]
        found = json.loads(call.arguments)
        assert call.name == "add" and {"n", "t"} <= {*found} <= {"n", "t", "e"}
        assert isinstance(found["n"], bool) and found.get("e", 1) in (1, 2)
        ended += 1
    assert ended


@pytest.mark.parametrize("name", QUOTES_BY_A_TOKEN)
def test_a_form_that_no_grammar_holds_is_said(name):
    with pytest.raises(BadInput, match="at auto|rename it"):
        form_of_call({"function": {"name": "add", "parameters": MIXED}}, tokenizer_of(name))


@pytest.mark.parametrize("asked", [
    ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, "uniqueItems"),
    ({"type": "string", "pattern": "^(?!x)[a-z]+$"}, "look-ahead"),
    ({"anyOf": [{"type": "null"}, {"not": {}}]}, "not", "/anyOf/1"),
    ({"type": "array", "items": {"type": "string", "pattern": r"\bx"}}, "lookarounds", "/items"),
    ({"properties": 3}, "properties"),
    ({"anyOf": {"a": 1}}, "anyOf"),
])  # fmt: skip
@pytest.mark.parametrize("where", ["properties/a", "$defs/Own"])
def test_what_cannot_be_compiled_is_said_with_its_path(asked, where):
    own, keyword, *below = asked
    schema = {"type": "object", "properties": {"a": own, "format": {"type": "string"}}}
    if where == "$defs/Own":
        schema = {"$defs": {"Own": own}, "type": "array", "items": {"$ref": "#/$defs/Own"}}
    for form in (schema, [["call: ", schema]]):
        with pytest.raises(BadInput) as error:
            check(json.dumps(form), "here", rest=False)
        path, _, fault = str(error.value).partition("#/")[2].partition(": ")
        assert path == where + "".join(below) and keyword in fault and "\n" not in fault


REST = [
    ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, [[], [2, 1]], [[1, 1]]),
    ({"type": "string", "pattern": "^(?!x)[a-z]{2}$"}, ["ab"], ["xa", "a"]),
    ({"type": "string", "pattern": r"\bend\b"}, ["the end"], ["ended"]),
    ({"type": "string", "pattern": r"^(.)\1$"}, ["aa"], ["ab"]),
]  # fmt: skip


@pytest.mark.parametrize(("own", "good", "bad"), REST)
@pytest.mark.parametrize("inner", [False, True])
def test_keywords_that_no_grammar_holds_are_checked_afterwards(own, good, bad, inner):
    """Also behind a reference, and beside a pattern that Python's expressions do not have."""
    known = {"type": "string", "pattern": r"^[\w-]{0,9}$"}
    schema = {"$defs": {"Own": own}, "properties": {"a": {"$ref": "#/$defs/Own"}, "b": known}}
    form = json.dumps(schema if inner else own)
    check(form, "here")
    for value in good + bad:
        written = json.dumps({"a": value} if inner else value)
        assert violates(form, written) == (value in bad)
        assert not violates(form, written[:-1])  # cut off
    assert not violates(json.dumps(known), '"x y"')  # a grammar holds it
    with pytest.raises(BadInput, match="#/.defs/Own: " if inner else "#: "):
        check(form, "here", rest=False)
    odd = {"anyOf": [own, {"type": "string", "pattern": r"^\p{Greek}\z"}]}
    check(json.dumps(odd), "here")
    assert not violates(json.dumps(odd), '"xa"')


def test_a_format_that_no_grammar_knows_is_a_remark():
    """As pydantic and OpenAPI write them; a constant that looks like one stays."""
    names = "uuid4 binary path password ipv4network int64 json-string".split()
    schema = {"type": "object", "properties": {
        **{n: {"type": "string", "format": n, "maxLength": 2} for n in names},
        "known": {"type": "string", "format": "date"}, "own": {"const": {"format": "uuid4"}},
        "list": {"type": "array", "items": {"enum": [3]}, "uniqueItems": False, "maxItems": 1},
    }, "required": ["own", "known"], "additionalProperties": False}  # fmt: skip
    for form in (schema, [[schema]]):
        check(json.dumps(form), "here")
        plain = lambda able, ids: [i for i in able if i < 128]  # noqa: E731
        ids, _ = drawn(TOKENIZER, json.dumps(form), np.random.default_rng(0), plain)
        found = json.loads(TOKENIZER.decode(ids))
        assert found["own"] == {"format": "uuid4"} and len(found["known"].split("-")) == 3


def test_an_agent_has_a_schema_in_the_team_file(tmp_path):
    file = tmp_path / "team.yaml"
    file.write_text(dump_team(Blueprint((Profile("solver", answers=True, format=SCHEMA),))))
    blueprint = load_team(str(file))
    team = small.team_of(blueprint)
    assert json.loads(team.profiles[0].form) == SCHEMA
    with pytest.raises(BadInput, match="'solver': format: expected a JSON schema"):
        small.team_of(Blueprint((Profile("solver", answers=True, format={"type": "objekt"}),)))


BOTH = Blueprint((Profile("solver", answers=True, format=SCHEMA, tools=("calculator",)),))


def walk(tokenizer, form, rng):
    """A text that ends, of random choices among what a form allows."""

    def prefer(able, ids):
        return [i for i in able if i in (*b'"1\n</',) or i > 255] if len(ids) > 3 else []

    while True:
        ids, is_whole = drawn(tokenizer, form, rng, prefer)
        if is_whole:
            return ids


@pytest.mark.parametrize("name", ["fenced", *sorted({*FAMILIES} - {*QUOTES_BY_A_TOKEN})])
def test_an_agent_with_tools_and_a_schema_calls_them_and_then_writes_json(name):
    """In the form of calls of any family; where no call would be answered, JSON is all it can
    write."""
    tokenizer = TOKENIZER if name == "fenced" else tokenizer_of(name)
    rng, seen = np.random.default_rng(4), Counter[int]()
    settings = config_lib.Team(max_new_tokens=200)
    team = make_team(settings, "per_agent", BOTH, {MAIN: (tokenizer, 4000)})

    class Random(Scripted):
        def _answer(self, request):
            ids = np.array(walk(tokenizer, request.form, rng), np.int32)
            return Completion(ids, np.zeros(len(ids), np.float32), "end", version=self._version)

        def step(self):
            now, self._waiting = self._waiting, []
            return [(ticket, self._answer(request)) for ticket, request in now]

    rollout = Rollout(Random(None), team, find_workflow("solo"), Length, DaemonThreads(),
                      max_tool_calls=2)  # fmt: skip
    played = rollout.play(small.samples(range(12)), 0)
    assert not played.failed
    for episode in played.episodes:
        *before, last = episode.turns
        assert {*json.loads(without_thinking(last.text))} == {*SCHEMA["properties"]}
        for turn in before:
            [call] = turn.calls
            assert call.name == "calculator" and {*json.loads(call.arguments)} == {"expression"}
        assert len(before) < 2 or last.form == team.profiles[0].form != before[0].form
        seen[len(before)] += 1
    assert {0, 2} <= {*seen} <= {0, 1, 2}


@pytest.mark.parametrize("name", QUOTES_BY_A_TOKEN)
def test_tools_and_a_schema_for_a_form_of_calls_that_no_grammar_holds(name):
    with pytest.raises(BadInput, match="agent 'solver': tools: expected"):
        make_team(config_lib.Team(), "per_agent", BOTH, {MAIN: (tokenizer_of(name), 4000)})


class Length:
    """Pays the number of letters of an answer."""

    def reset(self, seed):
        return "go"

    def step(self, turns):
        return StepResult("", len(turns[-1].text), True)


def test_a_text_that_breaks_a_keyword_that_no_grammar_holds_is_graded_as_empty():
    profile = Profile("solver", answers=True, format={**REST[0][0], "maxItems": 2})
    team, texts = small.team_of(Blueprint((profile,))), ["[1, 1]", "[1, 2]", "[1, "]
    engine = Scripted(lambda request: texts[request.key.task])
    player = Rollout(engine, team, find_workflow("solo"), Length, DaemonThreads())
    episodes = player.play(small.samples(range(3)), 0).episodes
    assert [e.results[0].reward for e in episodes] == [0, 6, 3]
    assert [e.turns[0].text for e in episodes] == [text.strip() for text in texts]
    with pytest.raises(BadInput, match="'solver': format: .*#: .*uniqueItems"):
        small.team_of(Blueprint((profile,)), format_rest="refused")


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Metaspace()])
@pytest.mark.parametrize("where", ["team", "call"])
def test_a_tokenizer_that_the_grammar_library_does_not_know_is_one_line_at_the_start(
    decoder, where, monkeypatch
):
    backend = Backend(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    odd = Tokenizer(fast, source="odd")
    with pytest.raises(BadInput, match="at: .*not a readable tokenizer for llguidance") as error:
        check(FORM if where == "team" else json.dumps([[SCHEMA]]), "at", odd)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("fault", [ImportError("no LLMatcher"), TypeError("y")])
def test_a_grammar_library_that_is_too_old_is_one_line(fault, monkeypatch):
    def fail(form, rest):
        raise fault

    monkeypatch.setattr(grammar, "_fault", fail)
    with pytest.raises(BadInput, match="at: needs llguidance 1.9 or newer: pip install -U"):
        check(FORM, "at")
