"""Constrains an action to texts of a form, such as a JSON schema, by the package llguidance."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from marft_jax.errors import BadInput, described, one_line
from marft_jax.formats.foreign import readable
from marft_jax.models.tokenizers.tokenizer import Tokenizer
from marft_jax.sampling.constraints import Constraint
from marft_jax.types import without_thinking


def check(form: str, where: str, tokenizer: Tokenizer | None = None, rest: bool = True) -> None:
    """Checks that a form can be compiled.

    Args:
        form: as ``sampling.Request`` has it.
        where: where it stands, for messages.
        tokenizer: of the model that writes texts of the form.
        rest: keywords that no grammar holds may be left for later, see ``violates``.

    Raises:
        BadInput: it cannot, or llguidance is missing or does not know the tokenizer.
    """
    try:
        fault = _fault(form, rest)
    except (ImportError, AttributeError, TypeError) as error:
        what = f'llguidance 1.9 or newer: pip install -U -e ".[structured]" ({described(error)})'
        raise BadInput(f"{where}: needs {what}") from error
    if tokenizer is not None:
        kind = "tokenizer for llguidance; take another base, or no schema"
        with readable(f"{where}: that of the model", kind):
            _tokens(tokenizer, tokenizer.vocab_size)
    if fault:
        raise BadInput(f"{where}: expected a JSON schema that can be compiled: {one_line(fault)}")


def violates(form: str, text: str) -> bool:
    """True for JSON that breaks its schema, where the schema has keywords that no grammar holds."""
    if not _has_rest(form):
        return False
    from jsonschema.validators import validator_for

    schema = _schema_of(form)
    try:
        return not validator_for(schema)(schema).is_valid(json.loads(without_thinking(text)))
    except (ValueError, re.error):  # cut off; or another pattern is one of the grammar alone
        return False


def constraint(tokenizer: Tokenizer, vocabulary: int, form: str) -> Constraint:
    """Makes the constraint of one action.

    Args:
        vocabulary: tokens of the model, which may be more or fewer than the tokenizer's.
        form: as ``sampling.Request`` has it.
    """
    from llguidance import LLMatcher
    from llguidance import numpy as masks

    size = max(vocabulary, tokenizer.vocab_size)
    tokens, _ = _tokens(tokenizer, size)
    matcher = LLMatcher(tokens, grammar_for(form, tokenizer))
    bits, read = masks.allocate_token_bitmask(1, size), 0

    def allowed(ids: Sequence[int]) -> np.ndarray | None:
        nonlocal read
        if ids and ids[-1] in tokenizer.eos_ids:
            return None
        matcher.consume_tokens(list(ids[read:]))
        read = len(ids)
        if matcher.is_stopped():  # the text is complete
            return np.isin(np.arange(vocabulary), tokenizer.eos_ids)
        masks.fill_next_token_bitmask(matcher, bits, 0)
        return np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocabulary].astype(bool)

    return allowed


def grammar_for(form: str, tokenizer: Tokenizer) -> str:
    """The grammar of a form for a model with this tokenizer."""
    return grammar_of(form, _tokens(tokenizer, tokenizer.vocab_size)[1])


@functools.lru_cache(maxsize=64)
def _fault(form: str, rest: bool) -> str:
    """What cannot be compiled, behind the path of the innermost schema that has it; "" if nothing
    is."""
    fault = _invalid(form, rest)
    if not fault:
        return ""
    ways = json.loads(form)
    parts = [ways] if isinstance(ways, dict) else [part for way in ways for part in way]
    for whole in (part for part in parts if isinstance(part, dict)):
        named = {key: whole[key] for key in _DEFINED if key in whole}
        for path, schema in _schemas(whole):
            if inner := _invalid(json.dumps(named | schema), rest):
                return f"{path}: {inner}"
    return fault


def _invalid(form: str, rest: bool) -> str:
    from llguidance import LLMatcher

    try:
        return LLMatcher.validate_grammar(grammar_of(form, rest=rest))
    except ValueError as error:
        return str(error)


_DEFINED = ("$defs", "definitions")
_MAPS = (*_DEFINED, "properties", "patternProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def _schemas(schema: dict[str, Any], path: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and those in it, with their paths; inner ones come first."""
    for key, value in schema.items():
        inner: Any = ()
        if key in _MAPS and isinstance(value, dict):
            inner = value.items()
        elif key in _LISTS and isinstance(value, list):
            inner = enumerate(value)
        elif key in ("items", "additionalProperties"):
            inner = [("", value)]
        for name, part in inner:
            if isinstance(part, dict):  # not true or false
                yield from _schemas(part, f"{path}/{key}/{name}".removesuffix("/"))
    yield path, schema


