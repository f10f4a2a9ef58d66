"""Steps are played and taken in order, in a thread or not, and no error or wait hangs."""

from __future__ import annotations

import functools
import threading

import pytest

from marft_jax.errors import EpisodesFailed, Stopped
from marft_jax.rollout import pipeline as pipeline_lib
from marft_jax.rollout.collect import Collected
from marft_jax.rollout.pipeline import Pipeline

LONG = 60.0  # seconds; whatever waits longer hangs


def played(number: int, cancelled=None) -> Collected:
    return Collected([], [], [], [], 0, 0, 0.0, updates=number)


class Clock:
    """In place of ``time``: it advances when a test says so."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        threading.Event().wait(seconds)


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_are_taken_in_the_order_in_which_they_were_asked_for(ahead):
    seen = []

    def play(number, cancelled):
        seen.append((number, threading.current_thread() is threading.main_thread()))
        return played(number)

    with Pipeline(ahead) as pipeline:
        for number in range(3):
            pipeline.ask(functools.partial(play, number))
        taken = [pipeline.take() for _ in range(3)]
    assert [x.updates for x in taken] == [0, 1, 2]
    assert seen == [(number, not ahead) for number in range(3)]
    waits = {"player_wait_s", "learner_wait_s"} if ahead else set()
    assert all(set(x.seconds) == {"rollout_s", *waits} for x in taken)


def test_who_waits_for_whom_is_measured(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pipeline_lib, "time", clock)

    def play(cancelled):
        clock.now += 10  # plays
        pipeline.collective(lambda: setattr(clock, "now", clock.now + 4))
        return played(0)

    with Pipeline(ahead=True) as pipeline:
        clock.now += 2  # the player has no work
        pipeline.run_exclusive(lambda: setattr(clock, "now", clock.now + 100))
        clock.now += 1
        pipeline.ask(play)
        seconds = pipeline.take().seconds
    assert seconds["rollout_s"] == 10 and seconds["player_wait_s"] == 2 + 1 + 4
    assert 4 <= seconds["learner_wait_s"] <= 14


def second_fails(number, cancelled):
    if number == 1:
        raise EpisodesFailed("all of them")
    return played(number)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_error_is_raised_where_its_step_is_taken_or_before_where_one_looks(ahead):
    with Pipeline(ahead) as pipeline:
        pipeline.check()
        for number in range(3):
            pipeline.ask(functools.partial(second_fails, number))
        pipeline.run_exclusive(lambda: None)  # all are played
        with pytest.raises(EpisodesFailed, match="all of them"):
            pipeline.check()
        assert pipeline.take().updates == 0
        with pytest.raises(EpisodesFailed, match="all of them"):
            pipeline.take()
        pipeline.clear()
        pipeline.check()


def test_collectives_run_in_the_thread_that_takes_and_in_order():
    """In ``take`` and in ``run_exclusive``, and in ``take`` never those of a later step."""
    me, done, begun = threading.current_thread(), [], [threading.Event() for _ in range(3)]

    def note(*what):
        done.append((*what, threading.current_thread()))

    def play(number, cancelled):
        begun[number].set()
        for part in "ab":
            pipeline.collective(functools.partial(note, number, part))
        with pytest.raises(ZeroDivisionError):
            pipeline.collective(lambda: 1 // 0)
        return played(number)

    with Pipeline(ahead=True) as pipeline:
        for number in range(3):
            pipeline.ask(functools.partial(play, number))
        assert begun[0].wait(LONG) and not done
        pipeline.take()
        assert begun[1].wait(LONG) and done == [(0, part, me) for part in "ab"]
        assert pipeline.run_exclusive(lambda: pipeline.collective(lambda: len(done))) == 6
        assert [pipeline.take().updates for _ in range(2)] == [1, 2]
    assert done == [(number, part, me) for number in range(3) for part in "ab"]


def test_a_collective_of_a_cancelled_step_is_not_run():
    """Neither where ``clear`` comes, nor at the end."""
    done, begun = [], {number: threading.Event() for number in (0, 4)}

    def play(number, cancelled):
        begun.get(number, threading.Event()).set()
        pipeline.collective(lambda: done.append(number))
        return played(number)

    with Pipeline(ahead=True) as pipeline:
        for number in range(3):
            pipeline.ask(functools.partial(play, number))
        assert begun[0].wait(LONG)
        pipeline.clear()
        pipeline.ask(functools.partial(play, 3))
        assert pipeline.take().updates == 3
        pipeline.ask(functools.partial(play, 4))
        assert begun[4].wait(LONG)
    assert done == [3]
    assert not [t for t in threading.enumerate() if t.name.startswith("player")]


def until_cancelled(begun, cancelled):
    begun.set()
    while not cancelled():
        threading.Event().wait(0.01)
    raise Stopped


def test_a_step_that_is_played_can_be_cancelled_with_those_that_wait():
    begun = threading.Event()
    with Pipeline(ahead=True) as pipeline:
        pipeline.ask(functools.partial(until_cancelled, begun))
        pipeline.ask(lambda cancelled: pytest.fail("it was cancelled"))
        assert begun.wait(LONG)
        pipeline.clear()
        assert not pipeline.asked
        pipeline.ask(functools.partial(played, 2))
        assert pipeline.take().updates == 2


@pytest.mark.parametrize("ahead", [False, True])
def test_other_work_is_done_between_two_steps(ahead):
    inside = []

    def play(number, cancelled):
        inside.append(number)
        threading.Event().wait(0.01)
        inside.remove(number)
        return played(number)

    with Pipeline(ahead) as pipeline:
        pipeline.ask(functools.partial(play, 0))
        pipeline.ask(functools.partial(play, 1))
        assert pipeline.run_exclusive(lambda: len(inside)) == 0
        with pytest.raises(ZeroDivisionError):
            pipeline.run_exclusive(lambda: 1 // 0)
        assert [pipeline.take().updates for _ in range(2)] == [0, 1]
