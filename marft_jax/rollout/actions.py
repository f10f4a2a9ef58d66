"""Where the actions of an episode come from: a sampler, or the trunk of a branch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

from marft_jax.plugins import Failure, shown
from marft_jax.random_keys import ActionKey
from marft_jax.rollout.rounds import PendingRequest
from marft_jax.sampling.protocol import Completion, Request
from marft_jax.team.prompts import Team
from marft_jax.types import Act, AnsweredCall, Branch, Turn


class Action(NamedTuple):
    """An action that was sampled or recorded.

    Attributes:
        calls: recorded calls of its tools, which are not made again.
        trunk: the turn that a branch repeats with it.
    """

    completion: Completion
    calls: Sequence[AnsweredCall] = ()
    trunk: Turn | None = None


ActionSampler = Callable[[Act, tuple[int, int], range], Awaitable[Action]]
"""Gives an act its action: samples it, or finds a recorded one. It takes the act; its place, which
is the number of the act in the episode and of the tool calls before it in the act; and the numbers
of the acts that were asked for together with it."""


def action_sampler(team: Team, key: ActionKey) -> ActionSampler:
    """Makes what samples the actions of an episode.

    Args:
        key: random key of its first act.
    """

    async def sample(act: Act, place: tuple[int, int], together: range) -> Action:
        number = place[0] if act.number is None else act.number
        own, owner = key._replace(act=number, call=place[1]), team.owners[act.agent]
        base = team.bases[act.agent]
        request = Request(act.prompt, owner, act.sampling, own, act.choices, base, act.form)
        return Action(await PendingRequest(request))

    return sample


def branch_sampler(branch: Branch, sampler: ActionSampler) -> ActionSampler:
    """Makes what repeats the actions of a trunk, and samples the others.

    A branch repeats the turns before the one that is sampled anew, and the turns of acts that were
    asked for together with that one. Environment and workflow must answer as they did in the trunk;
    otherwise the branch fails.
    """
    trunk = branch.trunk
    places = list(places_of([*(turn.tool is not None for turn in trunk.turns), False]))
    turns = dict(zip(places, trunk.turns, strict=False))  # one place more: that of a next turn
    anew = places[branch.turn]

    async def sample(act: Act, place: tuple[int, int], together: range) -> Action:
        is_beside = place[0] != anew[0] and anew[0] in together
        before = turns.get(place) if place < anew or is_beside else None
        if before is None:
            return await sampler(act, place, together)
        expect(trunk.index, "prompt", before.prompt.tolist(), act.prompt.tolist())
        why = "length" if before.truncated else "end"
        recorded = before.action, before.logprobs, why, before.filtered_mass, before.version
        return Action(Completion(*recorded), before.calls, before)

    return sample


def expect(task: int, what: str, before: object, now: object) -> None:
    """Fails a branch of a task where ``now`` differs from what it was in the trunk."""
    if repr(before) != repr(now):  # equal also where an info holds NaN
        seen = f"the {what} was {shown(before)}, is {shown(now)}"
        why = f"task {task}, played again with the same actions: {seen}; "
        raise Failure(f"{why}an environment must answer alike", is_bad_input=True)


def places_of(called: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yields the place of each turn of an episode, in acting order: the number of its act, and the
    number of tool calls before it in that act.

    Args:
        called: true for each turn that called a tool, after which the same agent went on.
    """
    act, call = -1, 0
    for again in (False, *called[:-1]):
        act, call = (act, call + 1) if again else (act + 1, 0)
        yield act, call
