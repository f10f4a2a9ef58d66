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

from marft_jax.config import Update
from marft_jax.errors import BadInput
from marft_jax.learning.batch import Batch, pack_turns
from marft_jax.learning.chain import Chain, chains_of
from marft_jax.models.lora import Adapters
from marft_jax.models.weights.load import BaseModel
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
    chain: Chain,
    episodes: Sequence[Episode],
    team: Team,
    teaching: Teaching,
    config: Update,
    **how: Any,
) -> Batch:
    """Packs the actions of agents with a teacher behind what the teachers read.

    Args:
        chain: of the episodes, in which a decision is a token.
        how: further arguments of ``pack_turns``.

    Raises:
        BadInput: a teacher needs the answers, and the environment gives none.
    """
    shown = [_shown(episode, team, teaching) for episode in episodes]
    _check_answers(shown, team)
    shown = [own if own is not None else episodes[e] for e, own in enumerate(shown)]
    how["bases"] = teaching.on
    packed, numbers = pack_turns(shown, teaching.owners, config, "token", **how)
    number_EJ, mask_EJ = np.zeros_like(chain.number_EJ), np.zeros_like(chain.mask_EJ)
    for i, (e, turns) in enumerate(chains_of(episodes)):
        first = 0
        for k in turns:
            end = first + len(episodes[e].turns[k].action)
            if (own := numbers.get((e, k))) is not None:
                number_EJ[i, first:end], mask_EJ[i, first:end] = own, 1
            first = end
    return Batch(*packed, chain._replace(mask_EJ=mask_EJ, number_EJ=number_EJ))


def teacher_advantage(batch: Batch, teacher: Mapping[str, np.ndarray]) -> np.ndarray:
    """A_j = log p_teacher − log p_student of each sampled token, ``[E, J]``; 0 without a teacher.

    Args:
        teacher: log-probs in the rows of ``batch.taught``.
    """
    assert batch.taught is not None
    student = {base: own.actions.behaviour_BA for base, own in batch.rows.items()}
    difference_EJ = batch.taught.gather(teacher) - batch.gather(student)
    return np.where(batch.taught.chain.mask_EJ > 0, difference_EJ, 0)


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
    if all(own is None for own in shown):
        sees = next(t.sees for t in team.teachers if t is not None)
        raise BadInput(
            f"teacher: sees {sees!r}: expected the answer as `reference` in StepResult.info of the "
            "environment, got none; use `sees: own` or a text with {state} alone"
        )
