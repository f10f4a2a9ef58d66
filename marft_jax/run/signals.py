"""Signals that end a run take effect within seconds, wherever its main thread is.

Python runs handlers of signals in the main thread, between two steps of its interpreter: not while
XLA compiles for a minute, and not before a workflow without end has ended. So a thread listens. It
says at once what happens next and gives the main thread a few seconds to stop in an orderly way;
after that it saves what is to be saved and ends the process itself.
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


class Ended(int):
    """Exit code of a run, 0 or 75, that also says why the run ended."""

    why: str

    def __new__(cls, code: int, why: str) -> Self:
        """Makes a code with its reason."""
        made = super().__new__(cls, code)
        made.why = why
        return made

    def __repr__(self) -> str:
        return f"<{self:d}: {self.why}>"


DONE = Ended(0, "all steps are done")


class Stop:
    """True, when called, after SIGTERM, SIGINT or SIGHUP came; use it in a ``with``.

    A second signal ends the process at once, unless it follows within half a second: shells and
    ``timeout`` send the same one twice. Outside of the main thread nothing is listened to:
    signals are then the business of whoever runs there. A SIGHUP that the shell ignores
    (``nohup``) is ignored. At Python's prompt and in a notebook, which outlive a run, SIGINT raises
    ``KeyboardInterrupt`` as ever.

    Args:
        line: to print when a signal comes.

    Attributes:
        grace_s: how long the main thread may take to stop.
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
        """Prepares the line to print when a signal comes."""
        self._line = line

    def protect(self, save: Callable[[], str | None], grace_s: float | None = None) -> None:
        """From now on a signal gives the main thread ``grace_s`` to stop and then saves.

        Until then there is nothing to lose, and a signal ends the process at once.

        Args:
            save: puts on the disk what must not be lost, and may say what that is and what
                starting again does; it may be called from any thread.
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
        """In the main thread; the other thread does the same, unless it is stuck in a write."""
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
        """Returns the next signal that comes after ``since``, ``_CLOSED`` at the end of the
        ``with``, or None where none came in time."""
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
    """To the log and the display of a run; before there are any, to stderr."""
    with contextlib.suppress(OSError, ValueError):  # a terminal that is gone
        if LOGGER.handlers:
            LOGGER.info("%s", text)
        else:
            print(f"marft_jax: {printable(text)}", file=sys.stderr, flush=True)


def _end(code: int) -> NoReturn:
    """Ends the process without a word to whoever is stuck in it."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h")  # a bar hides the cursor
    os._exit(code)
