"""Runs coroutines that wait for a sampler and for users' code, in an order that no clock decides.

In each round the new requests are submitted in the order of the coroutines, the sampler takes a
step, and the calls that began before this step are waited for. Serialised calls are waited for at
once. The one exception is a call that hangs. The others wait for it at most a quarter of its time
limit and then go on, so that all calls that hang reach their time limit together.

The loop of asyncio does not run these coroutines: it goes on in the order in which threads end, and
cannot run in a notebook, which has such a loop. Agent programs do run on such a loop
(``background``); their workflows pause for them, which is a call that ends when the program waits.
A pause that only other episodes can end is not waited for.
"""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Generic, TypeVar

from marft_jax.envs.threads import Calls, UserCall, Wait
from marft_jax.errors import Stopped
from marft_jax.plugins import Failure
from marft_jax.sampling.protocol import Completion, Request, Sampler

_T = TypeVar("_T")

_LOOK_SECONDS = 0.1  # between two looks at the clock and at ``stop``
_PATIENCE = 0.25  # share of its time limit for which the other coroutines wait for a call
_PATIENCE_SECONDS = 1.0  # the same once a call hangs, at most


class PendingRequest(Wait[Completion]):
    """A request; whoever awaits it gets its completion.

    Attributes:
        ticket: of the sampler; None until it is submitted.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.ticket: int | None = None


class _Running(Generic[_T]):
    """A coroutine that runs: ``waits`` holds what it waits for, the oldest first.

    Attributes:
        value: what it returned; nothing is in ``waits`` then.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, _T]) -> None:
        self._coroutine, self.waits = coroutine, list[Wait[Any]]()
        self.value: Any = None
        self.close = coroutine.close

    def go_on(self, over: Wait[Any] | None = None) -> None:
        """Runs it until it waits again, with one of its waits that is over."""
        try:
            self.waits = self._coroutine.send(over)
        except StopIteration as end:
            self.waits, self.value = [], end.value


@types.coroutine
def together(
    coroutines: Sequence[Coroutine[Any, Any, _T]],
) -> Generator[list[Wait[Any]], Any, list[_T]]:
    """Runs coroutines side by side; returns what each returned. If one raises, the others end."""
    running = [_Running(coroutine) for coroutine in coroutines]
    waiting: dict[Wait[Any], _Running[_T]] = {}
    try:
        for each in running:
            each.go_on()
            waiting |= dict.fromkeys(each.waits, each)
        while waiting:
            over = yield [*waiting]
            each = waiting.pop(over)
            each.go_on(over)
            waiting |= dict.fromkeys(each.waits, each)
        return [each.value for each in running]
    finally:
        for each in running:
            each.close()


class Rounds:
    """Runs coroutines to their ends, side by side.

    Args:
        sampler: answers their requests; None where they make none.
        calls: the calls of users' code for which they wait.
        stop: asked again and again while they wait; True ends them with ``Stopped``.
    """

    def __init__(self, sampler: Sampler | None, calls: Calls, stop: Callable[[], bool]) -> None:
        self._sampler, self._calls, self._stop = sampler, calls, stop
        self._running = list[_Running[Any]]()
        self._asked: dict[int, tuple[_Running[Any], PendingRequest]] = {}  # unanswered, by ticket

    def run(
        self, coroutines: Sequence[Coroutine[Any, Any, _T]], report: Callable[[int], None] | None
    ) -> tuple[list[_T], float]:
        """Runs coroutines; returns what they returned, and the seconds in which nothing was
        sampled.

        Args:
            report: called with the number of coroutines that are over.
        """
        self._running = [_Running(coroutine) for coroutine in coroutines]
        waited_s = 0.0
        try:
            for each in self._running:
                each.go_on()
            while self._asked or any(each.waits for each in self._running):
                if report is not None:
                    report(sum(not each.waits for each in self._running))
                due = self._waiting()
                self._sample()
                self._wait(self._serialised())
                started = time.perf_counter()
                self._wait(due)
                waited_s += 0.0 if self._asked else time.perf_counter() - started
                self._wait(self._serialised())
        finally:
            for each in self._running:
                each.close()
            if self._sampler is not None:
                for ticket in self._asked:  # after an error, or a stop
                    self._sampler.cancel(ticket)
        return [each.value for each in self._running], waited_s

    def _waiting(self) -> list[UserCall[Any]]:
        """Lists the calls that are waited for."""
        return [wait for each in self._running for wait in each.waits if isinstance(wait, UserCall)]

    def _serialised(self) -> list[UserCall[Any]]:
        return [call for call in self._waiting() if call.serialised]

    def _sample(self) -> None:
        """Submits the new requests, lets the sampler take a step, and goes on with its answers."""
        if self._sampler is None:
            return
        for each in self._running:
            for asked in each.waits:
                if isinstance(asked, PendingRequest) and asked.ticket is None:
                    self._sampler.capabilities.check(asked.request)
                    asked.ticket = self._sampler.submit(asked.request)
                    self._asked[asked.ticket] = each, asked
        for ticket, completion in self._sampler.step():
            each, asked = self._asked.pop(ticket)
            asked.value = completion
            if completion.reason == "cancelled":
                why = f": {completion.why}" if completion.why else ""
                asked.failure = Failure(f"the sampler gave up a request{why}")
            if asked in each.waits:  # its episode may have failed since
                each.go_on(asked)

    def _wait(self, due: Sequence[UserCall[Any]]) -> None:
        """Waits for the calls that are ``due``, and goes on with those that are over."""
        while True:
            self._calls.ended.clear()
            if self._stop():
                raise Stopped
            settled = {call for call in due if call.is_settled()}
            busy = [call for call in due if call not in settled and not call.blocked]
            others = settled or self._asked or len(due) < len(self._waiting())
            if not busy or others and self._hang(busy):
                for call in due:
                    call.release()
                settled = {call for call in due if call.is_settled()}
                if settled or others or not due:
                    break
            self._calls.ended.wait(_LOOK_SECONDS)
        for each in self._running:
            for call in each.waits:
                if call in settled and call in each.waits:  # one failure ends all of them
                    each.go_on(call)

    def _hang(self, left: Sequence[UserCall[Any]]) -> bool:
        """True where all these calls seem to hang."""
        if self._calls.seconds is None:
            return False
        patience = self._calls.seconds * _PATIENCE
        if any(call.has_taken(patience) for call in self._waiting()):
            patience = min(patience, _PATIENCE_SECONDS)
        return all(call.has_taken(patience) for call in left)
