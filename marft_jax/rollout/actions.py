"""Where the turns of an episode come from: a sampler, or the trunk of a branch."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator, Sequence

from marft_jax.plugins import Failure, shown
from marft_jax.random_keys import ActionKey
from marft_jax.rollout.rounds import PendingRequest
from marft_jax.sampling.protocol import Completion, Request
from marft_jax.sampling.stops import text_of
from marft_jax.team.prompts import Team
from marft_jax.types import Act, Branch, Turn

TurnSampler = Callable[[Act, tuple[int, int], range], Awaitable[Turn]]
"""Gives an act its turn: samples it, or finds a recorded one, whose ``calls`` are not made again.

It takes the act; its place, which is the number of the act in the episode and of the tool calls
before it in the act; and the numbers of the acts that were asked for together with it."""


def turn_of(team: Team, act: Act, completion: Completion) -> Turn:
    """Makes the turn of an act from what was sampled."""
    profile = team.profiles[act.agent]
    decode = functools.partial(team.tokenizers[act.agent].said, act.prompt.tolist())
    for array in (act.prompt, completion.ids, completion.logprobs):
        array.setflags(write=False)  # users' code that gets the turn cannot change it
    return Turn(
        agent=act.agent,
        name=profile.name,
        step=act.step,
        prompt=act.prompt,
        action=completion.ids,
        logprobs=completion.logprobs,
        text=text_of(completion.ids.tolist(), act.sampling.stop, decode),
        answers=profile.answers,
        sees=act.sees,
        truncated=completion.reason == "length",
        temperature=act.sampling.temperature or 1.0,
        start=act.start,
        limit=act.sampling.max_new_tokens,
        filtered_mass=completion.filtered_mass,
        version=completion.version,
        choices=act.choices,
        form=act.form,
    )


def turn_sampler(team: Team, key: ActionKey) -> TurnSampler:
    """Makes what samples the turns of an episode.

    Args:
        key: random key of its first act.
    """

    async def sample(act: Act, place: tuple[int, int], together: range) -> Turn:
        number, call = place
        act_key = key._replace(act=number if act.number is None else act.number, call=call)
        owner, base = team.owners[act.agent], team.bases[act.agent]
        request = Request(act.prompt, owner, act.sampling, act_key, act.choices, base, act.form)
        return turn_of(team, act, await PendingRequest(request))

    return sample


def branch_sampler(team: Team, branch: Branch, sampler: TurnSampler) -> TurnSampler:
    """Makes what repeats the turns of a trunk, and samples the others.

    A branch repeats the turns before the one that is sampled anew, and the turns of acts that were
    asked for together with that one. Environment and workflow must answer as they did in the trunk;
    otherwise the branch fails.
    """
    trunk = branch.trunk
    places = list(places_of([*(turn.tool is not None for turn in trunk.turns), False]))
    turns = dict(zip(places, trunk.turns, strict=False))  # one place more: that of a next turn
    anew = places[branch.turn]

    async def sample(act: Act, place: tuple[int, int], together: range) -> Turn:
        is_beside = place[0] != anew[0] and anew[0] in together
        before = turns.get(place) if place < anew or is_beside else None
        if before is None:
            return await sampler(act, place, together)
        expect(trunk.index, "prompt", before.prompt.tolist(), act.prompt.tolist())
        reason = "length" if before.truncated else "end"
        completion = Completion(
            before.action, before.logprobs, reason, before.filtered_mass, before.version
        )
        turn = turn_of(team, act, completion)
        return turn._replace(replayed=True, calls=before.calls, tool=before.tool)

    return sample


def expect(task: int, what: str, before: object, now: object) -> None:
    """Fails a branch of a task where ``now`` differs from what it was in the trunk."""
    if repr(before) != repr(now):  # equal also where an info holds NaN
        raise Failure(
            f"task {task}, played again with the same actions: the {what} was {shown(before)}, is "
            f"{shown(now)}; an environment must answer alike",
            is_bad_input=True,
        )


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
