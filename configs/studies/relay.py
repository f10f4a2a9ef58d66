"""A task that needs a team: each agent sees a part of a sum, and one must give the whole.

``3+5+9=?`` is shown to the speaker as ``3+5+?=?`` and to everyone else as ``?+?+9=?``:

    python -m marft_jax.train --env.name configs.studies.relay:Relay

Whoever answers knows the speaker's digits from its message alone, so that
``evaluate --run DIR --team.workflow configs.studies.relay:muted`` falls to chance.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from marft_jax.envs.arithmetic import eval_tasks, grade, train_task
from marft_jax.envs.base import EVAL_SEEDS
from marft_jax.team import State, Step, Team, Workflow
from marft_jax.types import StepResult, Turn

_HOLDOUT = 0.1
_held_out = functools.cache(eval_tasks)


class Relay:
    """Sums whose first digits only the speaker sees, and whose last ones only the others.

    Args:
        terms: digits of a sum.
        last: how many of them the speaker does not see.
        speaker: the agent that sees the first ones.
    """

    def __init__(self, terms: int = 3, last: int = 1, speaker: str = "planner") -> None:
        self._terms, self._first, self._speaker = terms, terms - last, speaker

    def reset(self, seed: int) -> str:
        if seed < EVAL_SEEDS:
            task = train_task(seed, self._terms, _HOLDOUT)
        else:
            held_out = _held_out(self._terms, _HOLDOUT)
            task = held_out[seed % len(held_out)]
        self._answer = task.answer
        return task.question

    def view(self, agent: str, observation: str) -> str:
        digits = observation.removesuffix("=?").split("+")
        sees = range(self._first) if agent == self._speaker else range(self._first, self._terms)
        shown = [digit if place in sees else "?" for place, digit in enumerate(digits)]
        return "+".join(shown) + "=?"

    def step(self, turns: Sequence[Turn]) -> StepResult:
        found = {turn.name: grade(turn.text, self._answer) for turn in turns if turn.answers}
        verdicts = [{"agent": name, **found[name]._asdict()} for name in found]
        reward = sum(own.score for own in found.values()) / max(len(found), 1)
        return StepResult("", reward, True, {"answer": self._answer, "verdicts": verdicts})


def muted(team: Team, observation: str) -> Workflow:
    """The sequential team with every message blank: its success without being heard."""
    state = State(observation)
    while True:
        turns: list[Turn] = []
        for agent in range(len(team.profiles)):
            turns += yield [team.act(agent, state, [turn._replace(text="") for turn in turns])]
        result = yield Step(turns)
        if result.done:
            return
        state = state.after(turns, result)
