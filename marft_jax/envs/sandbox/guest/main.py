"""Serves one program after another, each in a child process that is limited and then gone.

Frames on standard input and output: four bytes of length, one of kind, the rest. To us come
``{`` (a request), ``>`` (bytes for the child's socket) and ``!`` (end the child); from us go ``R``
(ready), ``<`` (bytes from the socket) and ``E`` (the child has ended: its status, output, errors).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import select
import shutil
import signal
import site
import socket
import struct
import tempfile
import time
from typing import Any, NoReturn

from . import filter as limits
from . import program

for _name in ("bisect", "collections", "copy", "functools", "heapq", "itertools", "math", "string",
              "operator", "typing", "decimal", "fractions", "datetime"):  # fmt: skip
    __import__(_name)  # most programs want them, and a child gets them for nothing

site.setquit()
site.setcopyright()
site.sethelper()  # all that ``site`` does for a script, without a look at the host's packages

_ERRORS = 2000  # characters of what a program wrote to standard error that are passed on
_SCRATCH = os.getcwd()  # a folder of the room's own, empty
_WORK, _INPUT = f"{_SCRATCH}/program", f"{_SCRATCH}/input"  # in a jail /dev/stdin is a link to it
_LOOK = 0.02  # seconds between two looks at how many files there are


def main(jailed: bool) -> None:
    """Works until the host closes the pipe."""
    inward, outward = os.dup(0), os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    host = _Host(inward, outward)
    host.send(b"R", b"")
    limits.prepare()
    gc.freeze()  # a child's collector neither looks at what is ours nor copies it
    while (frame := host.read()) is not None:
        if frame[0] == b"{" and not _serve(host, json.loads(frame[1]), jailed):
            break


class _Host:
    def __init__(self, inward: int, outward: int) -> None:
        self.inward, self._outward = inward, outward

    def read(self) -> tuple[bytes, bytes] | None:
        head = self._exactly(5)
        if head is None:
            return None
        body = self._exactly(struct.unpack(">I", head[:4])[0])
        return None if body is None else (head[4:], body)

    def send(self, kind: bytes, body: bytes) -> None:
        rest = memoryview(struct.pack(">I", len(body)) + kind + body)
        while rest:
            rest = rest[os.write(self._outward, rest) :]

    def _exactly(self, count: int) -> bytes | None:
        parts: list[bytes] = []
        while count:
            part = os.read(self.inward, min(count, 1 << 20))
            if not part:
                return None
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def _serve(host: _Host, request: dict[str, Any], jailed: bool) -> bool:
    """One child from its start to its end; False where it left what cannot be removed."""
    deadline = time.monotonic() + request["seconds"]
    os.mkdir(_WORK)
    files = [os.open(_INPUT, os.O_RDWR | os.O_CREAT), _nameless(), _nameless()]
    _write(files[0], request.get("input", "").encode("utf-8", "surrogatepass"))
    os.lseek(files[0], 0, os.SEEK_SET)
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        numbers = [*files, theirs.detach()]
        ours.detach()
        _become(request, numbers, jailed)
    theirs.close()
    room = _Space(request["files"] if jailed else None)
    said, verdict = _relay(host, ours, deadline, request["output"], room)
    ours.close()
    status, late = _end_of(child, 0.0 if verdict else deadline, room)
    verdict = verdict or late
    output = _content(files[1], request["output"])
    errors = _content(files[2], 1 << 20).decode("utf-8", "replace")[-_ERRORS:]
    for file in files:
        os.close(file)
    clean = _emptied(_SCRATCH)
    if verdict == "files":
        verdict, errors = "output", "too many files"
    report = {"status": status, "verdict": verdict, "errors": errors, "clean": clean}
    host.send(b"E", json.dumps(report).encode() + b"\n" + output)
    return clean


class _Space:
    """A bound on the number of files: the size of a tmpfs counts their contents, not them."""

    def __init__(self, most: int | None) -> None:
        self._most = most

    def full(self) -> bool:
        space = os.statvfs(_SCRATCH)
        return self._most is not None and space.f_files - space.f_ffree > self._most


def _relay(
    host: _Host, ours: socket.socket, deadline: float, most: int, room: _Space
) -> tuple[int, str]:
    """Passes bytes between host and child until the child closes its end, or must be ended."""
    said = 0
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([ours, host.inward], [], [], min(left, _LOOK))
        if room.full():
            return said, "files"
        if host.inward in ready:
            frame = host.read()
            if frame is None or frame[0] == b"!":
                return said, "stopped"
            ours.settimeout(max(deadline - time.monotonic(), 0.001))
            with contextlib.suppress(OSError):
                ours.sendall(frame[1])
        if ours in ready:
            try:
                part = ours.recv(1 << 16)
            except OSError:
                part = b""
            if not part:
                return said, ""
            said += len(part)
            if said > most:
                return said, "output"
            host.send(b"<", part)
    return said, "timeout"


def _end_of(child: int, deadline: float, room: _Space) -> tuple[int, str]:
    """The child's wait status, and why it had to be killed if it had to."""
    pause = 0.0005
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status, ""
        if time.monotonic() >= deadline or room.full():
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1], "files" if room.full() else "timeout"
        time.sleep(pause)
        pause = min(pause * 2, 0.01)


def _become(request: dict[str, Any], files: list[int], jailed: bool) -> NoReturn:
    """Makes this process the program's. Never returns."""
    for number, file in enumerate(files):
        os.dup2(file, number + 100)
    for number in range(4):
        os.dup2(number + 100, number)
    os.closerange(4, 256)
    os.chdir(_WORK)
    random.seed(0)
    try:
        limits.limit(request["memory"], int(request["seconds"]) + 1, request["output"])
        limits.restrict()
    except (OSError, ValueError) as error:
        if jailed:
            os.write(2, str(error).encode())
            os._exit(125)
    program.play(request)


def _nameless() -> int:
    number, path = tempfile.mkstemp(dir=_SCRATCH)
    os.unlink(path)
    return number


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def _content(file: int, most: int) -> bytes:
    with open(file, "rb", closefd=False) as opened:
        opened.seek(0)
        return opened.read(most)


def _emptied(folder: str) -> bool:
    """Removes all that a program left. Changes no modes: what looks like a folder may be a link."""
    try:
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
    except (OSError, RecursionError):
        return False
    return True
