"""Games of PettingZoo, turn-based and parallel; a move is the number of an action."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from marft_jax.envs.base import EnvSource, Split, first_seed
from marft_jax.errors import BadInput
from marft_jax.extras.games.moves import read_move
from marft_jax.extras.games.seats import check_movers, outcomes, take_seats
from marft_jax.plugins import load_plugin, text_of
from marft_jax.settings.config import EnvSettings
from marft_jax.types import StepResult, Turn

View = Callable[[Any, str], str]
"""Maps (PettingZoo's environment, its name for the agent) to the text shown to that agent."""


@dataclasses.dataclass(frozen=True)
class Settings(EnvSettings):
    """Settings of a game of PettingZoo; its actions must be numbered (``Discrete``)."""

    name: str = "pettingzoo"
    game: str = "pettingzoo.classic.tictactoe_v3"
    """Module of the game."""
    view: str = ""
    """Your own package.module:function, from (env, agent) to the text that the agent is shown; none
    given: what the environment renders as text, or the numbers of the observation."""
    illegal: Literal["forfeit", "random", "masked"] = "forfeit"
    """What follows a text that is no legal move. forfeit: the game ends with reward -1. random: a
    legal move at random. masked: the sampler draws legal moves only."""


def source(settings: Settings, split: Split) -> EnvSource:
    """Makes games from seeds; evaluation and training use different seeds.

    Raises:
        BadInput: there is no such module.
    """
    try:
        module = importlib.import_module(settings.game)
    except Exception as error:  # a missing dependency of the game may raise anything
        raise BadInput(f"--env.game {settings.game}: {error!s:.200}") from error
    view = load_plugin(settings.view, "--env.view", ()) if settings.view else None
    make = functools.partial(_make, module)
    return EnvSource(lambda: ZooGame(settings, make, view, first_seed(split)))


def _make(module: Any) -> Any:
    make = module.env if hasattr(module, "env") else module.parallel_env
    env = make()
    return make(render_mode="ansi") if "ansi" in env.metadata.get("render_modes", ()) else env


class ZooGame:
    """One PettingZoo game as an ``envs.base.Game``.

    Args:
        make: makes PettingZoo's environment.
        view: see ``env.view``.
        first: offset of the seeds.
    """

    def __init__(
        self, settings: Settings, make: Callable[[], Any], view: View | None = None, first: int = 0
    ) -> None:
        self._settings, self._make, self._show, self._first = settings, make, view, first
        if settings.illegal == "masked":
            self.legal = lambda agent: [str(a) for a in self._legal(self._seats[agent])]

    def reset(self, seed: int) -> str:
        self._env, self._seed = self._make(), (seed + self._first) % (1 << 32)
        self._rng = np.random.default_rng(self._seed)
        seen = self._env.reset(seed=self._seed)
        self._is_parallel = not hasattr(self._env, "agent_selection")
        self._observed = dict(seen[0]) if self._is_parallel else {}
        self._returns = dict.fromkeys(self._env.possible_agents, 0.0)
        return self._settings.game

    def players(self, agents: Sequence[str]) -> dict[str, str]:
        seats: list[str] = self._env.possible_agents
        self._agents = take_seats(self._settings.game, seats, agents)
        self._seats = {agent: seat for seat, agent in self._agents.items()}
        self._skip_ended()
        return {agent: agent for agent in agents}

    def acting(self) -> list[str]:
        now = self._env.agents if self._is_parallel else [self._env.agent_selection]
        return [self._agents[name] for name in now]

    def view(self, agent: str, observation: str) -> str:
        name = self._seats[agent]
        if self._show is not None:
            return text_of("--env.view", self._show(self._env, name))
        drawn = self._env.render() if getattr(self._env, "render_mode", None) == "ansi" else None
        if not isinstance(drawn, str):
            seen = self._observation(name)
            drawn = str(seen["observation"] if isinstance(seen, Mapping) else seen)
        legal = ", ".join(map(str, self._legal(name)))
        return f"{name}\n{drawn.strip()}\nmoves: {legal}"

    def step(self, turns: Sequence[Turn]) -> StepResult:
        check_movers(turns, self.acting())
        chosen, wrong = dict[str, int](), list[str]()
        for turn in turns:
            legal = self._legal(name := self._seats[turn.name])
            action = read_move(turn.text, {str(action): action for action in legal})
            if action is None:
                wrong.append(turn.name)
                if self._settings.illegal == "forfeit":
                    continue
                action = int(self._rng.choice(legal))
            chosen[name] = action
        moves = {self._agents[name]: action for name, action in chosen.items()}
        info: dict[str, Any] = {"moves": moves} | ({"illegal": wrong} if wrong else {})
        if len(chosen) < len(turns):
            lost = {self._seats[agent]: -1.0 for agent in wrong}
            return self._result(lost, info, done=True)
        if self._is_parallel:
            self._observed, paid, *_ = self._env.step(chosen)
        else:
            [action] = chosen.values()
            self._env.step(action)
            paid = dict(self._env.rewards)
            self._skip_ended()
        return self._result(paid, info, done=not self._env.agents)

    def _result(self, paid: Mapping[str, float], info: dict[str, Any], done: bool) -> StepResult:
        for name, reward in paid.items():
            self._returns[name] += float(reward)
        if done:
            seats = dict(enumerate(self._agents.values()))
            info["outcomes"] = outcomes(list(self._returns.values()), seats)
        earned = {self._agents[name]: float(reward) for name, reward in paid.items() if reward}
        return StepResult("", 0.0, done, info, earned)

    def _skip_ended(self) -> None:
        """Removes agents whose game is over, as PettingZoo asks."""
        env = self._env
        while not self._is_parallel and env.agents:
            name = env.agent_selection
            if not (env.terminations[name] or env.truncations[name]):
                return
            env.step(None)

    def _observation(self, name: str) -> Any:
        return self._observed[name] if self._is_parallel else self._env.observe(name)

    def _legal(self, name: str) -> list[int]:
        """Lists the legal actions of an agent, from its action mask where it has one."""
        seen = self._observation(name)
        info = self._env.infos.get(name, {}) if hasattr(self._env, "infos") else {}
        mask = seen.get("action_mask") if isinstance(seen, Mapping) else info.get("action_mask")
        number = int(self._env.action_space(name).n)
        return list(range(number)) if mask is None else np.flatnonzero(mask).tolist()
