"""A running program: its calls, in rounds, and what it returned.

The calls of ``async`` programs are answered in rounds, so that delays change nothing. A round is
all calls that they make until each of them can do nothing but wait: the event loop is idle, and no
timer and no thread of theirs will go on soon. The calls of a round are sampled together, in the
order of the episodes, and of the tasks that made them.

A later order of the turns by their content cannot replace this. Which of two equal calls is which
is known by their tasks alone; a prompt may hold the text of a turn that was sampled beside it by
accident, and D must not say that it was shown; and the last bits of log-probs depend on the
requests that share the engine's batch.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, NamedTuple

from marft_jax.background import Place, users, users_loop
from marft_jax.envs.threads import UserCall
from marft_jax.extras.gateway.answers import Choice
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.protocol import Call, read_json
from marft_jax.plugins import shown

Play = Callable[[int, Any], Any]
"""A user's program: (task, client) to its reward, or to a mapping from agents to their rewards."""

_MOST_SECONDS = 5.0  # that a round lasts in a program that is never idle
_READ_SECONDS = 0.2  # for which it is waited for while it may read from a connection
_MOST_PASSES = 200  # of its event loop, at least: a program short of processor time is not busy


class PendingCall(NamedTuple):
    """A call that waits for its choices; the place of a thread's or process's call is None."""

    call: Call
    future: Future[list[Choice]]
    place: Place | None

    @property
    def order(self) -> tuple[bool, Place, str]:
        return self.place is None, self.place or (), json.dumps(self.call)


class Channel:
    """A program of an episode.

    Args:
        enter: starts the endpoint, unless it runs, and returns the URL of an episode.

    Attributes:
        play, task, client: the program, and what it is given.
        is_async: it runs on the event loop of users' code, and its calls come in rounds.
        started: a workflow answers its calls.
        returned: its reward, once a pause has ended without calls.
        sent: its reward where it was sent over HTTP.
        name, token: the episode's name in the URL, by which frameworks keep connections, and the
            key that a caller must send with it.
    """

    def __init__(self, play: Play, enter: Callable[[Channel], str]) -> None:
        self.play, self.is_async = play, inspect.iscoroutinefunction(play)
        self.enter = enter
        self._lock, self._closed, self._over = threading.RLock(), False, False
        self._held, self._open = list[PendingCall](), list[PendingCall]()
        self._error: BaseException | None = None
        self._pause: UserCall[Any] | None = None
        self._began, self._passes = 0.0, 0  # of the round: when it began, how often the loop ran
        self._root: Place = ()
        self._task: Future[None] | None = None
        self.client: Any = None
        self.task, self.started = 0, False
        self.returned: Any = None
        self.sent: Any = None
        self.name, self.token = secrets.token_hex(8), secrets.token_urlsafe()

    def start(self) -> None:
        """Runs the program: an ``async`` one on the event loop of users' code, until it waits;
        another one in a thread of its own."""
        self.started = True
        if self.is_async:
            self._task = users().start(self._run_async())
            users_loop().watchers.append(self._watch)
            users_loop().settle()
        else:
            threading.Thread(target=self._run, name="program", daemon=True).start()

    def _run(self) -> None:
        try:
            self.returned = self.play(self.task, self.client)
        except BaseException as error:  # sys.exit too: it ends the episode
            self._error = error
        self._finish()

    async def _run_async(self) -> None:
        self._root = users_loop().place
        try:
            self.returned = await self.play(self.task, self.client)
        except BaseException as error:
            self._error = error
        self._finish()

    def _finish(self) -> None:
        self._over, self.client = True, None
        self._hand_over()

    def take(self, call: Call, place: Place | None = None) -> Future[list[Choice]]:
        """Takes a call of the program's; after the episode it gets an ``ApiError``.

        Args:
            place: of the task that made it.
        """
        pending = PendingCall(call, Future(), place)
        with self._lock:
            if self._closed:
                pending.future.set_exception(_over())
                return pending.future
            if not self._held:
                self._began, self._passes = time.monotonic(), 0
            self._held.append(pending)
        self._look()
        return pending.future

    def begin(self, pause: UserCall[Any]) -> None:
        """Begins a pause, which ends with the next calls; with none once the program has returned,
        and with what it raised."""
        pause.release = self._hand_over if self.is_async else pause.release
        with self._lock:
            self._pause, self._began, self._passes = pause, time.monotonic(), 0
        self._look()

    def _look(self) -> None:
        if not self.is_async or self._over:
            self._hand_over()
        elif self._pause is not None:
            users_loop().call_soon_threadsafe(self._pause.notify)  # it looks before it sleeps

    def _watch(self) -> float | None:
        """Says whether the program can do nothing but wait for answers, its own or others'."""
        if (pause := self._pause) is None:
            return None
        loop, self._passes = users_loop(), self._passes + 1
        spent, by_threads = time.monotonic() - self._began, sum(p.place is None for p in self._held)
        is_late, wait_seconds = spent > _MOST_SECONDS, None
        if loop.is_delayed(self._root):
            is_idle = is_late and self._passes > _MOST_PASSES
        elif loop.jobs(self._root) > by_threads:
            is_idle, wait_seconds = is_late, _MOST_SECONDS - spent
        elif not self._held and loop.is_connected:
            is_idle, wait_seconds = spent > _READ_SECONDS, _READ_SECONDS - spent
        else:
            is_idle = True
        pause.set_blocked(is_idle)
        return None if is_idle else wait_seconds

    def _hand_over(self) -> None:
        """Ends the pause with the calls that wait, or with the program's end."""
        with self._lock:
            if self._pause is None or not (self._held or self._over):
                return
            held, self._held = sorted(self._held, key=lambda call: call.order), []
            calls = [call for call in held if call.future.set_running_or_notify_cancel()]
            if not calls and not self._over:
                return
            self._open += calls
            pause, self._pause = self._pause, None
        pause.end(calls, None if calls else self._error)

    def answer(self, answers: Sequence[tuple[PendingCall, list[Choice] | ApiError]]) -> None:
        """Answers calls, all at once, and waits until an ``async`` program waits again."""

        def give() -> None:
            for call, choices in answers:
                with contextlib.suppress(InvalidStateError):  # the episode is over
                    if isinstance(choices, ApiError):
                        call.future.set_exception(choices)
                    else:
                        call.future.set_result(choices)

        if self.is_async:
            users_loop().call_soon_threadsafe(give)
            users_loop().settle()
        else:
            give()

    def send(self, body: bytes) -> None:
        """Takes the reward of an episode, JSON; the last one counts.

        Raises:
            ApiError: it is neither a number nor a number for each agent.
        """
        reward = read_json(body)
        parts = [*reward.values()] if isinstance(reward, dict) else [reward]
        if not parts or any(type(part) not in (int, float) for part in parts):
            what = "expected a number, or an object of agents and their numbers"
            raise ApiError(400, f"reward: {what}, got {shown(reward)}", "reward")
        if self._closed:
            raise _over()
        self.sent = reward

    def close(self) -> None:
        """Ends the episode: the program's task, and all that waits for an answer."""
        with self._lock:
            self._closed, left = True, [*self._open, *self._held]
        for call in left:
            with contextlib.suppress(InvalidStateError):  # it is answered
                call.future.set_exception(_over())
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(ValueError):
                users_loop().watchers.remove(self._watch)


def _over() -> ApiError:
    return ApiError(410, "the episode is over", code="episode_over")
