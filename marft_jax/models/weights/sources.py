"""Where a base model comes from: the built-in one, a directory, a hub id, or a file."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from marft_jax.errors import BadInput, reason
from marft_jax.formats.foreign import read_settings
from marft_jax.models import config_json
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer, Tokenizer, from_directory
from marft_jax.models.weights import safetensors, tiny
from marft_jax.plugins import EXTRAS, load_extra

Tensors = Iterable[tuple[str, np.ndarray]]
Shapes = dict[str, tuple[int, ...]]

_PAGE, _PAGES = 64 * 1024, 64
_WANTED = ["*.json", "*.safetensors", "*.model", "*.jinja"]
_UNWANTED = ["original/*", "consolidated*", "onnx/*", "*/*"]
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Source(NamedTuple):
    """A model of which nothing has been read yet."""

    config: Callable[[], DecoderConfig]
    tensors: Callable[[DecoderConfig, Shapes, str], Tensors]
    tokenizer: Callable[[], Tokenizer]
    digest: Callable[[], str]


def load_tokenizer(source: str) -> Tokenizer:
    """Loads the tokenizer of the model that ``--model.base`` names. For a directory or a hub id,
    the weights are not needed.

    Raises:
        BadInput: there is no such model, or its tokenizer cannot be used.
    """
    return open_source(source, ["*.json", "*.model", "*.jinja"]).tokenizer()


def decoder_config(source: str) -> DecoderConfig:
    """Reads the shape of the model that ``--model.base`` names. For a directory or a hub id, only
    config.json is needed.

    Raises:
        BadInput: there is no such model, or it is not supported.
    """
    return open_source(source, ["config.json"]).config()


def directory_of(source: str) -> Path | None:
    """Directory with a base's config.json and tokenizer; None for ``tiny`` and for files."""
    path = _locate(source)
    return path if path and path.is_dir() else None


def _locate(base: str, wanted: Sequence[str] = _WANTED) -> Path | None:
    """A directory (of a hub id: of the wanted files) or a file; None for the built-in model.

    Raises:
        BadInput: it is none of these, or the hub does not give it.
    """
    path = Path(base)
    if base == "tiny":
        return None
    is_file_of_extra = _format_of(path) in EXTRAS
    if path.is_dir() or (is_file_of_extra and path.is_file()):
        return path
    if is_file_of_extra:
        raise BadInput(f"--model.base: no such file: {base} (see scripts/fetch_model.py)")
    if path.exists() or not _HUB_ID.fullmatch(base):
        raise BadInput(
            "--model.base: expected tiny, a directory with config.json, a .gguf file or a hub id, "
            f"got {base!r}{'' if path.exists() else ', which does not exist'}"
        )
    return _download(base, wanted)


def _format_of(path: Path) -> str:
    """Names the extra that reads files of this kind, where there is one."""
    return f"model{path.suffix.lower()}"


def open_source(base: str, wanted: Sequence[str] = _WANTED) -> Source:
    """Opens the model that ``--model.base`` names.

    Raises:
        BadInput: there is no such model, or the download failed.
    """
    path = _locate(base, wanted)
    if path is None:
        return _open_tiny()
    return _open_directory(path) if path.is_dir() else load_extra(_format_of(path))(path)


def _open_tiny() -> Source:
    def tensors(config: DecoderConfig, shapes: Shapes, quantize: str) -> Tensors:
        """The file has ``[in, out]``, and paths without the parts of a layer."""
        paths = {re.sub("/(mixer|mlp)/", "/", path): path for path in shapes}
        return ((paths[p], x.T if p.endswith("/kernel") else x) for p, x in tiny.tensors())

    return Source(lambda: tiny.CONFIG, tensors, ByteTokenizer, tiny.digest)


def _open_directory(directory: Path) -> Source:
    file = directory / "config.json"

    def config() -> DecoderConfig:
        if not file.is_file():
            raise BadInput(f"{directory}: expected a config.json in the model directory")
        has_head = functools.partial(safetensors.has_head, directory)
        return config_json.read_config(read_settings(file), str(file), has_head)

    return Source(
        config,
        lambda config, shapes, _: safetensors.read(directory, config, shapes),
        lambda: from_directory(directory),
        lambda: digest_of([file, *safetensors.weight_files(directory)]),
    )


def _download(hub_id: str, wanted: Sequence[str]) -> Path:
    """Downloads a model's files, unless the cache has them."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=[*wanted], ignore_patterns=_UNWANTED))
    except Exception as error:  # network and hub errors of several libraries
        raise BadInput(
            f"--model.base: {hub_id!r} is no file or directory here, and the hub gives none "
            f"({reason(error)}); check the name, or fetch it elsewhere with "
            "scripts/fetch_model.py"
        ) from error


def digest_of(files: list[Path], header_bytes: int = 1 << 16) -> str:
    """SHA-256 over each file's size, its header and ``_PAGES`` evenly spaced pages.

    Costs the same for every size of model; names and places of the files do not count.
    """
    sha = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        sha.update(size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            starts = ((size - _PAGE) * i // (_PAGES - 1) for i in range(_PAGES))
            for start, length in ((0, header_bytes), *((max(start, 0), _PAGE) for start in starts)):
                stream.seek(start)
                sha.update(stream.read(length))
    return sha.hexdigest()
