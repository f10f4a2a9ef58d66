"""Step rewards: what a single turn earns, from its text and the team's reward."""

from __future__ import annotations

import re
from collections.abc import Callable

from marft_jax.envs.grading.extract import boxed_answer
from marft_jax.envs.judged import JUDGE, SCORE, scores_of
from marft_jax.plugins import load_function
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
    """Mark from 0 to 1 that a judge gives this agent, or all agents; R where there is no mark.

    In the environment ``judged`` the mark is that of the judge's verdict
    (``envs.judged.scores_of``). In other environments the agent ``judge`` ends with lines such as
    ``planner: 7`` or ``score: 7``, out of 10. A line that another agent wrote as well is a
    quotation and not a mark.
    """
    info = episode.results[turn.step].info
    if "scores" in info:
        return dict(info["scores"] or {}).get(turn.name, reward)
    said = [t for t in episode.turns if t.step == turn.step and t.name == JUDGE]
    names = [SCORE, *(t.name for t in episode.turns)]
    scores = scores_of(said[-1].text, names=names) if said else {}
    name = turn.name if turn.name in scores else SCORE
    if name not in scores or said[-1].truncated:
        return reward
    mark = rf"{re.escape(name)}\W*:\W*0*{10 * scores[name]:g}(?!\d|\.\d*[1-9])"
    quoted = any(re.search(mark, t.text, re.I) for t in episode.turns if t.name != JUDGE)
    return reward if quoted else scores[name]


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
