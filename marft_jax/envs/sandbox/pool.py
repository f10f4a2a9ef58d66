"""A warm pool of rooms, and the three ways to ask a program for something."""

from __future__ import annotations

import contextlib
import json
import queue
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from marft_jax.envs.sandbox.guest.filter import unsupported
from marft_jax.envs.sandbox.rooms import Kind, Limits, Report, Room, Unusable

Program = str | Sequence[str]
"""Its source; of several sources the first that compiles is run."""

_MOST_PROGRAMS = 500
"""After so many programs a room makes way for a fresh one."""


class Outcome(NamedTuple):
    """What one run of a program gave.

    Attributes:
        verdict: ``ok``, ``error``, ``timeout``, ``output`` or ``lost``, as in ``rooms.Report``;
            ``failed`` where a test's own assertion failed.
        output: what it printed; for ``call`` the JSON text of what it returned.
        detail: the end of its error output.
    """

    verdict: str
    output: str = ""
    detail: str = ""


class Sandbox:
    """Runs programs, ``workers`` at the same time. Safe to use from threads.

    The rooms start in the background at once, and end with this object or with the process.

    Args:
        kind: ``bubblewrap``, or ``none``: limits, but no isolation.
        workers: how many programs may run at the same time.
        limits: what each may use.

    Raises:
        Unusable: isolation cannot be had on this machine.
    """

    def __init__(self, kind: Kind, workers: int, limits: Limits | None = None) -> None:
        if kind == "bubblewrap" and (reason := unsupported()):
            raise Unusable(reason)
        starter = ThreadPoolExecutor(1)  # a room dies with the thread that started it
        self._make = lambda: starter.submit(Room, kind, limits or Limits())
        self._slots = [_Slot(self._make) for _ in range(workers)]
        self._idle: queue.Queue[_Slot] = queue.Queue()
        for slot in self._slots:
            self._idle.put(slot)
        self._finalizer = weakref.finalize(self, _close, self._slots, starter)
        outcome = self.run("print(6 * 7)", "", 30.0)
        if outcome.output.strip() != "42":
            self.close()
            raise Unusable(outcome.detail or outcome.verdict)

    def run(self, program: Program, text: str, seconds: float) -> Outcome:
        """Runs a script with ``text`` as its standard input."""
        with self._slot() as slot:
            report, _ = _run(slot.room(0), _request("run", program, input=text), seconds)
        return _outcome(report, report.output)

    def call(
        self, program: Program, name: str, arguments: Sequence[Any], seconds: float
    ) -> Outcome:
        """Calls its function ``name``, or that method of its class ``Solution``.

        The output is the JSON text of what it returned; of several lines the first counts.
        """
        request = _request("call", program, name=name, arguments=list(arguments))
        with self._slot() as slot:
            report, said = _run(slot.room(0), request, seconds)
        return _outcome(report, said.partition(b"\n")[0])

    def check(
        self,
        program: Program,
        prelude: str,
        tests: Sequence[str],
        names: Sequence[str] | None,
        seconds: float,
    ) -> list[Outcome]:
        """Runs Python tests of a program, the tests in one room and the program in another.

        Only arguments and plain results pass between the two, so the program can neither read
        the tests nor touch what compares its results.

        Args:
            program: defines what the tests call.
            prelude: trusted code that is run before the tests, with them.
            tests: statements, one text for each test.
            names: what the tests get from the program; None for the undefined names that they use
                and that are not the language's or of a module (see ``guest/program.py``).
            seconds: for all tests together.
        """
        request = _request("judge", "", prelude=prelude, tests=list(tests), names=names)
        with self._slot() as slot:
            return _check(slot.room(0), slot.room(1), program, request, seconds)

    def close(self) -> None:
        """Ends every room. May be called again."""
        self._finalizer()

    @contextlib.contextmanager
    def _slot(self) -> Iterator[_Slot]:
        slot = self._idle.get()
        try:
            yield slot
        finally:
            slot.renew()
            self._idle.put(slot)


class _Slot:
    """A room for programs and, once needed, one for tests."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._rooms: list[Future[Room]] = [make()]

    def room(self, number: int) -> Room:
        if number == len(self._rooms):
            self._rooms.append(self._make())
        room = self._rooms[number].result()
        if not room.alive:
            room.close()
            self._rooms[number] = self._make()
            room = self._rooms[number].result()
        return room

    def renew(self) -> None:
        """Replaces, in the background, rooms that are lost or have served long."""
        for number, future in enumerate(self._rooms):
            room = future.result()
            if not room.alive or room.programs >= _MOST_PROGRAMS:
                room.close()
                self._rooms[number] = self._make()

    def close(self) -> None:
        for future in self._rooms:
            with contextlib.suppress(Exception):
                future.result().close()


def _close(slots: Sequence[_Slot], starter: ThreadPoolExecutor) -> None:
    for slot in slots:
        slot.close()
    starter.shutdown(wait=False)


def _request(mode: str, program: Program, **rest: Any) -> dict[str, Any]:
    sources = [program] if isinstance(program, str) else list(program)
    return {"mode": mode, "program": sources, **rest}


def _run(room: Room, request: dict[str, Any], seconds: float) -> tuple[Report, bytes]:
    """The end of a program, and all that it sent through its socket."""
    room.begin(request, seconds)
    said = bytearray()
    while isinstance(part := room.read(), bytes):
        said += part
    return part, bytes(said)


def _check(
    room: Room, court: Room, program: Program, request: dict[str, Any], seconds: float
) -> list[Outcome]:
    """Passes questions of the judge to the program, and its answers back, until a verdict."""
    deadline = time.monotonic() + seconds
    served = _Lines(room)
    room.begin(_request("serve", program), seconds)
    ready = served.next()
    if isinstance(ready, Report):
        verdict = "error" if ready.verdict in ("ok", "stopped") else ready.verdict
        detail = ready.detail or "it ended before its tests"
        return [Outcome(verdict, "", detail)] * len(request["tests"])
    judge = _Lines(court)
    court.begin(request, max(deadline - time.monotonic(), 0.1))
    outcomes: list[Outcome] = []
    end: Report | None = None
    while not isinstance(line := judge.next(), Report):
        if line.startswith(b'{"test"'):
            error = json.loads(line)["error"]
            outcomes.append(Outcome("failed" if error else "ok", "", error))
            continue
        room.say(line + b"\n")
        answer = served.next()
        if isinstance(answer, Report):  # the program is gone: so is every test from here on
            end = answer
            court.end()
            break
        court.say(answer + b"\n")
    else:
        end = line
    if not isinstance(end, Report) or end is line:
        room.end()
    verdict = end.verdict if end and end.verdict not in ("ok", "stopped") else "error"
    missing = len(request["tests"]) - len(outcomes)
    return outcomes + [Outcome(verdict, "", end.detail if end else "")] * missing


class _Lines:
    """Lines out of the blocks that a room sends."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._rest = b""

    def next(self) -> bytes | Report:
        while b"\n" not in self._rest:
            part = self._room.read()
            if isinstance(part, Report):
                return part
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def _outcome(report: Report, output: bytes) -> Outcome:
    verdict = "error" if report.verdict == "stopped" else report.verdict
    return Outcome(verdict, output.decode("utf-8", "replace"), report.detail)
