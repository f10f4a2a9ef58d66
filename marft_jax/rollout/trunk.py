"""Trunk of a branch: the turns of an episode that are played again instead of sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from marft_jax.rollout.episode import Action, ActionSampler, expect
from marft_jax.sampling.protocol import Completion
from marft_jax.types import Act, Branch


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
