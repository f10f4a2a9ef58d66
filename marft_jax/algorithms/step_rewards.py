"""Step rewards: what a turn is worth by itself, given its text and the team's reward."""

from __future__ import annotations

import re
from collections.abc import Callable

from marft_jax.config import BadInput
from marft_jax.imports import imported
from marft_jax.types import Episode, Turn

StepReward = Callable[[Turn, float, Episode], float]
"""(turn, the team's reward of its step, episode) to the turn's reward."""

_ITEM = re.compile(r"^\s*(?:\d+[.):]|[-*•])\s*\S", re.MULTILINE)
_BOXED = re.compile(r"\\boxed\s*\{")
_PYTHON = re.compile(r"```python\s*\n.*?```", re.DOTALL | re.IGNORECASE)


def planner(turn: Turn, reward: float, episode: Episode) -> float:
    """½·min(list items / 2, 1) + ½·R: a plan has items, and helps."""
    return _listed(turn.text, 2) + 0.5 * reward


def code_planner(turn: Turn, reward: float, episode: Episode) -> float:
    """As ``planner``, with three items."""
    return _listed(turn.text, 3) + 0.5 * reward


def solver(turn: Turn, reward: float, episode: Episode) -> float:
    """0 without a boxed answer; else R, and 0.1 for the form where R is not positive."""
    return _formed(_BOXED, turn.text, reward)


def coder(turn: Turn, reward: float, episode: Episode) -> float:
    """As ``solver``, with a python block."""
    return _formed(_PYTHON, turn.text, reward)


def verifier(turn: Turn, reward: float, episode: Episode) -> float:
    """R."""
    return reward


debugger = verifier

STEP_REWARDS: dict[str, StepReward] = {
    "planner": planner,
    "solver": solver,
    "verifier": verifier,
    "code_planner": code_planner,
    "coder": coder,
    "debugger": debugger,
}


def find_step_reward(name: str) -> StepReward:
    """A ready-made step reward, or the function that ``package.module:function`` names.

    Raises:
        BadInput: there is none.
    """
    if name in STEP_REWARDS:
        return STEP_REWARDS[name]
    found: StepReward = imported(name, "step reward", STEP_REWARDS)
    if not callable(found):
        raise BadInput(f"step reward: {name!r} is no function; name one")
    return found


def _listed(text: str, wanted: int) -> float:
    return 0.5 * min(len(_ITEM.findall(text)) / wanted, 1.0)


def _formed(form: re.Pattern[str], text: str, reward: float) -> float:
    if not form.search(text):
        return 0.0
    return reward if reward > 0 else 0.1
