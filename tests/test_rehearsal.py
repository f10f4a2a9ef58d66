"""A rehearsal: what later steps need is there after the first, and nobody notices anything else."""

from __future__ import annotations

import dataclasses
import functools
import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import small
from learning import LORA, learner

from marft_jax import config as config_lib
from marft_jax.engine.engine import Request
from marft_jax.envs.base import EnvSource, Grade, Task, question_source
from marft_jax.learning.batch import NO_SIZES
from marft_jax.rollout.collect import tasks_of
from marft_jax.run.metrics import Compilations
from marft_jax.run.rehearsal import rehearse
from marft_jax.run.setup import Session, make_rollout
from marft_jax.team.prompts import Scene
from marft_jax.types import Sampling

ALGO = config_lib.Algo(episodes=6, epochs=1, minibatches=1, microbatch_tokens=256)
EOS = tuple(range(0, 264, 8))


def asks(n: int, most: int, longest: int = 12, seed: int = 0) -> list[Request]:
    """Prompts of which every other one begins like the one before, and limits up to ``longest``."""
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(n):
        prompt = rng.integers(0, 256, int(rng.integers(most // 2, most))).astype(np.int32)
        if i % 2:
            prompt[: most // 2] = requests[-1].prompt[: most // 2]
        limit = int(rng.integers(1, longest + 1))
        requests.append(Request(prompt, i // 2 % 3, Sampling(limit), (0, i, 0)))
    return requests


def way(engine, requests) -> list[list[int]]:
    """Which requests are answered by each step of the engine."""
    first = engine.submit(requests[0])
    for request in requests[1:]:
        engine.submit(request)
    steps = []
    while engine.busy:
        steps.append([ticket - first for ticket, _ in engine.step()])
    return steps


# The engine.


@pytest.mark.parametrize("eos", [EOS, (264,)], ids=["ends by itself", "to the limit"])
def test_an_engine_that_quotes_goes_the_way_of_the_one_it_quotes(eos):
    playing = small.engine(slots=3, context=256, eos_ids=eos)
    asked = asks(20, most=150)
    said = small.answers(playing, asked)
    assert playing.reused > 0
    playing.load(playing.adapters)
    twin = playing.rehearsing(lambda episode, turn: said[episode].ids)
    assert [answer.ids.tolist() for answer in small.answers(twin, asked)] == [
        answer.ids.tolist() for answer in said
    ]
    once_more = playing.rehearsing(lambda episode, turn: said[episode].ids)
    assert way(once_more, asked) == way(playing, asked)
    assert once_more.reused == playing.reused > 0
    assert playing._expected == playing._met


# slots that no other test has, so that nothing is compiled for them yet
@pytest.mark.parametrize("shape, slots", [((1, 1, 1), 9), ((2, 2, 2), 12)], ids=str)
def test_what_ran_in_a_rehearsal_is_found_compiled(shape, slots):
    where = small.one_device() if shape == (1, 1, 1) else small.mesh_of(*shape)
    playing, compilations = small.engine(where, slots=slots, context=256), Compilations()
    small.answers(playing, asks(2, most=20))
    longer = asks(14, most=150, seed=1)
    small.answers(playing.rehearsing(lambda episode, turn: np.arange(12)), longer)
    playing.rest()
    playing.compile_ahead()
    playing.load(playing.adapters)
    assert compilations.metrics()["device/compiled"] > 0
    small.answers(playing, longer)
    assert compilations.metrics()["device/compiled"] == 0


# The batches.


def length(task: int) -> int:
    """Tasks are short in the first step; later some are long."""
    return 4 if task < ALGO.episodes else 4 + 13 * task % 61


def source(horizon: int = 1, question=lambda task: "q" * length(task)) -> EnvSource:
    def grade(text: str, answer: str) -> Grade:
        return Grade(0.0, "wrong", feedback="no")

    return question_source(lambda task: Task(question(task), ""), grade, horizon)


@pytest.fixture(scope="module")
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


@functools.cache
def session(context: str = "own", workflow: str = "sequential", **algo) -> Session:
    config = config_lib.Config(
        algo=dataclasses.replace(ALGO, **algo), run=config_lib.Run(steps=20), lora=LORA
    )
    engine = small.engine(slots=4, context=400, n=2, layers=1)  # every action up to its limit
    team = small.team(context=400, team_context=context)
    return Session(config, workflow, small.one_device(), small.base(1), team, engine)


def first_step(ours: Session, tasks: EnvSource, threads):
    return make_rollout(ours, tasks, threads).play(tasks_of(ours.config, 0), 0)


@pytest.mark.parametrize("context, horizon, group", [("own", 1, None), ("shared", 2, 3)])
def test_the_batches_of_coming_steps_fit_into_the_sizes_of_a_rehearsal(
    threads, context, horizon, group
):
    ours, tasks = session(context, group_size=group), source(horizon)
    played = first_step(ours, tasks, threads)
    ours_learner = learner(ours.config)
    pack, rehearsed = ours_learner.pack, rehearse(ours, tasks, threads, played, 0)
    later = [
        make_rollout(ours, tasks, threads).play(tasks_of(ours.config, step), step)
        for step in range(1, 12)
    ]
    met = []
    for sizes in (NO_SIZES, ours_learner.room_for(rehearsed)):
        met.append([sizes := pack(played, small.paid(played), least=sizes).sizes])
        for episodes in later:
            met[-1].append(sizes := pack(episodes, small.paid(episodes), least=sizes).sizes)
    grown, prepared = met
    assert len(set(prepared)) < len(set(grown))
    assert grown[0].width < grown[-1].width <= prepared[0].width == prepared[-1].width
    assert prepared[0].width < 1.6 * grown[-1].width


def test_what_is_left_of_a_run_is_rehearsed_for_256_episodes(threads):
    ours, asked = session(), []
    tasks = source(question=lambda task: asked.append(task) or "q")
    played = first_step(ours, tasks, threads)
    asked.clear()
    steps = rehearse(ours, tasks, threads, played, 17)
    assert len(steps) == 256 // ALGO.episodes == len(asked) // ALGO.episodes
    assert set(asked) == {*tasks_of(ours.config, 18), *tasks_of(ours.config, 19)}
    said = [{episode.turns[0].text for episode in step} for step in steps[::2]]  # of step 18
    assert any(texts != said[0] for texts in said)
    assert rehearse(ours, tasks, threads, played, 19) == []


def test_without_questions_nothing_is_rehearsed(threads):
    ours = session()
    played = first_step(ours, source(), threads)
    tasks = source()._replace(question=None)
    assert rehearse(ours, tasks, threads, played, 0) == []


def test_episodes_that_fail_in_a_rehearsal_are_left_out_in_silence(threads, caplog):
    def question(task: int) -> str:
        if task >= ALGO.episodes and task % 2:
            raise OSError("no such task")
        return "q" * (500 if task % 4 == 2 else length(task))  # too long for the context

    ours = session()
    played = first_step(ours, source(), threads)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        steps = rehearse(ours, source(question=question), threads, played, 0)
    assert not caplog.records
    assert max(map(len, steps)) <= 3  # of six
    assert {episode.task for step in steps for episode in step} <= {"q" * n for n in range(4, 65)}


def until_somebody_says_yes(team, task):
    """A workflow that may wait for ever."""
    turns = []
    while not any(turn.text == "yes" for turn in turns[-1:]):
        turns += yield [team.act(len(turns) % 2, Scene(task))]


def test_a_workflow_that_waits_for_a_word_is_ended(threads):
    ours = session()
    played = first_step(ours, source(), threads)
    waiting = ours._replace(workflow=f"{__name__}:{until_somebody_says_yes.__name__}")
    steps = rehearse(waiting, source(), threads, played, 0)
    assert {len(episode.turns) for step in steps for episode in step} == {2}
