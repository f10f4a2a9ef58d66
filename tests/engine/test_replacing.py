"""One adapter of a running engine is replaced: the others notice nothing, and it is all new."""

from __future__ import annotations

import bounds
import jax
import numpy as np
import pytest
import small

from marft_jax.sampling.batcher import Batcher
from marft_jax.sampling.protocol import Request
from marft_jax.types import MAIN, Sampling

SCALE = small.ALPHA / small.RANK


def asks(owners, tokens=40, limit=16):
    prompts = [np.random.default_rng(n).integers(0, 256, tokens) for n in owners]
    return [
        Request(prompt.astype(np.int32), n, Sampling(limit), (0, i, 0))
        for i, (n, prompt) in enumerate(zip(owners, prompts, strict=True))
    ]


def same(one, other):
    return np.array_equal(one.ids, other.ids) and np.array_equal(one.logprobs, other.logprobs)


def of(adapters, n):
    return jax.tree.map(lambda x: x[n], adapters)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.slow
def test_an_adapter_is_replaced_while_others_are_sampled_with(stacked):
    engine = small.engine(stacked=stacked)
    old, new = small.adapters(3), small.adapters(3, seed=1)
    engine.load({MAIN: old}, "old")
    first = small.answers(engine, asks([0, 1, 2]))
    tickets = [engine.submit(request) for request in asks([0, 2])]
    engine.step()
    assert engine.busy
    engine.replace(1, of(new, 1), SCALE, "new")
    tickets.append(engine.submit(asks([1])[0]))
    done = {}
    while engine.busy:
        done |= dict(engine.step())
    zero, two, one = (done[ticket] for ticket in tickets)
    expected = small.engine(stacked=stacked)
    expected.load({MAIN: new}, "")
    assert same(one, small.answers(expected, asks([1]))[0]) and not same(one, first[1])
    assert [c.version for c in (zero, one, two)] == ["old", "new", "old"]
    undisturbed = small.engine(stacked=stacked)
    undisturbed.load({MAIN: old}, "")
    small.answers(undisturbed, asks([0, 1, 2]))
    both = small.answers(undisturbed, asks([0, 2]))
    assert same(zero, both[0]) and same(two, both[1])


def test_what_the_replaced_adapter_computed_is_not_read_again():
    engine = small.engine()
    engine.load({MAIN: small.adapters(3)}, "")
    small.answers(engine, asks([0, 1]))
    engine.replace(1, of(small.adapters(3, seed=1), 1), SCALE, "new")
    small.answers(engine, asks([1]))
    assert engine.stats()["tokens/prefix_cached"] == 0
    small.answers(engine, asks([0]))
    assert engine.stats()["tokens/prefix_cached"] > 0


def test_a_smaller_adapter_with_fewer_matrices_is_itself_in_the_stack():
    """Of half the rank, of q alone, with twice the scale."""
    old, half = small.adapters(3), small.RANK // 2
    q = {"a": old["q"]["a"][1][..., :half], "b": old["q"]["b"][1][..., :half, :]}
    engine = small.engine()
    engine.load({MAIN: old}, "")
    engine.replace(1, {"q": q}, 2 * SCALE, "")
    [request] = asks([1])
    [done] = small.answers(engine, [request])
    alone = jax.tree.map(np.zeros_like, old)
    alone["q"]["a"][1, ..., :half], alone["q"]["b"][1, ..., :half, :] = q["a"], 2 * q["b"]
    [expected] = small.full_forward(alone, [request.prompt], [done.ids], [1], [1.0])
    picked = expected[np.arange(len(done.ids)), done.ids]
    np.testing.assert_allclose(done.logprobs, picked, atol=bounds.logprobs())


def test_an_adapter_in_use_is_not_replaced():
    engine = small.engine()
    engine.submit(asks([1])[0])
    with pytest.raises(AssertionError):
        engine.replace(1, of(small.adapters(3), 1), SCALE, "")
    engine.step()
    with pytest.raises(AssertionError):
        engine.replace(1, of(small.adapters(3), 1), SCALE, "")


@pytest.mark.slow
def test_stop_ids_end_an_action_and_end_tokens_may_be_switched_off():
    ends = tuple(range(0, 264, 8))
    engine = small.engine(eos_ids=ends)
    requests = [r._replace(ends=False) for r in asks([0, 1, 2, 0, 1, 2])]
    whole = small.answers(engine, requests)
    assert {c.reason for c in whole} == {"length"} and {len(c.ids) for c in whole} == {16}
    assert any(set(c.ids.tolist()) & {*ends} for c in whole)
    stops = tuple(range(0, 264, 3))
    cut = small.answers(engine, [r._replace(stop_ids=stops) for r in requests])
    for one, other in zip(cut, whole, strict=True):
        first = [i in stops for i in [*other.ids.tolist(), 0]].index(True) + 1
        assert np.array_equal(one.ids, other.ids[:first])
        assert one.reason == ("stop" if first <= 16 else "length")


@pytest.mark.slow
def test_a_call_between_requests_runs_where_the_sampler_runs_and_keeps_its_errors():
    engine = small.engine()
    with Batcher(engine) as batcher:
        old = batcher.submit(asks([1])[0]).result(300)
        put = batcher.run_between_steps(
            lambda: engine.replace(1, of(small.adapters(3, 1), 1), SCALE, "new")
        )
        new = batcher.submit(asks([1])[0])
        assert put.result(300) is None and new.result(300).version == "new"
        assert not same(old, new.result())
        wrong = batcher.run_between_steps(lambda: 1 / 0)
        assert isinstance(wrong.exception(300), ZeroDivisionError)
        assert batcher.submit(asks([0])[0]).result(300).reason
