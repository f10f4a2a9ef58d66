"""Games in worker processes: a game that hangs or crashes loses its episode, and others go on.

The task and the moves determine a game. So each request carries all moves: a worker that holds the
game makes the last moves, and a new worker replays the game from its start.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from marft_jax.envs.base import EVAL_SEEDS, EnvSource, Member, Split, make, settings_type
from marft_jax.envs.worker_side.serving import Answer, Line, serve
from marft_jax.envs.workers import Workers
from marft_jax.errors import BadInput
from marft_jax.formats import jsonlines
from marft_jax.plugins import failure_of
from marft_jax.settings.config import EnvSettings
from marft_jax.settings.setting import Natural, Positive, setting
from marft_jax.types import StepResult, Turn

_AT_HAND = 4096  # games that a worker keeps; the oldest is dropped first


@dataclasses.dataclass(frozen=True)
class GameSettings(EnvSettings):
    """Settings that all games share."""

    workers: Natural = 0
    """Processes in which the games run; 0: threads of this process."""
    move_seconds: Positive = setting(30.0, needs="env.workers")
    """Time limit of a game's answer in such a process, in seconds. A game that exceeds it has
    failed."""


def game_source(
    settings: GameSettings, split: Split, create_game: Callable[[int], Any]
) -> EnvSource:
    """Makes a source of games, in ``settings.workers`` processes; 0: in this process.

    Args:
        create_game: maps the offset of the seeds, which tells evaluation from training, to a game.
    """
    if not settings.workers:
        first = EVAL_SEEDS if split == "eval" else 0
        return EnvSource(lambda: create_game(first))
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
    """A game in another process, as an ``envs.base.Game``.

    Args:
        worker: a pool of one process.
        number: identifies the game among the worker's games.
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
        """Asks the worker; raises what the game raised, or that no answer came in time."""
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


class _Games:
    """Worker's side: its games, each with its players and the number of steps made."""

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
        return game.demonstrate([SimpleNamespace(name=name) for name in agents])

    def see(
        self, game: int, task: int, agents: list[str], steps: list[list[tuple[str, str]]], **_: Any
    ) -> dict[str, Any]:
        """Makes the new moves and returns what the next players see."""
        known, players, made = self._games.pop(game, (None, {}, 0))
        if known is None or made != len(steps) - 1:
            known, made = self._create(), 0
            known.reset(task)
            players = known.players(agents)
        result: StepResult | None = None
        for step in steps[made:]:
            result = known.step([SimpleNamespace(name=name, text=text) for name, text in step])
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


def _prepare(_: Line) -> Answer:
    given, split = json.loads(sys.argv[1]), sys.argv[2]
    fields = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
    return _Games(make(settings_type(fields["name"])(**fields), split)).answer  # type: ignore[arg-type]


if __name__ == "__main__":
    serve(_prepare)
