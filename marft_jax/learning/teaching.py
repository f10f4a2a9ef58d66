"""On-policy distillation: teachers score the tokens that their students sampled.

The advantage of a token is log p_teacher − log p_student, of which the mean over samples is the
negative reverse KL. Both are taken at the temperature of sampling. A teacher may read more than its
student (``team/teachers.py``). Its scores are numbers without a gradient.

Source: Agarwal et al. 2023, arXiv 2306.13649, section 3, with the reverse KL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from marft_jax.errors import BadInput
from marft_jax.learning.batch import Batch, OfBase, pack_turns
from marft_jax.learning.chain import TurnKey
from marft_jax.models.lora import Adapters
from marft_jax.models.weights.load import BaseModel
from marft_jax.settings.config import Update
from marft_jax.team.prompts import Team
from marft_jax.types import Episode, Turn


class Teaching(NamedTuple):
    """The loaded teachers of a team.

    Attributes:
        bases: those that teach, by name.
        on: the base of each agent's teacher; "" for an agent without a teacher.
        owners: the adapter of each agent's teacher, among those of its base; None as above.
        adapters: of each base; None where its teachers have none.
    """

    bases: Mapping[str, BaseModel]
    on: Sequence[str]
    owners: Sequence[int | None]
    adapters: Mapping[str, Adapters | None]


def pack_taught(
    episodes: Sequence[Episode], team: Team, teaching: Teaching, config: Update, **options: Any
) -> dict[str, OfBase]:
    """Packs the actions of agents with a teacher behind what the teachers read.

    Args:
        options: further arguments of ``pack_turns``.

    Raises:
        BadInput: a teacher needs the answers, and the environment gives none.
    """
    shown = [_shown(episode, team, teaching) for episode in episodes]
    _check_answers(shown, team)
    shown = [known or episodes[e] for e, known in enumerate(shown)]
    return pack_turns(shown, teaching.owners, config, "token", bases=teaching.on, **options)[0]


def teacher_advantage(batch: Batch, of_teacher: Mapping[TurnKey, np.ndarray]) -> np.ndarray:
    """A_j = log p_teacher − log p_student of each sampled token, ``[E, J]``; 0 without a teacher.

    Args:
        of_teacher: log-probs of the turns of ``batch.taught``.
    """
    pairs = zip(batch.chain.turns, batch.behaviour, strict=True)
    return batch.chain.lay([of_teacher.get(turn, student) - student for turn, student in pairs])


def _shown(episode: Episode, team: Team, teaching: Teaching) -> Episode | None:
    """The episode with the prompts that teachers read; None where its answer is not known.

    A prompt that would not fit into the teacher's model is the student's own.
    """

    def prompt(turn: Turn, hint: str) -> np.ndarray:
        longer = team.with_hint(turn.agent, turn.prompt, hint) if hint else turn.prompt
        base = teaching.bases.get(teaching.on[turn.agent])
        fits = base is None or len(longer) + len(turn.action) <= base.config.max_position
        return longer if fits else turn.prompt

    teachers = [(turn, team.teachers[turn.agent]) for turn in episode.turns]
    hints = [teacher.hint(episode, turn.step) if teacher else "" for turn, teacher in teachers]
    known = [hint for hint in hints if hint is not None]
    if len(known) < len(hints):
        return None
    turns = zip(episode.turns, known, strict=True)
    return episode._replace(turns=[turn._replace(prompt=prompt(turn, h)) for turn, h in turns])


def _check_answers(shown: Sequence[Episode | None], team: Team) -> None:
    if all(episode is None for episode in shown):
        sees = next(t.sees for t in team.teachers if t is not None)
        raise BadInput(
            f"teacher: sees {sees!r}: expected the answer as `reference` in StepResult.info of the "
            "environment, got none; use `sees: own` or a text with {state} alone"
        )
