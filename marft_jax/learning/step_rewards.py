"""Step rewards: what a single turn earns, from its text and the team's reward."""

from __future__ import annotations

import re
from collections.abc import Callable

from marft_jax.envs.grading.extract import boxed_answer
from marft_jax.plugins import load_extra, load_function
from marft_jax.types import Episode, Turn

StepReward = Callable[[Turn, float, Episode], float]
"""(turn, the team's reward of its step, episode) to the turn's reward."""

_ITEM = re.compile(r"^[^\S\n]*(?:\d+[.):]|[-*•])[^\S\n]+.*?[^\W\d_]", re.MULTILINE)
_PYTHON = re.compile(r"```python[^\S\n]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def planner(turn: Turn, reward: float, episode: Episode) -> float:
    """½·min(list items / 2, 1) + ½·R: a plan has items, and helps.

    An item is a line with a marker (``1.``, ``-``), white space and words.
    """
    return _listed(turn.text, 2) + 0.5 * reward


def code_planner(turn: Turn, reward: float, episode: Episode) -> float:
    """``planner`` with three items."""
    return _listed(turn.text, 3) + 0.5 * reward


def solver(turn: Turn, reward: float, episode: Episode) -> float:
    """0 without an answer in a closed box; else R, and 0.1 for the form where R is not positive."""
    return _formed(bool((boxed_answer(turn.text) or "").strip()), reward)


def coder(turn: Turn, reward: float, episode: Episode) -> float:
    """``solver`` with a python block that has something in it."""
    return _formed(any(block.strip() for block in _PYTHON.findall(turn.text)), reward)


def verifier(turn: Turn, reward: float, episode: Episode) -> float:
    """R."""
    return reward


def judge(turn: Turn, reward: float, episode: Episode) -> float:
    """Mark that a judge gives this agent, or all agents (``extras/judge``); R without a mark."""
    return load_extra("step_reward.judge")(turn, reward, episode)


STEP_REWARDS: dict[str, StepReward] = {
    **{f.__name__: f for f in (planner, solver, verifier, code_planner, coder, judge)},
    "debugger": verifier,
}


def find_step_reward(name: str) -> StepReward:
    """A ready-made step reward, or the function that ``package.module:function`` names.

    Raises:
        BadInput: there is none.
    """
    return load_function(name, "step reward", STEP_REWARDS)


def _listed(text: str, wanted: int) -> float:
    return 0.5 * min(len(_ITEM.findall(text)) / wanted, 1.0)


def _formed(formed: bool, reward: float) -> float:
    if not formed:
        return 0.0
    return reward if reward > 0 else 0.1
