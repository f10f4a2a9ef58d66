"""Adapters as folders of peft, where servers find them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from marft_jax.errors import BadInput, reason
from marft_jax.extras.remote.dialects import EACH
from marft_jax.sampling.settings import Matrices, SampledBase


class Folders:
    """Folders of adapters, one each, with names that never come again and end in the run's digits.

    Args:
        place: ``HERE`` or ``HERE=THERE`` of ``rollout.sampler_folder``.
        run: the run directory; None: a temporary folder is used.
        process: what names the run, and this process in it.

    Raises:
        BadInput: the folder cannot be written.
    """

    def __init__(self, place: str | None, run: Path | None, process: str) -> None:
        here, _, there = (place or "").partition("=")
        temporary = tempfile.mkdtemp(prefix="marft-adapters-") if not here and run is None else ""
        self._here = Path(here or temporary or f"{run}/adapters").absolute()
        self._there = there.rstrip("/") or str(self._here)
        self._salt, self._written = os.urandom(8), 0
        self._run = hashlib.sha256(process.encode() or self._salt).hexdigest()[:8]
        try:
            self._here.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._here).close()
        except OSError as error:
            wanted = f"--rollout.sampler_folder {self._here}: expected a folder that can be written"
            raise BadInput(f"{wanted} ({reason(error)})") from error
        for name in filter(self.is_of_run, os.listdir(self._here)):
            self.delete(name)

    def is_of_run(self, name: str) -> bool:
        """True for the name of an adapter of this run: when it opens, of a process that was
        killed."""
        return f"-{self._run}" in name

    def write(
        self, label: str, base: SampledBase, matrices: Matrices, spellings: Collection[str]
    ) -> tuple[str, str]:
        """Writes an adapter, in each spelling in a folder of that name; returns the adapter's name,
        and the folder in which servers find these."""
        draft = self._here / f".draft-{self._run}"
        for spelling in spellings:
            base.tools.write(draft / spelling, matrices, spelling == EACH)
        self._written += 1
        digest = hashlib.sha256(self._salt + self._written.to_bytes(8, "big"))
        for file in sorted(draft.rglob("adapter_*")):
            digest.update(file.read_bytes())
            file.chmod(0o644)  # safetensors lets only the owner read its files
        name = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', label)}-{self._run}{digest.hexdigest()[:12]}"
        draft.rename(self._here / name)
        return name, f"{self._there}/{name}"

    def delete(self, name: str) -> None:
        """Deletes the folder of an adapter."""
        shutil.rmtree(self._here / name, ignore_errors=True)
