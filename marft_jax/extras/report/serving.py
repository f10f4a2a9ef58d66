"""Follows runs that go on, at a local address: the page is made anew when their files change."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import sys
import threading
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

_MOST_CALLS, _MOST_PAGES = 32, 4  # that are answered at once, and kept
_HEAD_SECONDS, _SECONDS = 10.0, 60.0  # until a call has been read, and its answer


def serve(folders: Sequence[Path], port: int) -> None:
    """Answers until Ctrl-C."""
    server = open_server(folders, port)
    print(
        f"http://{hosts.LOOPBACK[0]}:{server.server_port} follows the runs; Ctrl-C ends it",
        flush=True,
    )
    with contextlib.suppress(KeyboardInterrupt), server:
        server.serve_forever()


def open_server(folders: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """Takes the port; 0 takes any.

    Raises:
        BadInput: it is taken, or not for everyone.
    """
    try:
        return _Server((hosts.LOOPBACK[0], port), _handler(_Followed(folders)))
    except (OSError, OverflowError) as error:
        raise BadInput(f"--serve {port}: expected a free port ({reason(error)})") from error


class _Server(ThreadingHTTPServer):
    """Answers a few calls at once; one beyond these, or one that takes too long, is let go."""

    def __init__(self, *given: Any) -> None:
        self._free = threading.BoundedSemaphore(_MOST_CALLS)
        super().__init__(*given)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # a timeout of the socket begins anew with each byte
        late = threading.Timer(_HEAD_SECONDS, _stop_reading, [request])
        late.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            late.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):  # who has left
            super().handle_error(request, client_address)


def _stop_reading(request: Any) -> None:
    with contextlib.suppress(OSError):  # closed by now
        request.shutdown(socket.SHUT_RD)


class _Followed:
    """What is served of the runs, each made once for each state of their files."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders, self._lock = folders, threading.Lock()
        self._version, self._state, self._pages = "", dict[str, Any](), dict[str, str]()

    def state(self) -> dict[str, Any]:
        """``version`` of the files, ``words`` on how far each run is, and whether all ``ended``."""
        seen = json.dumps([[str(f), time] for f, time in changes(self._folders).items()])
        version = hashlib.sha256(seen.encode()).hexdigest()[:16]
        with self._lock:
            if version != self._version:
                cards = [card(run) for run in read_runs(self._folders)]
                words = "; ".join(f"{c.run.name}: {c.state}" for c in cards)
                ended = all(c.finished or c.stopped for c in cards)
                if ended != self._state.get("ended", False):
                    print(printable(f"ended: {words}" if ended else f"goes on: {words}"))
                state = {"version": version, "words": printable(words), "ended": ended}
                self._version, self._state, self._pages = version, state, {}
            return self._state

    def page(self, steps: str) -> str:
        version = self.state()["version"]
        with self._lock:
            if steps not in self._pages:
                runs, span = read_runs(self._folders), span_of(steps or None)
                self._pages[steps] = render(runs, span, version)
            page = self._pages[steps] = self._pages.pop(steps)  # the last one asked for
            self._pages = dict([*self._pages.items()][-_MOST_PAGES:])
            return page


def _handler(followed: _Followed) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _SECONDS

        def do_GET(self) -> None:
            at = urlsplit(self.path)
            if not hosts.is_known(self.headers.get("Host", "")):
                return self.send_error(403)  # another site's name that leads here
            if at.path not in ("/", "/state"):
                return self.send_error(404)
            try:
                if at.path == "/state":
                    return self._answer("application/json", json.dumps(followed.state()))
                page = followed.page(parse_qs(at.query).get("steps", [""])[0])
            except BadInput as error:
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
            """Leaves the terminal to what the runs do."""

    return Handler
