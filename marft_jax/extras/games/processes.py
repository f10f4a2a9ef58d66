"""Games in worker processes: one that hangs or crashes loses its episode, and the rest go on.

A game is a function of its task and its moves. So a worker is told all of them each time: where it
has the game at hand it makes the last ones, and where it was started anew it plays from the start.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from marft_jax.config import EnvSettings
from marft_jax.envs.base import EnvSource, Member, Split, make, settings_type
from marft_jax.envs.worker_side.serving import Answer, Line, serve
from marft_jax.envs.workers import Workers
from marft_jax.errors import BadInput
from marft_jax.formats import jsonlines
from marft_jax.plugins import failure_of
from marft_jax.setting import setting
from marft_jax.types import StepResult, Turn

_AT_HAND = 4096  # games that a worker keeps; the oldest goes first


@dataclasses.dataclass(frozen=True)
class GameSettings(EnvSettings):
    """Settings that all games share."""

    workers: int = 0
    """Processes in which the games run; 0 for threads of this one."""
    move_seconds: float = setting(30.0, above=0, needs="env.workers")
    """After so long a game in a process has failed."""


def in_processes(settings: GameSettings, split: Split, source: EnvSource) -> EnvSource:
    """That source in ``settings.workers`` processes; itself where they are none."""
    if not settings.workers:
        return source
    fields = {**dataclasses.asdict(settings), "workers": 0}
    command = (sys.executable, "-m", __name__, json.dumps(fields), split)
    workers = [Workers(1, command) for _ in range(settings.workers)]
    games = itertools.count()

    def create() -> RemoteGame:
        number = next(games)
        return RemoteGame(workers[number % len(workers)], number, settings)

    def close() -> None:
        for worker in workers:
            worker.close()

    return EnvSource(create, close=close)


class RemoteGame:
    """A game in another process; a ``envs.base.Game``.

    Args:
        worker: has one process.
        number: tells it from the worker's other games.
    """

    def __init__(self, worker: Workers, number: int, settings: GameSettings) -> None:
        self._worker, self._number, self._settings = worker, number, settings
        self._agents, self._steps = list[str](), list[list[tuple[str, str]]]()
        self.legal: Any = None

    def reset(self, seed: int) -> str:
        self._task = seed
        return self._ask("reset")

    def players(self, agents: Sequence[str]) -> dict[str, str]:
        self._agents = list(agents)
        self._seen = self._ask("see")
        if self._seen["legal"] is not None:
            self.legal = lambda agent: self._seen["legal"][agent]
        return self._seen["players"]

    def acting(self) -> list[str]:
        return list(self._seen["views"])

    def view(self, agent: str, observation: str) -> str:
        return self._seen["views"][agent]

    def step(self, turns: Sequence[Turn]) -> StepResult:
        self._steps.append([(turn.name, turn.text) for turn in turns])
        self._seen = self._ask("see")
        return StepResult(*self._seen["result"])

    def demonstrate(self, agents: Sequence[Member]) -> list[dict[str, str]]:
        self._agents = [agent.name for agent in agents]
        return self._ask("demonstrate")

    def _ask(self, what: str) -> Any:
        """Raises what the game has raised, or that it gave no answer in time."""
        request = dict(ask=what, game=self._number, task=self._task)
        request |= dict(agents=self._agents, steps=self._steps)
        seconds = self._settings.move_seconds
        reply = self._worker.ask(request, seconds)
        if reply == "timeout":
            raise TimeoutError(f"no answer after {seconds:g} s (--env.move_seconds)")
        if not isinstance(reply, dict):
            raise RuntimeError("the game's process has ended (--env.workers)")
        if "failure" in reply:
            raise (BadInput if reply["is_bad_input"] else RuntimeError)(reply["failure"])
        return reply["answer"]


class _Move(NamedTuple):
    """What a game reads of a turn."""

    name: str
    text: str


class _Games:
    """A worker's side: the games that it has at hand, each with the steps that it has made."""

    def __init__(self, source: EnvSource) -> None:
        self._create: Callable[[], Any] = source.create
        self._games = dict[int, tuple[Any, dict[str, str], int]]()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"answer": getattr(self, request.pop("ask"))(**request)}
        except Exception as error:  # a new process would take seconds to start
            failure = failure_of(error)
            return {"failure": failure.text, "is_bad_input": failure.is_bad_input}

    def reset(self, task: int, **_: Any) -> str:
        return self._create().reset(task)

    def demonstrate(self, task: int, agents: list[str], **_: Any) -> list[dict[str, str]]:
        game = self._create()
        game.reset(task)
        return game.demonstrate([_Named(name) for name in agents])

    def see(
        self, game: int, task: int, agents: list[str], steps: list[list[tuple[str, str]]], **_: Any
    ) -> dict[str, Any]:
        """Makes the moves that are new, and shows what those see who move next."""
        known, players, made = self._games.pop(game, (None, {}, 0))
        if known is None or made != len(steps) - 1:
            known, made = self._create(), 0
            known.reset(task)
            players = known.players(agents)
        result: StepResult | None = None
        for step in steps[made:]:
            result = known.step([_Move(*move) for move in step])
        if result is not None:
            result = result._replace(info=jsonlines.plain(dict(result.info)))
        acting = [] if result is not None and result.done else known.acting()
        if acting:
            self._games[game] = known, players, len(steps)
            if len(self._games) > _AT_HAND:
                del self._games[next(iter(self._games))]
        legal = getattr(known, "legal", None)
        return {
            "players": players,
            "views": {name: known.view(name, "") for name in acting},
            "legal": None if legal is None else {name: legal(name) for name in acting},
            "result": result,
        }


class _Named(NamedTuple):
    name: str


def _prepare(_: Line) -> Answer:
    given, split = json.loads(sys.argv[1]), sys.argv[2]
    fields = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
    return _Games(make(settings_type(fields["name"])(**fields), split)).answer  # type: ignore[arg-type]


if __name__ == "__main__":
    serve(_prepare)
