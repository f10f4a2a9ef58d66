"""Beginnings of prompts that are taken over from another row: the same text, computed once."""

from __future__ import annotations

import bounds
import numpy as np
import pytest
import small

from marft_jax.engine.engine import Engine
from marft_jax.engine.prefix_cache import LEAST, Prefixes
from marft_jax.parallel import compilation
from marft_jax.sampling.protocol import Request
from marft_jax.types import MAIN, Sampling

CONTEXT = 192
SYSTEM = np.random.default_rng(0).integers(0, 256, 80).astype(np.int32)


def engine(reuse: bool, slots: int = 4):
    return small.engine(context=CONTEXT, reuse=reuse, slots=slots)


@pytest.fixture(scope="module")
def pair():
    """One that takes over what it can, and one that never does."""
    return engine(True), engine(False)


def asked(prompt, number: int, owner: int = 0) -> Request:
    return Request(np.asarray(prompt, np.int32), owner, Sampling(8), (0, number, 0))


def with_task(number: int, length: int = 20) -> np.ndarray:
    task = np.random.default_rng(number + 1).integers(0, 256, length)
    return np.concatenate([SYSTEM, task])


def assert_same(one, other, requests):
    """Both say the same; how much the first took over."""
    for each in (one, other):
        each.load({MAIN: small.adapters(3)}, 0)
    done, expected = small.answers(one, requests), small.answers(other, requests)
    for a, b in zip(done, expected, strict=True):
        assert a.ids.tolist() == b.ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=bounds.logprobs())
    assert small.copied(other) == 0
    return small.copied(one)


@pytest.mark.slow
def test_an_agents_system_prompt_is_computed_once(pair):
    requests = [asked(with_task(i, 10 + i), i) for i in range(7)]
    assert assert_same(*pair, requests) == 6 * len(SYSTEM)


@pytest.mark.slow
def test_the_samples_of_a_group_share_all_but_their_last_token(pair):
    prompt = with_task(0)
    assert assert_same(*pair, [asked(prompt, i) for i in range(4)]) == 3 * (len(prompt) - 1)


