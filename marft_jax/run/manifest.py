"""Folders that appear only when they are complete, with a manifest of sizes and hashes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from marft_jax.formats import foreign, jsonlines

DRAFT, MANIFEST = ".saving-", "manifest.json"


@contextlib.contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """Gives a draft folder to write in. It is renamed to ``final`` when all files are on the disk;
    after an exception it is deleted."""
    draft = final.with_name(f"{DRAFT}{final.name}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        jsonlines.write(draft / MANIFEST, [json.dumps(manifest_of(draft))])
        if final.exists():  # a damaged one, or one that was dropped in memory only
            remove(final)
        os.replace(draft, final)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def manifest_of(folder: Path) -> dict[str, list[Any]]:
    """Returns the size and SHA-256 of every file below a folder, by its relative path."""
    manifest = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        manifest[file.relative_to(folder).as_posix()] = [file.stat().st_size, digest_of(file)]
    return manifest


def digest_of(file: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def damage(folder: Path) -> str | None:
    """Says what is wrong with a folder, or returns None if every file matches the manifest."""
    try:
        expected = foreign.loads((folder / MANIFEST).read_text("utf-8"))
        actual = manifest_of(folder)
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (OSError, ValueError) as error:
        return f"it cannot be read: {error}"
    actual.pop(MANIFEST, None)
    if not isinstance(expected, dict) or not expected:
        return f"its {MANIFEST} is no manifest"
    differing = sorted(f for f in expected | actual if expected.get(f) != actual.get(f))
    return f"{differing[0]} differs from its manifest" if differing else None


def remove(folder: Path) -> None:
    """Removes a folder. It is renamed first, so that no reader finds a part of it."""
    doomed = folder.with_name(f"{DRAFT}not-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
