"""Serves one program after another, each in a child process that is limited and then gone.

Frames on standard input and output: four bytes of length, one of kind, the rest. To us come
``{`` (a request), ``>`` (bytes for the child's socket) and ``!`` (end the child); from us go ``R``
(ready), ``<`` (bytes from the socket) and ``E`` (the child has ended: its status, output, errors).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from typing import IO, Any

from . import filter as limits
from . import program

for _name in ("bisect", "collections", "copy", "functools", "heapq", "itertools", "math", "string",
              "operator", "typing", "decimal", "fractions", "datetime"):  # fmt: skip
    __import__(_name)  # most programs want them, and a child gets them for nothing

_ERRORS = 2000  # characters of what a program wrote to standard error that are passed on
_SCRATCH = os.getcwd()  # a folder of the room's own, empty


def main(jailed: bool) -> None:
    """Works until the host closes the pipe."""
    inward, outward = os.dup(0), os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    host = _Host(inward, outward)
    host.send(b"R", b"")
    while (frame := host.read()) is not None:
        if frame[0] == b"{":
            _serve(host, json.loads(frame[1]), jailed)


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


def _serve(host: _Host, request: dict[str, Any], jailed: bool) -> None:
    """One child from its start to its end."""
    deadline = time.monotonic() + request["seconds"]
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as stack:
        stack.enter_context(ours)
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        files[0].write(request.get("input", "").encode("utf-8", "surrogatepass"))
        files[0].seek(0)
        child = os.fork()
        if child == 0:
            _child(request, [file.fileno() for file in files], theirs.fileno(), jailed)
        theirs.close()
        said, verdict = _relay(host, ours, deadline, request["output"])
        status = _end_of(child, deadline if verdict == "" else 0.0)
        if status is None:
            verdict = verdict or "timeout"
        output = _content(files[1], request["output"])
        errors = _content(files[2], 1 << 20).decode("utf-8", "replace")[-_ERRORS:]
    _empty(_SCRATCH)
    report = {"status": status, "verdict": verdict, "said": said, "errors": errors}
    host.send(b"E", json.dumps(report).encode() + b"\n" + output)


def _relay(host: _Host, ours: socket.socket, deadline: float, most: int) -> tuple[int, str]:
    """Passes bytes between host and child until the child closes its end, or must be ended."""
    said = 0
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([ours, host.inward], [], [], left)
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


def _end_of(child: int, deadline: float) -> int | None:
    """The child's wait status; None where it had to be killed."""
    pause = 0.0005
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        if time.monotonic() >= deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(pause)
        pause = min(pause * 2, 0.01)


def _child(request: dict[str, Any], files: list[int], lines: int, jailed: bool) -> None:
    """Never returns."""
    status = 1
    try:
        for number, file in enumerate((*files, lines)):
            os.dup2(file, number + 100)
        for number in range(4):
            os.dup2(number + 100, number)
        os.closerange(4, 256)
        os.chdir(_SCRATCH)
        random.seed(0)
        try:
            limits.limit(request["memory"], int(request["seconds"]) + 1, request["output"])
            limits.restrict()
        except (OSError, ValueError):
            if jailed:
                os._exit(125)
        try:
            program.MODES[request["mode"]](request)
            status = 0
        except BaseException as error:
            status = program.status_of(error)
        program.finish()
        sys.stderr.flush()
    except BaseException:
        status = status or 1
    finally:
        os._exit(status & 255)


def _content(file: IO[bytes], most: int) -> bytes:
    file.seek(0)
    return file.read(most)


def _empty(folder: str) -> None:
    """Removes all that a program left; what cannot be removed ends the room."""
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.path, 0o700)
            shutil.rmtree(entry.path, onerror=_open_up)
        else:
            os.unlink(entry.path)


def _open_up(function: Any, path: str, _: Any) -> None:
    for part in (os.path.dirname(path), path):
        os.chmod(part, 0o700)
    function(path)
