"""Worker inside the sandbox: runs one program after another, each in a limited child process.

A request may bring a socket that leads to another program. It is answered when the child has ended.
A request of the mode ``end`` ends the child.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import select
import shutil
import signal
import site
import socket
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any, NoReturn

from . import filter as limits
from . import program

if TYPE_CHECKING:
    from marft_jax.envs.worker_side.serving import Answer, Line, serve
else:  # a folder of its own in the jail, without the package around it
    from worker_side.serving import Answer, Line, serve

for _name in ("bisect", "collections", "copy", "functools", "heapq", "itertools", "math", "string",
              "operator", "typing", "decimal", "fractions", "datetime"):  # fmt: skip
    __import__(_name)  # most programs use them, and a forked child has them at no cost

site.setquit()
site.setcopyright()
site.sethelper()  # what ``site`` does for a script, without the host's packages

_ERRORS = 2000  # characters of a program's error output that are returned
_SCRATCH = os.getcwd()  # an empty folder, of this worker alone
_WORK, _INPUT = f"{_SCRATCH}/program", f"{_SCRATCH}/input"  # in a jail /dev/stdin links to _INPUT
_LOOK = 0.02  # seconds between two checks of the limits


def main(jailed: bool) -> None:
    """Serves requests until the host closes the line."""

    def prepare(line: Line) -> Answer:
        limits.prepare()
        gc.freeze()  # a child's collector does not touch, and so does not copy, our objects
        return lambda request: None if request["mode"] == "end" else _play(line, request, jailed)

    serve(prepare)


def _play(line: Line, request: dict[str, Any], jailed: bool) -> dict[str, Any]:
    """Runs a child and returns its outcome."""
    deadline = time.monotonic() + request["limit"]
    most_files = request["files"] if jailed else sys.maxsize
    os.mkdir(_WORK)
    with open(_INPUT, "wb") as file:
        file.write(request.get("input", "").encode("utf-8", "surrogatepass"))
    nameless = functools.partial(tempfile.TemporaryFile, buffering=0, dir=_SCRATCH)
    with open(_INPUT, "r+b", 0) as given, nameless() as output, nameless() as errors:
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            numbers = [end.fileno() for end in (given, output, errors)]
            _become(request, [*numbers, *line.files, theirs.detach()], jailed)
        theirs.close()
        while line.files:
            os.close(line.files.pop())
        with ours:
            status, verdict, sent = _watch(
                child, ours, line, deadline, request["output"], most_files
            )
        printed = _content(output, request["output"])
        detail = _content(errors, 1 << 20)[-_ERRORS:].strip()
    if not verdict:
        code = os.waitstatus_to_exitcode(status)
        verdict = "error" if code else "ok"
        if code < 0:
            detail = f"{detail}\nended by signal {-code} ({signal.strsignal(-code)})".strip()
    if verdict == "files":
        verdict, detail = "output", "too many files"
    end = {"verdict": verdict, "output": printed, "detail": detail}
    return end | {"sent": sent.decode("utf-8", "replace"), "clean": _clear(_SCRATCH)}


def _watch(
    child: int, ours: socket.socket, line: Line, deadline: float, most: int, most_files: int
) -> tuple[int, str, bytearray]:
    """Waits until the child ends.

    Returns:
        Its wait status, the reason if it was killed, and what it sent through its socket.
    """
    sent, open_ends, pause = bytearray(), [line.socket, ours], _LOOK
    while True:
        if ours not in open_ends:  # its end is near
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return status, "", sent
            pause = min(2 * pause, _LOOK)
        left = deadline - time.monotonic()
        ready, _, _ = select.select(open_ends, [], [], max(min(left, pause), 0.0))
        if ours in ready:
            part = ours.recv(1 << 16)
            sent += part
            if not part:
                open_ends, pause = [line.socket], 0.0005
        space = os.statvfs(_SCRATCH)  # the size limit of a tmpfs does not count empty files
        reasons = {
            "stopped": line.socket in ready,
            "timeout": left <= 0,
            "files": space.f_files - space.f_ffree > most_files,
            "output": len(sent) > most,
        }
        if verdict := next((name for name, is_so in reasons.items() if is_so), ""):
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1], verdict, sent


def _become(request: dict[str, Any], files: list[int], jailed: bool) -> NoReturn:
    """Turns this process into the program. Never returns."""
    for number, file in enumerate(files):
        os.dup2(file, number + 100)
    for number in range(len(files)):
        os.dup2(number + 100, number)
    os.closerange(len(files), 256)
    os.chdir(_WORK)
    random.seed(0)
    try:
        limits.limit(request["memory"], int(request["limit"]) + 1, request["output"])
        limits.restrict()
    except (OSError, ValueError) as error:
        if jailed:
            os.write(2, str(error).encode())
            os._exit(125)
    program.play(request)


def _content(file: Any, most: int) -> str:
    file.seek(0)
    return file.read(most).decode("utf-8", "replace")


def _clear(folder: str) -> bool:
    """Removes what a program left. Does not change modes: a folder may be a link to the host."""
    try:
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
    except (OSError, RecursionError):
        return False
    return True
