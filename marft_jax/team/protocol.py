"""Protocol of a workflow: it yields acts, or a ``Step`` of the environment.

The rest of a rollout relies on the checks made here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from marft_jax.envs.threads import UserCall
from marft_jax.errors import BadInput
from marft_jax.plugins import info_of, shown, text_of
from marft_jax.settings.setting import checked
from marft_jax.team.profiles import SAMPLING
from marft_jax.team.prompts import Team
from marft_jax.types import Act, Sampling, Turn


class Step(NamedTuple):
    """Turns of a step, for the environment to answer.

    Attributes:
        info: remarks for the transcript, such as how the team decided.
        graded: turns that are the team's answer. None: the last turn of each answering agent; an
            empty list: no answer in this step.
    """

    turns: Sequence[Turn]
    info: Mapping[str, Any] = {}
    graded: Sequence[Turn] | None = None


class Pause(NamedTuple):
    """Wait for code that runs elsewhere, such as a program.

    Attributes:
        begin: is given the call that it is to end (``UserCall.end``).
    """

    begin: Callable[[UserCall[Any]], None]


def check_acts(acts: Any, team: Team, turns: int, most: int) -> list[Act]:
    """Checks that a workflow yielded acts, at least one, that its team can do.

    Args:
        turns: number of turns of the episode so far.
        most: largest number of turns of an episode.

    Raises:
        BadInput: an act is wrong.
    """
    if not _is_sequence(acts) or not acts:
        raise BadInput(f"expected a yielded list of acts, or Step, got {shown(acts)}")
    if len(acts) > most:
        raise BadInput(f"expected at most --rollout.max_turns {most} acts, got {len(acts)}")
    return [_check_act(act, team, turns) for act in acts]


def _check_act(act: Any, team: Team, turns: int) -> Act:
    if not isinstance(act, Act):
        raise BadInput(f"expected a list of acts, as team.act makes them, got {shown(act)} in it")
    agents = len(team.profiles)
    _expect(_is_index(act.agent, agents), f"expected an agent from 0 to {agents - 1}", act.agent)
    vocabulary, context = team.tokenizers[act.agent].vocab_size, team.contexts[act.agent]
    prompt = _ids("prompt", act.prompt, vocabulary)
    room = context - len(prompt)
    _expect(room > 0, f"prompt: expected less than --model.context {context}", len(prompt))
    fits = _is_index(act.start, len(prompt) + 1)
    _expect(fits, f"start: expected 0 to {len(prompt)}", act.start)
    seen = _is_sequence(act.sees) and all(_is_index(i, turns) for i in act.sees)
    _expect(seen, f"sees: expected numbers of the {turns} turns", act.sees)
    given: Any = act.sampling
    _expect(isinstance(given, Sampling), "sampling: expected types.Sampling", given)
    sampling = {
        name: checked(f"act: sampling.{name}", kind, _plain(getattr(given, name)))
        for name, kind in SAMPLING.items()
    }
    longest = max(sampling.max_new_tokens for sampling in team.sampling)
    length = sampling["max_new_tokens"]
    _expect(length <= longest, f"sampling.max_new_tokens: expected at most {longest}", length)
    sampling["max_new_tokens"] = length = min(length, room)
    known = act.number is None or _is_index(act.number, 1 << 64)
    _expect(known, "number: expected a whole number >= 0, or None", act.number)
    choices = tuple(tuple(_ids("choices", c, vocabulary).tolist()) for c in act.choices)
    most = max(map(len, choices), default=0)
    _expect(most <= length, f"choices: expected at most {length} tokens (max_new_tokens)", most)
    sees = tuple(dict.fromkeys(int(i) for i in act.sees))
    return Act(
        int(act.agent), prompt, 0, sees, Sampling(**sampling), int(act.start),
        _plain(act.number), choices, text_of("act: form", act.form),
    )  # fmt: skip


def _expect(fits: bool, expected: str, got: Any) -> None:
    if not fits:
        raise BadInput(f"act: {expected}, got {shown(got)}")


def _is_sequence(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple))


def _plain(value: Any) -> Any:
    """A number of NumPy as one of Python."""
    return getattr(value, "tolist", lambda: value)()


def _is_index(value: Any, below: int) -> bool:
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return is_whole and bool(0 <= value < below)


def _ids(what: str, given: Any, vocabulary: int) -> np.ndarray:
    try:
        ids = np.asarray(given)
    except Exception:  # the parts of a list may raise anything
        ids = np.zeros(0)
    fits = ids.ndim == 1 and len(ids) > 0 and np.issubdtype(ids.dtype, np.integer)
    fits = fits and bool(0 <= ids.min() and ids.max() < vocabulary)
    _expect(fits, f"{what}: expected ids from 0 to {vocabulary - 1}, at least one", given)
    return ids.astype(np.int32)


def check_step(step: Step, turns: Sequence[Turn], first: int) -> Step:
    """Checks a step, and sets ``answers`` of its turns: true for graded turns.

    A workflow may change ``text`` and ``answers`` of a turn; other changes are ignored.

    Args:
        turns: turns of the episode so far.
        first: number of the first turn of this step.

    Raises:
        BadInput: turns repeat or belong to another step, none is graded, or ``info`` is not plain.
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
