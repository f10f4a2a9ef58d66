"""Run directory: its own settings, and what its disk does."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from marft_jax import config as config_lib
from marft_jax.config import Config
from marft_jax.errors import RunFailed
from marft_jax.formats import jsonlines
from marft_jax.parallel import processes
from marft_jax.setting import replaced
from marft_jax.team.team_files import Blueprint, dump_team

_FILE_SYSTEM = {
    getattr(errno, name)
    for name in "ENOSPC EDQUOT EROFS EACCES EPERM EIO ENOENT ENOTDIR ESTALE EFBIG".split()
}


@contextlib.contextmanager
def own_directory(run: Path) -> Iterator[Path]:
    """Run directory; a temporary one for processes beside the first, who read and write
    nothing of the run but its checkpoints."""
    if processes.is_lead():
        yield run
    else:
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)


def write_settings(folder: Path, config: Config, blueprint: Blueprint) -> None:
    """Writes ``config.yaml`` and ``team.yaml``, with which the run directory explains itself."""
    own = replaced(config, "team.file", "team.yaml")  # beside it
    jsonlines.write(folder / "team.yaml", [dump_team(blueprint)])
    jsonlines.write(folder / "config.yaml", [config_lib.dump(own)])


@contextlib.contextmanager
def disk_errors(run: Path) -> Iterator[None]:
    """Raises ``RunFailed``, one clear line, where the disk of a run, an absolute path, is full,
    read-only or gone."""
    try:
        yield
    except OSError as error:
        if error.filename is None:  # of an open file, or of the current directory that is gone
            ours = error.errno != errno.ENOENT
        else:
            ours = Path(os.fsdecode(error.filename)).is_relative_to(run)
        if error.errno not in _FILE_SYSTEM or not ours:
            raise
        raise cannot_write(run, error.strerror or str(error)) from error


def cannot_write(run: Path, why: str) -> RunFailed:
    """Returns the error of a run directory that can no longer be written."""
    return RunFailed(
        f"{run}: cannot be written ({why}); checkpoints that were saved stay loadable: make room "
        "or give access, and start again to continue"
    )