@pytest.mark.slow
def test_a_groups_task_is_computed_once_where_its_system_prompt_was_before(monkeypatch):
    monkeypatch.setattr(compilation, "prefill_tokens", lambda mesh: 8192)  # all in one call
    one, other = engine(True, slots=8), engine(False, slots=8)
    requests = [asked(with_task(i // 4, 60), i) for i in range(8)]
    saved = len(SYSTEM) + 2 * 3 * (len(SYSTEM) + 60 - 1)
    assert assert_same(one, other, requests) == saved


def sampled_until_done(engine: Engine, prompts, turns: int) -> list[int]:
    """Conversations of so many turns each, which go on at once; in which order they ended."""
    engine.load({MAIN: small.adapters(3)}, 0)
    asks = {engine.submit(asked(prompt, i)): (i, prompt) for i, prompt in enumerate(prompts)}
    left, ended = dict.fromkeys(range(len(prompts)), turns), list[int]()
    while engine.busy:
        for ticket, answer in engine.step():
            i, prompt = asks.pop(ticket)
            left[i] -= 1
            if left[i]:
                prompt = np.concatenate([prompt, answer.ids, [1]])
                asks[engine.submit(asked(prompt, i))] = i, prompt
            else:
                ended.append(i)
    return ended


@pytest.mark.slow
def test_a_conversation_that_goes_on_goes_before_what_has_waited():
    of_two = engine(True, slots=2)
    prompts = [np.random.default_rng(i).integers(0, 256, 60) for i in range(6)]
    ended = sampled_until_done(of_two, prompts, turns=3)
    assert small.copied(of_two) > 6 * 2 * 60 * 0.8
    assert sorted(ended) == [*range(6)]


@pytest.mark.slow
def test_the_oldest_request_is_never_overtaken():
    """However many conversations go on beside it."""
    of_two = engine(True, slots=2)
    prompts = [np.random.default_rng(i).integers(0, 256, 40) for i in range(3)]
    assert sampled_until_done(of_two, prompts, turns=6)[0] != 2
    of_two.load({MAIN: small.adapters(3)}, 0)
    first = [of_two.submit(asked(prompt, i)) for i, prompt in enumerate(prompts)]
    steps = 0
    while True:
        done = dict(of_two.step())
        if first[2] in done:
            break
        steps += 1
        for answer in done.values():
            of_two.submit(asked(np.concatenate([prompts[0], answer.ids, [1]]), 9))
    assert steps < 20


@pytest.mark.slow
def test_what_a_waiting_request_needs_is_overwritten_last():
    of_three = engine(True, slots=3)
    of_three.load({MAIN: small.adapters(3)}, 0)
    prompts = [np.random.default_rng(i).integers(0, 256, 60) for i in range(5)]
    small.answers(of_three, [asked(prompt, i) for i, prompt in enumerate(prompts[:3])])
    again = [prompts[3], prompts[4], prompts[0]]  # whose slot is the oldest
    before = small.copied(of_three)
    small.answers(of_three, [asked(prompt, i) for i, prompt in enumerate(again)])
    assert small.copied(of_three) - before == 59


@pytest.mark.slow
def test_other_adapters_hold_other_keys_and_values(pair):
    assert assert_same(*pair, [asked(with_task(0), i, owner=i % 3) for i in range(3)]) == 0


@pytest.mark.slow
def test_short_beginnings_are_computed_again(pair):
    assert assert_same(*pair, [asked(SYSTEM[: LEAST - 1], i) for i in range(3)]) == 0
    long = [np.concatenate([SYSTEM[:LEAST], with_task(i)[:-60:-1]]) for i in range(2)]
    assert assert_same(*pair, [asked(prompt, i) for i, prompt in enumerate(long)]) == LEAST


@pytest.mark.slow
def test_a_conversation_goes_on_where_it_ended(pair):
    one, other = pair
    for each in pair:
        each.load({MAIN: small.adapters(3)}, 0)
    said = [small.answers(each, [asked(with_task(0), 0)])[0].ids for each in pair]
    assert said[0].tolist() == said[1].tolist()
    longer = np.concatenate([with_task(0), said[0], [1, 2, 3]])
    done = [small.answers(each, [asked(longer, 1)])[0] for each in pair]
    assert done[0].ids.tolist() == done[1].ids.tolist()
    np.testing.assert_allclose(done[0].logprobs, done[1].logprobs, atol=bounds.logprobs())
    assert (small.copied(one), small.copied(other)) == (len(with_task(0)) + len(said[0]) - 1, 0)


@pytest.mark.slow
def test_what_another_row_has_overwritten_is_computed_again():
    requests = [asked(with_task(0), 0), asked(with_task(0)[::-1], 1), asked(with_task(0), 2)]
    assert assert_same(engine(True, slots=1), engine(False, slots=1), requests) == 0


def test_new_adapters_make_all_that_is_held_stale(pair):
    one, other = pair
    request = [asked(with_task(0), 0)]
    one.load({MAIN: small.adapters(3, seed=1)}, 0)
    small.answers(one, request)
    assert assert_same(one, other, request) == 0


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 2, 2), pytest.param((1, 8, 1), marks=pytest.mark.release)])
def test_each_place_of_a_mesh_takes_over_what_lies_there(mesh):
    split = small.engine(small.mesh_of(*mesh), context=CONTEXT, slots=16)
    prompts = [with_task(i // 4, 60) for i in range(16)]
    requests = [asked(prompt, i) for i, prompt in enumerate(prompts)]
    places = min(4, mesh[0] * mesh[1])  # four tasks
    saved = 4 * 3 * (len(prompts[0]) - 1) + (4 - places) * len(SYSTEM)
    in_two = 16 // (mesh[0] * mesh[1]) == 2  # a task's four samples
    saved -= 4 * (len(prompts[0]) - 1) if in_two else 0
    assert assert_same(split, engine(False), requests) == saved


def test_one_token_is_left_to_predict_what_follows():
    prefixes, ids = Prefixes(1, 100), np.arange(100)
    prefixes.put(0, 0, ids)
    assert prefixes.find(0, ids) == (0, 99)
    assert prefixes.find(0, ids[:70]) == (0, 69)
    assert prefixes.find(0, np.concatenate([ids[:80], [0, 0]])) == (0, 80)


def test_the_longest_beginning_of_the_same_adapter_is_found():
    prefixes = Prefixes(3, 400)
    prefixes.put(0, 0, np.arange(70))
    prefixes.put(1, 0, np.arange(90))
    prefixes.put(2, 1, np.arange(100))
    assert prefixes.find(0, np.arange(100)) == (1, 90)
    prefixes.extend(0, np.arange(70, 99))
    assert prefixes.find(0, np.arange(100)) == (0, 99)
    assert prefixes.find(0, np.arange(400)).tokens == 0  # less than a quarter
