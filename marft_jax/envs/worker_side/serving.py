"""Worker's side of a line to its parent, see ``workers``: for graders, gyms and sandboxes alike.

File 0 is a socket. Requests come on it and replies go, one JSON object a line.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any] | None]


class Line:
    """Line to the parent. What this process prints goes to its errors instead.

    Attributes:
        socket: readable where the parent has sent something, or has ended.
        files: open files that came with a request.
    """

    def __init__(self) -> None:
        self.socket = socket.socket(fileno=os.dup(0))
        self.files: list[int] = []
        self._buffer = b""
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(2, 1)

    def request(self) -> dict[str, Any] | None:
        """Reads the next request; None where the parent has closed the line."""
        while b"\n" not in self._buffer:
            block, files, _, _ = socket.recv_fds(self.socket, 1 << 20, 1)
            if not block:
                return None
            self._buffer += block
            self.files += files
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def send(self, message: dict[str, Any]) -> None:
        """Sends a reply."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")


def serve(prepare: Callable[[Line], Answer]) -> None:
    """Answers requests until the parent closes the line.

    Every answer is under an alarm that kills the whole process, so that one which never ends does
    not outlive its parent.

    Args:
        prepare: imports and limits what is needed, and returns what answers a request; an answer of
            None is not sent.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # no handler: the kernel ends the process
    line = Line()
    answer = prepare(line)
    line.send({"ready": True})
    while (request := line.request()) is not None:
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        reply = answer(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if reply is not None:
            line.send(reply)
