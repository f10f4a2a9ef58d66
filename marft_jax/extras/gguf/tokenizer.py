"""Tokenizer, special tokens and chat template out of the metadata of a GGUF file."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from marft_jax.errors import BadInput
from marft_jax.extras.gguf import vocabulary
from marft_jax.formats.foreign import readable
from marft_jax.models.tokenizers.tokenizer import Tokenizer, import_transformers

_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Makes the tokenizer that a GGUF file's metadata describes.

    Raises:
        BadInput: the vocabulary is of a kind that is not known.
    """
    with readable(source, "GGUF tokenizer"):
        backend = vocabulary.from_gguf(metadata, source)
        tokens, special = metadata["tokenizer.ggml.tokens"], dict[str, str]()
        for name, key in _SPECIAL.items():
            if (i := _special_id(metadata, key)) is not None:
                special[name] = tokens[i]
        uncopied: Any = types.SimpleNamespace(__deepcopy__=lambda memo: backend)  # a copy is slow
        fast = import_transformers().PreTrainedTokenizerFast(
            tokenizer_object=uncopied, chat_template=_templates(metadata), **special
        )
        end_of_turn = _special_id(metadata, "eot")
        return Tokenizer(fast, [] if end_of_turn is None else [end_of_turn], source)


def _special_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """Id of a special token. Files of llama.cpp write -1, in 32 bits, for a token that they lack.

    Raises:
        BadInput: it is the id of no token.
    """
    key, tokens = f"tokenizer.ggml.{name}_token_id", len(metadata["tokenizer.ggml.tokens"])
    number = metadata.get(key)
    if number in (None, -1, 2**32 - 1):
        return None
    if type(number) is not int or not 0 <= number < tokens:
        raise BadInput(f"{key}: expected an id below {tokens}, or -1 for none, got {number!r:.60}")
    return number


def _templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat template; where there are several, all by their names, as in a model's folder."""
    key = "tokenizer.chat_template"
    named = {k.removeprefix(f"{key}."): metadata[k] for k in metadata if k.startswith(f"{key}.")}
    templates = ({"default": metadata[key]} if key in metadata else {}) | named
    return templates if len(templates) > 1 else next(iter(templates.values()), None)
