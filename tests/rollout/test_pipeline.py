"""Steps are played and taken in order, in a thread or not, and no error or wait hangs."""

from __future__ import annotations

import functools
import threading
import time

import pytest

from marft_jax.errors import EpisodesFailed, Stopped
from marft_jax.rollout.collect import Collected
from marft_jax.rollout.pipeline import Pipeline


def played(number: int, unwanted) -> Collected:
    return Collected([], [], [], [], 0, 0, 0.0, version=number)


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_are_taken_in_the_order_in_which_they_were_asked_for(ahead):
    seen = []

    def play(number, unwanted):
        seen.append((number, threading.current_thread() is threading.main_thread()))
        return played(number, unwanted)

    with Pipeline(ahead) as pipeline:
        for number in range(3):
            pipeline.ask(functools.partial(play, number))
        taken = [pipeline.take() for _ in range(3)]
    assert [x.version for x in taken] == [0, 1, 2]
    assert seen == [(number, not ahead) for number in range(3)]
    waits = {"player_wait_s", "learner_wait_s"} if ahead else set()
    assert all(set(x.seconds) == {"rollout_s", *waits} for x in taken)


def test_a_step_is_played_before_it_is_taken():
    begun = threading.Event()

    def play(number, unwanted):
        begun.set()
        return played(number, unwanted)

    with Pipeline(ahead=True) as pipeline:
        pipeline.ask(functools.partial(play, 0))
        assert begun.wait(5.0)
        assert pipeline.take().seconds["learner_wait_s"] >= 0


def test_who_waits_for_whom_is_measured():
    def play(number, unwanted):
        time.sleep(0.1)
        return played(number, unwanted)

    with Pipeline(ahead=True) as pipeline:
        time.sleep(0.2)
        pipeline.ask(functools.partial(play, 0))
        seconds = pipeline.take().seconds
    assert seconds["player_wait_s"] >= 0.15 and 0.05 < seconds["learner_wait_s"] < 0.15 + 1


@pytest.mark.parametrize("ahead", [False, True])
def test_an_error_is_raised_where_its_step_is_taken(ahead):
    def play(number, unwanted):
        if number == 1:
            raise EpisodesFailed("all of them")
        return played(number, unwanted)

    with Pipeline(ahead) as pipeline:
        for number in range(3):
            pipeline.ask(functools.partial(play, number))
        assert pipeline.take().version == 0
        with pytest.raises(EpisodesFailed, match="all of them"):
            pipeline.take()


def test_an_error_is_raised_long_before_its_turn_where_one_looks():
    def play(number, unwanted):
        if number == 1:
            raise EpisodesFailed("all of them")
        return played(number, unwanted)

    with Pipeline(ahead=True) as pipeline:
        pipeline.check()
        for number in range(2):
            pipeline.ask(functools.partial(play, number))
        started = time.monotonic()
        with pytest.raises(EpisodesFailed, match="all of them"):
            while time.monotonic() - started < 5.0:
                pipeline.check(0.01)
        pipeline.clear()
        pipeline.check()


def test_what_processes_do_together_is_done_by_the_thread_that_takes_and_in_order():
    """By ``take`` and by ``between``, whichever comes first, and never for a later step."""
    me, done = threading.current_thread(), []

    def note(*what):
        done.append((*what, threading.current_thread()))

    def play(number, unwanted):
        time.sleep(0.02)
        for part in "ab":
            pipeline.on_all(functools.partial(note, number, part))
        with pytest.raises(ZeroDivisionError):
            pipeline.on_all(lambda: 1 // 0)
        return played(number, unwanted)

    with Pipeline(ahead=True) as pipeline:
        for number in range(3):
            pipeline.ask(functools.partial(play, number))
        time.sleep(0.2)
        assert not done
        first = pipeline.take()
        time.sleep(0.2)
        assert done == [(0, part, me) for part in "ab"]
        assert first.seconds["player_wait_s"] > first.seconds["rollout_s"]
        assert pipeline.between(lambda: pipeline.on_all(lambda: len(done))) == 6
        assert [pipeline.take().version for _ in range(2)] == [1, 2]
    assert done == [(number, part, me) for number in range(3) for part in "ab"]


def test_what_was_dropped_meets_nobody():
    done = []

    def play(number, unwanted):
        pipeline.on_all(lambda: done.append(number))
        return played(number, unwanted)

    with Pipeline(ahead=True) as pipeline:
        for number in range(3):
            pipeline.ask(functools.partial(play, number))
        time.sleep(0.05)  # the first one waits
        pipeline.clear()
        pipeline.ask(functools.partial(play, 3))
        assert pipeline.take().version == 3
        pipeline.ask(functools.partial(play, 4))  # at the end it waits, and is dropped
    assert done == [3] and not pipeline._thread.is_alive()


def until_unwanted(number, unwanted):
    while number < 2:  # for ever
        if unwanted():
            raise Stopped
        time.sleep(0.01)
    return played(number, unwanted)


def test_what_was_asked_for_can_be_dropped_and_a_step_that_is_played_stops():
    with Pipeline(ahead=True) as pipeline:
        pipeline.ask(functools.partial(until_unwanted, 0))
        pipeline.ask(functools.partial(until_unwanted, 1))
        time.sleep(0.05)
        pipeline.clear()
        pipeline.ask(functools.partial(until_unwanted, 2))
        assert pipeline.take().version == 2


def test_an_error_elsewhere_ends_a_step_that_is_played():
    started = time.monotonic()
    with pytest.raises(KeyError), Pipeline(ahead=True) as pipeline:
        pipeline.ask(functools.partial(until_unwanted, 0))
        raise KeyError
    assert time.monotonic() - started < 5.0


@pytest.mark.parametrize("ahead", [False, True])
def test_other_work_is_done_between_two_steps(ahead):
    inside = []

    def play(number, unwanted):
        inside.append(True)
        time.sleep(0.05)
        inside.pop()
        return played(number, unwanted)

    with Pipeline(ahead) as pipeline:
        pipeline.ask(functools.partial(play, 0))
        pipeline.ask(functools.partial(play, 1))
        assert pipeline.between(lambda: len(inside)) == 0
        with pytest.raises(ZeroDivisionError):
            pipeline.between(lambda: 1 // 0)
        assert [pipeline.take().version for _ in range(2)] == [0, 1]


def test_playing_and_learning_overlap():
    def play(number, unwanted):
        time.sleep(0.2)
        return played(number, unwanted)

    seconds = {}
    for lag in (0, 1):
        with Pipeline(ahead=lag > 0) as pipeline:
            started, asked = time.monotonic(), 0
            for step in range(5):
                while asked <= min(step + lag, 4):
                    pipeline.ask(functools.partial(play, asked))
                    asked += 1
                assert pipeline.take().version == step
                time.sleep(0.2)  # learn
            seconds[lag] = time.monotonic() - started
    assert seconds[1] < 0.8 * seconds[0], seconds  # 1.2 and 2.0