@functools.lru_cache(maxsize=64)
def _holds(keyword: str, value: str) -> bool:
    """True where grammars have this ``format`` or ``pattern`` of texts."""
    from llguidance import LLMatcher

    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(
        json.dumps({"type": "string", keyword: value})))  # fmt: skip


def _rest(schema: dict[str, Any]) -> Iterator[str]:
    """Keywords that no grammar holds, and that a whole text can be checked for."""
    if schema.get("uniqueItems") is True:
        yield "uniqueItems"
    if isinstance(pattern := schema.get("pattern"), str) and not _holds("pattern", pattern):
        with contextlib.suppress(re.error):
            re.compile(pattern)
            yield "pattern"


@functools.lru_cache(maxsize=64)
def _has_rest(form: str) -> bool:
    return any(any(_rest(schema)) for _, schema in _schemas(_schema_of(form)))


def _schema_of(form: str) -> dict[str, Any]:
    """The schema of a text that is JSON alone; an empty one where every text is a call."""
    ways = json.loads(form)
    whole = ways if isinstance(ways, dict) else ways[0][0]
    return whole if isinstance(whole, dict) else {}


def _for_grammar(schema: dict[str, Any], rest: bool) -> dict[str, Any]:
    """A schema without keywords that ask for nothing, and without the rest."""
    for _, inner in _schemas(schema := copy.deepcopy(schema)):
        if isinstance(name := inner.get("format"), str) and not _holds("format", name):
            del inner["format"]
        if inner.get("uniqueItems") is False:
            del inner["uniqueItems"]
        for keyword in [*_rest(inner)] if rest else ():
            del inner[keyword]
    return schema


# The lexer takes the longest piece and does not go back. So texts are cut as JSON is, where a call
# and a schema may begin alike, and a free text is one piece with what ends it.
_PIECES = re.compile(r'"(?:\\.|[^"\\])*"|[:,] |[^":,{}\[\]]+|.')
_TEXT = r"(?s:[^<]|<+[^<\/])*<*"
# gpt-oss writes its thoughts and its answer as messages of different channels; a call that is
# required begins at once
_THOUGHT = ["<|channel|>analysis<|message|>", [], "<|end|><|start|>assistant"]
_FINAL = "<|channel|>final<|message|>"
_ONE_LINE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON is written on one line, as Python's ``json`` does: a model that may write white space
anywhere may never end."""


@functools.lru_cache(maxsize=64)
def grammar_of(form: str, special: tuple[tuple[str, int], ...] = (), rest: bool = True) -> str:
    """The grammar of a form.

    Args:
        rest: leave out what no grammar holds.
        special: spelling and id of special tokens, which the texts of the form may hold.
    """
    from llguidance import LLMatcher

    ways, ids = json.loads(form), dict(special)
    each = [[ways]] if isinstance(ways, dict) else ways
    whole = [isinstance(way[0], dict) for way in each]  # JSON alone
    if any(whole) and {"<|channel|>", "<|message|>", "<|end|>"} <= ids.keys():
        both = zip(whole, each, strict=True)
        ways = [[_THOUGHT, _FINAL * is_json, *way] for is_json, way in both]
    if isinstance(ways, dict):
        return LLMatcher.grammar_from_json_schema(_for_grammar(ways, rest), overrides=_ONE_LINE)
    marks = re.compile(f"({'|'.join(map(re.escape, ids)) or '(?!)'})")

    def terms(way: list[Any]) -> Iterator[str]:
        free = ""  # pattern of a free text, to which what ends it is joined
        for part in way:
            if isinstance(part, list):
                free = free if part else _TEXT
                yield from [f"({' '.join(terms(part))})?"] if part else ()
            elif isinstance(part, dict):
                yield f"%json {json.dumps(_for_grammar(part, rest) | {'x-guidance': _ONE_LINE})}"
            else:
                for text in filter(None, marks.split(part)):
                    end = "" if text in ids else re.escape(text).replace("/", r"\/")
                    if free:
                        yield f"/{free}{end}/".replace("\n", "n")  # a line break is escaped
                    if text in ids:
                        yield f"<[{ids[text]}]>"
                    elif not free:
                        yield from map(json.dumps, _PIECES.findall(text))
                    free = ""

    ends = (" ".join(terms(way)) for way in ways)
    return LLMatcher.grammar_from_lark(f"start: {' | '.join(ends)}")


@functools.lru_cache(maxsize=8)
def _tokens(tokenizer: Tokenizer, vocabulary: int) -> tuple[Any, tuple[tuple[str, int], ...]]:
    """The tokens of a model, and spelling and id of those that are special."""
    from llguidance import hf

    tokens = hf.from_tokenizer(tokenizer.backend, vocabulary, list(tokenizer.eos_ids))
    added = tokenizer.backend.added_tokens_decoder.items()
    return tokens, tuple((str(token), i) for i, token in added if tokens.is_special_token(i))
