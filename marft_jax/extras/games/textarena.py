"""Games of TextArena: free text, judged by the game itself; rewards come at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from marft_jax.envs.base import EnvSource, Split
from marft_jax.errors import BadInput
from marft_jax.extras.games.processes import GameSettings, game_source
from marft_jax.extras.games.seats import check_movers, outcomes
from marft_jax.settings.setting import Count
from marft_jax.types import StepResult, Turn, without_thinking

_LOCK = threading.Lock()  # TextArena uses Python's global random generator


@dataclasses.dataclass(frozen=True)
class Settings(GameSettings):
    """Settings of a game of TextArena."""

    name: str = "textarena"
    game: str = "TicTacToe-v0"
    """Id of the game, such as SimpleNegotiation-v0."""
    rotate: bool = False
    """Agents change seats from task to task."""
    shown: Count = 4000
    """Last characters of the game's text that a player is shown."""


def source(settings: Settings, split: Split) -> EnvSource:
    """Makes games from seeds; evaluation and training use different seeds.

    Raises:
        BadInput: TextArena is not installed, or it has no such game.
    """
    if importlib.util.find_spec("textarena") is None:
        raise BadInput('--env.name textarena needs TextArena: pip install -e ".[games]"')
    arena: Any = importlib.import_module("textarena")
    try:
        arena.make(settings.game)
    except Exception as error:  # its registry and its games may raise anything
        raise BadInput(f"--env.game {settings.game}: {error!s:.200}") from error
    make = functools.partial(arena.make, settings.game)
    return game_source(settings, split, lambda first: ArenaGame(settings, make, first))


class ArenaGame:
    """One TextArena game as an ``envs.base.Game``.

    Args:
        make: makes TextArena's environment.
        first: offset of the seeds.
    """

    def __init__(self, settings: Settings, make: Any, first: int = 0) -> None:
        self._settings, self._make, self._first = settings, make, first

    @contextlib.contextmanager
    def _own_chance(self) -> Iterator[None]:
        """Gives the game random numbers of its own, unaffected by other games."""
        with _LOCK:
            others = random.getstate()
            random.setstate(self._chance)
            try:
                yield
            finally:
                self._chance = random.getstate()
                random.setstate(others)

    def reset(self, seed: int) -> str:
        self._seed = seed
        self._chance = random.Random(seed + self._first).getstate()
        with self._own_chance():
            self._env = self._make()
        return self._settings.game

    def players(self, agents: Sequence[str]) -> dict[str, str]:
        turned = self._seed % len(agents) if self._settings.rotate else 0
        self._agents = dict(enumerate([*agents[turned:], *agents[:turned]]))
        with self._own_chance():
            try:
                self._env.reset(num_players=len(agents), seed=self._seed + self._first)
            except (AssertionError, ValueError) as error:  # of the number of players
                raise BadInput(f"--team.file: {self._settings.game}: {error!s:.200}") from error
            self._player, self._seen = self._env.get_observation()
        return {agent: agent for agent in agents}

    def acting(self) -> list[str]:
        return [self._agents[self._player]]

    def view(self, agent: str, observation: str) -> str:
        return str(self._seen)[-self._settings.shown :].strip()

    def step(self, turns: Sequence[Turn]) -> StepResult:
        check_movers(turns, self.acting())
        [turn] = turns
        with self._own_chance():
            done, _ = self._env.step(action=without_thinking(turn.text))
            if not done:
                self._player, self._seen = self._env.get_observation()
                return StepResult("", 0.0, False, {"moves": {turn.name: turn.text}})
            rewards, ended = self._env.close()
        paid = [float((rewards or {}).get(seat, 0.0)) for seat in sorted(self._agents)]
        why = {self._agents[seat]: dict(x) for seat, x in ended.items() if seat in self._agents}
        info = {"moves": {turn.name: turn.text}, "ended": why}
        info["outcomes"] = outcomes(paid, self._agents)
        return StepResult("", 0.0, True, info, dict(zip(self._agents.values(), paid, strict=True)))
