"""Protocol of a workflow: it yields acts, or a ``Step`` of the environment.

Everything else in a rollout relies on what is checked here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from marft_jax.config import BadInput
from marft_jax.team.profiles import SAMPLING, is_list, is_whole
from marft_jax.team.prompts import Team
from marft_jax.types import Act, Sampling, Turn
from marft_jax.user_code import info_of, shown, text_of


class Step(NamedTuple):
    """A step of the environment, which answers these turns.

    Attributes:
        turns: the turns of this step that the environment is to see.
        info: what the transcript should say about how the team decided.
        graded: which of them are the team's answer. Without it, the last one of each agent whose
            profile has ``answers``; an empty list says that the team gave no answer.
    """

    turns: Sequence[Turn]
    info: Mapping[str, Any] = {}
    graded: Sequence[Turn] | None = None


def check_acts(acts: Any, team: Team, turns: int, most: int) -> list[Act]:
    """Checks that a workflow yielded acts.

    Args:
        acts: what it yielded.
        team: whose agents may act.
        turns: how many turns the episode has so far.
        most: the most that an episode may have.

    Raises:
        BadInput: they are none, too many, or one of them is no act that this team can do.
    """
    if not is_list(acts) or not acts:
        raise BadInput(f"expected a yielded list of acts, or Step, got {shown(acts)}")
    if len(acts) > most:
        raise BadInput(f"{len(acts)} acts at once are more than --rollout.max_turns")
    return [_check_act(act, team, turns) for act in acts]


def _check_act(act: Any, team: Team, turns: int) -> Act:
    if not isinstance(act, Act):
        raise BadInput(f"expected a list of acts, as team.act makes them, got {shown(act)} in it")
    if not _is_index(act.agent, len(team.profiles)):
        raise BadInput(
            f"act: expected an agent from 0 to {len(team.profiles) - 1}, got {shown(act.agent)}"
        )
    prompt, start, seen = _check_ids(act.prompt), act.start, act.sees
    if not _is_index(start, len(prompt) + 1):
        raise BadInput(f"act: start: expected 0 to {len(prompt)}, got {shown(start)}")
    new = prompt[start:]  # before it are ids that were checked, or sampled
    if len(new) and not (0 <= new.min() and new.max() < team.tokenizer.vocab_size):
        raise BadInput(f"act: prompt: expected ids from 0 to {team.tokenizer.vocab_size - 1}")
    room = team.context - len(prompt)
    if room < 1:
        raise BadInput(
            f"act: prompt: {len(prompt)} tokens leave no room in --model.context {team.context}"
        )
    if not _is_sequence(seen) or not all(_is_index(i, turns) for i in seen):
        raise BadInput(f"act: sees: expected numbers of the {turns} turns, got {shown(seen)}")
    sampling = _check_sampling(act.sampling, max(s.max_new_tokens for s in team.sampling), room)
    sees = tuple(dict.fromkeys(int(i) for i in seen))
    return Act(int(act.agent), prompt, 0, sees, sampling, int(start))


def _is_sequence(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple))


def _is_index(value: Any, below: int) -> bool:
    return is_whole(value) and 0 <= value < below


def _check_ids(prompt: Any) -> np.ndarray:
    try:
        ids = np.asarray(prompt)
    except Exception:  # whatever the parts of a list raise when they are looked at
        ids = np.zeros((0, 0))
    if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
        raise BadInput(f"act: prompt: expected token ids, at least one, got {shown(prompt)}")
    return ids.clip(-1, np.iinfo(np.int32).max).astype(np.int32)


def _check_sampling(sampling: Any, longest: int, room: int) -> Sampling:
    if not isinstance(sampling, Sampling):
        raise BadInput(f"act: sampling: expected types.Sampling, got {shown(sampling)}")
    for name, (expected, fits) in SAMPLING.items():
        value = getattr(sampling, name)
        if not fits(value):
            raise BadInput(f"act: sampling.{name}: expected {expected}, got {shown(value)}")
    length, temperature, top_p, top_k, min_p = sampling
    if length > longest:
        raise BadInput(
            f"act: sampling.max_new_tokens: expected up to {longest}, the team's most, got {length}"
        )
    shortest = min(int(length), room)
    return Sampling(shortest, float(temperature), float(top_p), int(top_k), float(min_p))


def check_step(step: Step, turns: Sequence[Turn], first: int) -> Step:
    """Checks a step; of its turns, ``answers`` is true for those that are graded.

    Of what a workflow changed in a turn, its ``text`` and ``answers`` count.

    Args:
        step: what a workflow yielded.
        turns: of the episode so far.
        first: the number of the first one of this step.

    Raises:
        BadInput: expected distinct turns of this step, one of them graded, and a plain info.
    """
    given = _check_turns("Step(turns)", step.turns, turns, first)
    if step.graded is None:
        last = {turn.agent: turn.index for turn in given if turn.answers is True}
        graded = set(last.values())
        if not graded:
            raise BadInput(
                "Step(turns): expected a turn of an agent that answers, got none; pass "
                "graded=[...] to say which turns are the team's answer, [] for no answer"
            )
    else:
        graded = {turn.index for turn in _check_turns("Step(graded)", step.graded, turns, first)}
        if not graded <= {turn.index for turn in given}:
            raise BadInput("Step(graded): expected turns that are among its turns")
    seen = [
        turns[turn.index]._replace(
            text=text_of("turn.text", turn.text), answers=turn.index in graded
        )
        for turn in given
    ]
    return Step(seen, info_of("Step(info)", step.info))


def _check_turns(what: str, given: Any, turns: Sequence[Turn], first: int) -> list[Turn]:
    if not _is_sequence(given) or not all(isinstance(turn, Turn) for turn in given):
        raise BadInput(f"{what}: expected a list of turns, got {shown(given)}")
    numbers = [turn.index for turn in given]
    if not all(_is_index(i, len(turns)) and i >= first for i in numbers):
        raise BadInput(f"{what}: expected turns of this step, got one of an earlier step")
    if len(set(numbers)) < len(numbers) or (not numbers and what == "Step(turns)"):
        raise BadInput(f"{what}: expected distinct turns, at least one, got {shown(given)}")
    return list(given)
