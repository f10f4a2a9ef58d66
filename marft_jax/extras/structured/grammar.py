"""Constrains an action to texts that a JSON schema accepts, by the package llguidance."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

from marft_jax.engine.constraints import Constraint
from marft_jax.errors import BadInput, one_line
from marft_jax.models.tokenizers.tokenizer import Tokenizer


def check(schema: str, where: str) -> None:
    """Checks that a schema can be compiled.

    Args:
        schema: JSON schema, as text.
        where: where it stands, for messages.

    Raises:
        BadInput: it cannot, or llguidance is not installed.
    """
    if importlib.util.find_spec("llguidance") is None:
        raise BadInput(f'{where}: needs llguidance: pip install -e ".[structured]"')
    from llguidance import LLMatcher

    try:
        fault = LLMatcher.validate_grammar(_compiled(schema))
    except ValueError as error:
        fault = str(error)
    if fault:
        raise BadInput(f"{where}: expected a JSON schema that can be compiled: {one_line(fault)}")


def constraint(tokenizer: Tokenizer, vocabulary: int, schema: str) -> Constraint:
    """Makes the constraint of one action.

    Args:
        vocabulary: tokens of the model, which may be more than the tokenizer's.
    """
    from llguidance import LLMatcher
    from llguidance import numpy as masks

    matcher = LLMatcher(_tokens(tokenizer, vocabulary), _compiled(schema))
    bits, read = masks.allocate_token_bitmask(1, vocabulary), 0

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


@functools.lru_cache(maxsize=64)
def _compiled(schema: str) -> str:
    """The grammar of a schema. JSON is written on one line, as Python's ``json`` does: a model that
    may write white space anywhere may never end."""
    from llguidance import LLMatcher

    form: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return LLMatcher.grammar_from_json_schema(schema, overrides=form)


@functools.lru_cache(maxsize=8)
def _tokens(tokenizer: Tokenizer, vocabulary: int) -> Any:
    from llguidance import hf

    return hf.from_tokenizer(tokenizer.backend, vocabulary, list(tokenizer.eos_ids))
