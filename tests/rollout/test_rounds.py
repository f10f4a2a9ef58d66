"""Coroutines run side by side, and their requests have an order that no clock decides."""

from __future__ import annotations

import asyncio
import inspect
import random
import time

import pytest
import small
from scripted import Scripted, Slow

from marft_jax.background import DaemonThreads
from marft_jax.envs.threads import Calls
from marft_jax.plugins import Failure
from marft_jax.rollout.rollout import Rollout
from marft_jax.rollout.rounds import PendingRequest, Rounds, together
from marft_jax.sampling.protocol import Request
from marft_jax.team.profiles import Profile
from marft_jax.team.team_files import Blueprint
from marft_jax.team.workflows import find_workflow
from marft_jax.types import Sampling


def late(n: int) -> int:
    """Answers after a while."""
    time.sleep(random.random() * Slow.delay * 4)
    return n + 1


def speak(request) -> str:
    """Calls a tool in two of three turns."""
    number = sum(request.key) * 7 + len(request.prompt)
    return f'```call late\n{{"n": {number}}}\n```' if number % 3 else "done"


def play(**how):
    agents = [Profile(name, name, answers=True, tools=(f"{__name__}:late",)) for name in "abc"]
    team = small.team_of(Blueprint(tuple(agents), "debate"), context=4000, max_new_tokens=60)
    sampler = Scripted(speak, slots=3)
    debate = find_workflow("debate")
    rollout = Rollout(sampler, team, debate, lambda: Slow(2), DaemonThreads(), **how)
    return rollout.play(small.samples(range(5)), 0), sampler


@pytest.mark.slow
def test_tools_of_agents_that_act_together_change_no_order(monkeypatch):
    orders = []
    for delay in (0.0, 0.001, 0.001):
        monkeypatch.setattr(Slow, "delay", delay)
        _, sampler = play()
        orders.append([request.key for request in sampler.requests])
    assert orders[0] == orders[1] == orders[2] and len(orders[0]) > 60


def test_episodes_are_played_inside_of_a_running_event_loop():
    """As in a cell of a notebook."""

    async def cell():
        return play()

    played, _ = asyncio.run(cell())
    assert len(played.episodes) == 5


def request(number: int) -> Request:
    return Request(small.turn(0, [1], [2]).prompt, 0, Sampling(4), (4, 0, number, 0, 0, 0))


async def asks(numbers, ended):
    """Returns the lengths of the answers to requests, one after another."""
    try:
        return [len((await PendingRequest(request(n))).ids) for n in numbers]
    finally:
        ended.append(numbers)


async def fails():
    await PendingRequest(request(0))
    raise Failure("this one alone")


async def both(ended):
    """Two that run together, of which one fails while the other waits."""
    other = asks([1, 2, 3], ended)
    try:
        await together([other, fails()])
    except Failure as failure:
        return failure.text, inspect.getcoroutinestate(other)


def test_what_runs_together_ends_together_and_others_go_on():
    ended = []
    sampler = Scripted(lambda own: "x" * own.key[2], slots=9)
    rounds = Rounds(sampler, Calls(DaemonThreads(), None), lambda: False)
    coroutines = [both(ended), asks([0, 1, 2], ended), together_of(ended)]
    found, _ = rounds.run(coroutines, None)
    assert found == [("this one alone", inspect.CORO_CLOSED), [1, 2, 3], [[2], [1, 3]]]
    assert ended == [[1, 2, 3], [1], [0, 2], [0, 1, 2]] and not sampler.busy


async def together_of(ended):
    return await together([asks([1], ended), asks([0, 2], ended)])


def test_an_error_ends_all_and_cancels_what_they_asked():
    async def breaks():
        await PendingRequest(request(0))
        raise ZeroDivisionError

    ended, sampler = [], Scripted(str, slots=1)
    rounds = Rounds(sampler, Calls(DaemonThreads(), None), lambda: False)
    with pytest.raises(ZeroDivisionError):
        rounds.run([breaks(), asks([1, 2], ended), asks([3], ended)], None)
    assert ended == [[1, 2], [3]] and not sampler.busy and len(sampler.requests) == 3
