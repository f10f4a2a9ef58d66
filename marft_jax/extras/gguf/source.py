"""Opens a GGUF file as a base model."""

from __future__ import annotations

from pathlib import Path

from marft_jax.extras.gguf import config, tensors, tokenizer
from marft_jax.models.weights.sources import Source, digest_of


def open_file(path: Path) -> Source:
    """Reads the header; tensors are read when they are asked for.

    Raises:
        BadInput: the file is no intact GGUF file.
    """
    file = tensors.open_gguf(path)
    return Source(
        lambda: config.read_config(file),
        lambda config, shapes, quantize: tensors.read(file, config, shapes, quantize),
        lambda: tokenizer.from_gguf(file.metadata, str(path)),
        lambda: digest_of([path], file.header_bytes),
    )
