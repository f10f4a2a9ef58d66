"""Ends a run within seconds after a signal, whatever its main thread does.

Python runs signal handlers in the main thread, between two steps of its interpreter. It does not
run them while XLA compiles for a minute. So a second thread listens. It prints at once what happens
next, and gives the main thread a few seconds to stop in order. Then it saves and ends the process
itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, Self

from marft_jax.errors import RunFailed, printable

LOGGER = logging.getLogger("marft_jax")

EXIT_STOPPED = 75
GRACE_S = 5.0
_SAME_S = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_CLOSED = 0


class Stop:
    """Listens for SIGTERM, SIGINT and SIGHUP in a ``with``; a call returns True after one came.

    A second signal ends the process at once, unless it comes within half a second: shells and
    ``timeout`` send a signal twice. In another thread than the main one ``Stop`` does not listen.
    A SIGHUP that the shell ignores (``nohup``) is ignored. At Python's prompt and in a notebook,
    SIGINT raises ``KeyboardInterrupt`` as usual.

    Args:
        line: the line to print when a signal comes.

    Attributes:
        grace_s: seconds that the main thread has to stop.
    """

    def __init__(self, line: str):
        self._line, self.grace_s = line, GRACE_S
        self._save: Callable[[], str | None] | None = None
        self._asked = False
        self._first: float | None = None
        self._handlers: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self._asked

    def expect(self, line: str) -> None:
        """Sets the line to print when a signal comes."""
        self._line = line

    def protect(self, save: Callable[[], str | None], grace_s: float | None = None) -> None:
        """Makes signals save: a signal then waits ``grace_s`` for the main thread, and saves.

        Before this call there is nothing to save, and a signal ends the process at once.

        Args:
            save: writes to the disk what must not be lost, and may return a line that describes
                it. It may be called from any thread.
        """
        self._save, self.grace_s = save, grace_s or GRACE_S

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in _SIGNALS:
            ignored = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if not ignored and not (number == signal.SIGINT and hasattr(sys, "ps1")):
                self._handlers[number] = signal.signal(number, self._handle)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._handlers:
            for number, handler in self._handlers.items():
                if handler is not None:  # one that was not set from Python cannot be
                    signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup)
            os.write(self._write, bytes([_CLOSED]))
            self._thread.join()
            os.close(self._read)
            os.close(self._write)

    def _handle(self, number: int, frame: object) -> None:
        """Ends the process on a second signal, in case the listening thread is stuck in a write."""
        now = time.monotonic()
        self._first = self._first or now
        if now - self._first > _SAME_S:
            _end(128 + number)

    def _listen(self) -> None:
        if self._next(None) == _CLOSED:
            return
        first, self._asked = time.monotonic(), True
        if self._save is None:
            _say(self._line)
            _end(EXIT_STOPPED)
        _say(f"{self._line}; again to leave now")
        number = self._next(first + self.grace_s, first + _SAME_S)
        if number is None:
            threading.Thread(target=_save_and_end, args=(self._save,), daemon=True).start()
            number = self._next(None)
        if number:
            _end(128 + number)

    def _next(self, until: float | None, since: float = 0.0) -> int | None:
        """Returns the next signal after ``since``, ``_CLOSED`` at the end of the ``with``, or None
        if none came in time."""
        poller = select.poll()
        poller.register(self._read, select.POLLIN)
        while poller.poll(until and max(0.0, until - time.monotonic()) * 1000):
            number = os.read(self._read, 1)[0]
            if number == _CLOSED or number in self._handlers and time.monotonic() > since:
                return number
        return None


def _save_and_end(save: Callable[[], str | None]) -> None:
    try:
        said = save() or "stopped; start again to continue"
    except RunFailed as error:
        _say(str(error))
        _end(1)
    _say(said)
    _end(EXIT_STOPPED)


def _say(text: str) -> None:
    """Prints a line to the log and the display of a run, or to stderr before these are open."""
    with contextlib.suppress(OSError, ValueError):  # a terminal that is gone
        if LOGGER.isEnabledFor(logging.INFO):  # a run is open
            LOGGER.info("%s", text)
        else:
            print(f"marft_jax: {printable(text)}", file=sys.stderr, flush=True)


def _end(code: int) -> NoReturn:
    """Ends the process at once, without cleaning up."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h")  # a bar hides the cursor
    os._exit(code)
