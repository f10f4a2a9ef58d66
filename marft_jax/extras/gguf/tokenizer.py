"""Tokenizer, special tokens and chat template out of the metadata of a GGUF file."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

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
            if (i := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
                special[name] = tokens[i]
        template = metadata.get("tokenizer.chat_template")
        uncopied: Any = types.SimpleNamespace(__deepcopy__=lambda memo: backend)  # a copy is slow
        fast = import_transformers().PreTrainedTokenizerFast(
            tokenizer_object=uncopied, chat_template=template, **special
        )
        end_of_turn = metadata.get("tokenizer.ggml.eot_token_id")
        return Tokenizer(fast, [] if end_of_turn is None else [end_of_turn], source)
