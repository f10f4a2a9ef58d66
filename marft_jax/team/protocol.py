"""Protocol of a workflow: it yields acts, or a ``Step`` of the environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from pydantic import ConfigDict, TypeAdapter, ValidationError

from marft_jax.envs.threads import UserCall
from marft_jax.errors import BadInput
from marft_jax.plugins import info_of, shown, text_of
from marft_jax.settings.setting import fault_of
from marft_jax.team.prompts import Team
from marft_jax.types import Act, Turn

_ACT: TypeAdapter[Act] = TypeAdapter(
    Act, config=ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
)


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


def check_acts(acts: Any, team: Team, most: int) -> list[Act]:
    """Checks that a workflow yielded acts, at least one, that its team can do.

    Args:
        most: largest number of turns of an episode.

    Raises:
        BadInput: an act is wrong.
    """
    if not _is_sequence(acts) or not acts:
        raise BadInput(f"expected a yielded list of acts, or Step, got {shown(acts)}")
    if len(acts) > most:
        raise BadInput(f"expected at most --rollout.max_turns {most} acts, got {len(acts)}")
    return [_check_act(act, team) for act in acts]


def _check_act(value: Any, team: Team) -> Act:
    """Checks what a workflow may have replaced in an act of ``team.act``: the types, and that the
    sampler has room for it."""
    if not isinstance(value, Act):
        raise BadInput(f"expected a list of acts, as team.act makes them, got {shown(value)} in it")
    try:
        act = _ACT.validate_python(value)
    except ValidationError as error:
        raise BadInput(f"act: {fault_of(error)}") from None
    if not 0 <= act.agent < (agents := len(team.profiles)):
        raise BadInput(f"act: expected an agent from 0 to {agents - 1}, got {act.agent}")
    context, wanted = team.contexts[act.agent], act.sampling.max_new_tokens
    longest = max(sampling.max_new_tokens for sampling in team.sampling)
    if len(act.prompt) >= context or not 0 < wanted <= longest:
        raise BadInput(
            f"act: expected a prompt of less than --model.context {context} tokens and 1 to "
            f"{longest} max_new_tokens, got {len(act.prompt)} and {wanted}"
        )
    room = min(wanted, context - len(act.prompt))
    if (needed := max(map(len, act.choices), default=0)) > room:
        raise BadInput(f"act: choices: expected at most {room} tokens each, got {needed}")
    return act._replace(sampling=act.sampling._replace(max_new_tokens=room))


def check_step(step: Step, turns: Sequence[Turn], first: int) -> Step:
    """Checks a step, and sets ``answers`` of its turns: true for graded turns.

    A workflow may change ``text`` and ``answers`` of a turn; other changes are ignored.

    Args:
        turns: turns of the episode so far.
        first: number of the first turn of this step.

    Raises:
        BadInput: turns repeat or belong to another step, none is graded, or ``info`` is not plain.
    """
    shown_turns = _check_turns("Step(turns)", step.turns, turns, first)
    if not shown_turns:
        raise BadInput("Step(turns): expected at least one turn, got none")
    if step.graded is None:
        last = {turn.agent: turn.index for turn in shown_turns if turn.answers is True}
        graded = set(last.values())
        if not graded:
            raise BadInput(
                "Step(turns): expected a turn of an agent that answers, got none; pass "
                "graded=[...] to say which turns are the team's answer, [] for no answer"
            )
    else:
        graded = {turn.index for turn in _check_turns("Step(graded)", step.graded, turns, first)}
        if not graded <= {turn.index for turn in shown_turns}:
            raise BadInput("Step(graded): expected turns that are among its turns")
    seen = [
        turns[turn.index]._replace(
            text=text_of("turn.text", turn.text), answers=turn.index in graded
        )
        for turn in shown_turns
    ]
    return Step(seen, info_of("Step(info)", step.info))


def _check_turns(what: str, some: Any, turns: Sequence[Turn], first: int) -> Sequence[Turn]:
    if not _is_sequence(some) or not all(isinstance(turn, Turn) for turn in some):
        raise BadInput(f"{what}: expected a list of turns, got {shown(some)}")
    numbers = {turn.index for turn in some}
    if len(numbers) < len(some) or not numbers <= {turn.index for turn in turns[first:]}:
        raise BadInput(f"{what}: expected distinct turns of this step, got {shown(some)}")
    return some


def _is_sequence(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple))
