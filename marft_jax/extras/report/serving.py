"""Follows runs at a local address: each page is made from the files as they are then."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import socket
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from marft_jax.errors import BadInput, one_line, printable, reason
from marft_jax.extras.report.card import card
from marft_jax.extras.report.page import render
from marft_jax.extras.report.reading import changes, read_runs, span_of
from marft_jax.formats import hosts
from marft_jax.run.storage import RunStorage, storage_of

_MOST = 64  # connections at once, each with a thread
_FETCH_S = 20.0  # between looks at a run in object storage


def serve(runs: Sequence[Path | RunStorage], port: int) -> None:
    """Answers requests until Ctrl-C."""
    server = open_server(runs, port)
    address = f"http://{hosts.LOOPBACK[0]}:{server.server_port}"
    print(f"{address} follows the runs; Ctrl-C ends it", flush=True)
    with contextlib.suppress(KeyboardInterrupt), server:
        server.serve_forever()


def open_server(runs: Sequence[Path | RunStorage], port: int) -> ThreadingHTTPServer:
    """Opens the port; 0 opens any free port.

    Raises:
        BadInput: the port is in use or not allowed.
    """
    try:
        return _Server((hosts.LOOPBACK[0], port), _handler(_Followed(runs)))
    except (OSError, OverflowError) as error:
        raise BadInput(f"--serve {port}: expected a free port ({reason(error)})") from error


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # with 5, a client that comes in a crowd waits a second for its turn
    _last = collections.deque[socket.socket]()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread. A connection ends when ``_MOST`` others have come after it."""
        self._last.append(request)
        if len(self._last) > _MOST:
            with contextlib.suppress(OSError):  # it has ended
                self._last.popleft().shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stays silent when a client disconnects."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Followed:
    """The runs that are served, and their state at the last change of their files."""

    def __init__(self, places: Sequence[Path | RunStorage]) -> None:
        self._places, self._lock = [*map(storage_of, places)], threading.Lock()
        self._folders, self._fetched = [place.path for place in self._places], time.monotonic()
        self._state: dict[str, Any] = {"version": "", "ended": False}

    def state(self) -> dict[str, Any]:
        """Returns ``version`` of the files, ``words`` on each run's progress, and ``ended``."""
        if time.monotonic() > self._fetched + _FETCH_S:
            self._fetched = time.monotonic()
            for place in self._places:
                place.fetch("*")
        seen = json.dumps([[str(f), time] for f, time in changes(self._folders).items()])
        version = hashlib.sha256(seen.encode()).hexdigest()[:16]
        with self._lock:
            if version != self._state["version"]:
                cards = [card(run) for run in read_runs(self._folders)]
                words = printable("; ".join(f"{c.run.name}: {c.state}" for c in cards))
                ended = all(c.ended for c in cards)
                if ended != self._state["ended"]:
                    print(f"{'ended' if ended else 'goes on'}: {words}")
                self._state = {"version": version, "words": words, "ended": ended}
            return self._state

    def page(self, steps: str) -> str:
        """Makes the page, with the dialogues of ``FIRST:LAST`` if given."""
        version = self.state()["version"]
        return render(read_runs(self._folders), span_of(steps or None), version)


def _handler(followed: _Followed) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 20.0  # seconds

        def do_GET(self) -> None:
            at = urlsplit(self.path)
            if not hosts.is_known(self.headers.get("Host", "")):
                return self.send_error(403)  # a name of another site that leads here
            if at.path not in ("/", "/state"):
                return self.send_error(404)
            try:
                if at.path == "/state":
                    return self._answer("application/json", json.dumps(followed.state()))
                page = followed.page(parse_qs(at.query).get("steps", [""])[0])
            except (BadInput, FileNotFoundError) as error:  # the second: deleted while it is read
                return self.send_error(400, explain=one_line(str(error)))
            self._answer("text/html; charset=utf-8", page)

        def _answer(self, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Prints nothing per request."""

    return Handler
