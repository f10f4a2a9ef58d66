"""Async code of users runs on one event loop: what its modules share works in every episode."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import anyio.to_thread
import pytest
import small
from scripted import Scripted

from marft_jax.background import Background, DaemonThreads, UsersLoop, finished, users_loop
from marft_jax.envs.base import from_class
from marft_jax.envs.rewards import RowAnswer, weighted_sum
from marft_jax.rollout.rollout import Rollout
from marft_jax.team.profiles import Profile
from marft_jax.team.team_files import Blueprint
from marft_jax.team.workflows import find_workflow
from marft_jax.types import StepResult

SEMAPHORE, LOCK = asyncio.Semaphore(1), asyncio.Lock()


async def reward(text, row):
    async with SEMAPHORE, LOCK:
        await asyncio.sleep(0.001)
        return len(text)


async def look_up(word: str) -> str:
    """Looks a word up."""
    async with SEMAPHORE:
        await asyncio.sleep(0.001)
        return word.upper()


class Asks:
    """All its methods are async."""

    async def reset(self, seed: int) -> str:
        async with SEMAPHORE:
            await asyncio.sleep(0.001)
            return f"t{seed}"

    async def view(self, agent: str, observation: str) -> str:
        async with LOCK:
            return f"{agent} sees {observation}"

    async def step(self, turns) -> StepResult:
        async with SEMAPHORE:
            await asyncio.sleep(0.001)
            return StepResult("", float(await reward_of(turns[-1].text)), True)


async def reward_of(text):
    async with LOCK:
        return len(text)


def test_rewards_share_what_is_in_their_module():
    grade, texts = weighted_sum([f"{__name__}:reward*0.5"]), ["a", "bb", "ccc", "dddd"]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        scores = list(pool.map(lambda text: grade(text, RowAnswer({})).score, texts))
    assert scores == [0.5, 1, 1.5, 2]


def test_tools_and_environments_share_what_is_in_their_module():
    agents = (Profile("solver", "s", answers=True, tools=(f"{__name__}:look_up",)),)
    team = small.team_of(Blueprint(agents), context=900, max_new_tokens=60)

    def speak(request):
        said = bytes(i for i in request.prompt.tolist() if i < 256)
        return "done" if b"HAY" in said else '```call look_up\n{"word": "hay"}\n```'

    create = from_class(Asks, "train").create
    for _ in range(2):
        sequential = find_workflow("sequential")
        rollout = Rollout(Scripted(speak), team, sequential, create, DaemonThreads())
        played = rollout.play(small.samples(range(6)), 0)
        assert [episode.reward for episode in played.episodes] == [4.0] * 6
        assert all(e.turns[0].tool == "HAY" for e in played.episodes)


@pytest.mark.parametrize(
    "kind", [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError]
)
def test_what_async_code_raises_is_raised_and_the_loop_goes_on(kind):
    async def fails():
        await asyncio.sleep(0)
        raise kind("mine")

    with pytest.raises((kind, concurrent.futures.CancelledError)):
        finished(fails())
    assert finished(reward_of("abc")) == 3 and finished(7) == 7


def test_the_loop_knows_its_tasks_by_their_place_and_what_they_wait_for():
    loop = users_loop()
    assert isinstance(loop, UsersLoop)
    seen = []

    async def child(seconds):
        seen.append(loop.place)
        await asyncio.sleep(seconds)

    async def root():
        own, seen[:] = loop.place, []
        waiting = asyncio.gather(*(child(seconds) for seconds in (0.5, 0, 3000)))
        over = threading.Event()
        working = loop.run_in_executor(None, over.wait)
        by_anyio = asyncio.create_task(anyio.to_thread.run_sync(over.wait))
        await asyncio.sleep(0.01)
        busy = loop.is_delayed(own), loop.is_delayed((-1,)), loop.jobs(own), loop.jobs((-1,))
        over.set()
        await working
        await by_anyio
        waiting.cancel()
        return own, busy, loop.jobs(own)

    own, busy, jobs = finished(root())
    assert seen == [(*own, n) for n in (1, 2, 3)]
    assert busy == (True, False, 2, 0) and jobs == 0


def test_a_loop_in_the_background_ends_with_its_thread():
    own = Background("mine")
    assert own.run(reward_of("ab")) == 2
    own.close()
    names = [thread for thread in threading.enumerate() if thread.name == "mine"]
    for thread in names:
        thread.join(10)
    assert not any(thread.is_alive() for thread in names)
