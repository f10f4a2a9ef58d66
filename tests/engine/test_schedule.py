"""Which request gets which slot, in which group, without a model."""

from __future__ import annotations

import numpy as np
import pytest
import small

from marft_jax.engine.compiled import Shape
from marft_jax.engine.schedule import Schedule, _rows
from marft_jax.sampling.protocol import Request
from marft_jax.types import Sampling

EACH = 4  # slots of a place


def schedule_of(places: int) -> Schedule:
    return Schedule(Shape(EACH * places, 4, 192, 8), small.mesh_of(places), reuse=True)


def submit(schedule: Schedule, task: int) -> int:
    prompt = np.random.default_rng(task).integers(0, 256, 60).astype(np.int32)
    return schedule.submit(Request(prompt, 0, Sampling(8), (0, task, 0)))


def places_of(schedule: Schedule, free: int) -> dict[int, int]:
    """The place of each ticket."""
    entries = [entry for group in schedule.groups(range(free)) for entry in group.entries]
    assert len({entry.slot for entry in entries}) == len(entries)
    assert all(entry.start.slot // EACH == entry.slot // EACH for entry in entries
               if entry.start.tokens)  # fmt: skip
    return {entry.ticket: entry.slot // EACH for entry in entries}


def test_requests_that_begin_alike_go_to_one_place_and_others_to_the_emptiest():
    schedule = schedule_of(4)
    tasks = {submit(schedule, n // EACH): n // EACH for n in range(4 * EACH)}
    places = places_of(schedule, 4 * EACH)
    assert len({(tasks[ticket], place) for ticket, place in places.items()}) == 4
    assert sorted(places.values()) == [place for place in range(4) for _ in range(EACH)]
    assert schedule.reused == 4 * (EACH - 1) * 59


def test_where_a_place_is_full_others_take_its_requests():
    schedule = schedule_of(2)
    for _ in range(EACH + 2):
        submit(schedule, 0)
    places = places_of(schedule, 2 * EACH)
    assert sorted(places.values()) == [0] * EACH + [1] * 2
    assert schedule.reused == EACH * 59  # all but the first in each place


def test_a_conversation_goes_on_in_its_place():
    schedule = schedule_of(4)
    before = {n: submit(schedule, n) for n in range(8)}
    first = places_of(schedule, 4 * EACH)
    after = {n: submit(schedule, n) for n in reversed(range(8))}
    second = places_of(schedule, 4 * EACH)
    assert all(first[before[n]] == second[after[n]] for n in range(8))


def test_a_request_that_is_cancelled_gets_no_slot():
    schedule = schedule_of(1)
    tickets = [submit(schedule, n) for n in range(3)]
    schedule.cancel(tickets[1])
    assert [*places_of(schedule, 2)] == [tickets[0], tickets[2]]
    assert not schedule.is_waiting


@pytest.mark.parametrize("most, rows", [(16, 1), (512, 16)])
def test_padding_is_cheaper_than_one_more_call_where_prompts_are_short(most, rows):
    assert _rows((1, 16, 64), 3, most) == rows
