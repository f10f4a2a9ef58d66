"""Layers with a window keep the last positions alone: nothing that is sampled changes by it."""

from __future__ import annotations

import bounds
import numpy as np
import pytest
import small

from marft_jax.engine.prefix_cache import Prefixes
from marft_jax.models.ops.kv import KV, Ring
from marft_jax.sampling.protocol import Request
from marft_jax.types import MAIN, Sampling

LAYERS, WINDOW, CONTEXT, RING = 4, 7, 320, 128
CONFIG = small.config_of(
    n_layers=LAYERS, window=WINDOW, sliding=(True, False, True, False), local_rope_theta=100.0
)
ROUNDING = bounds.logprobs(CONFIG, tokens=CONTEXT)


def engine(**how):
    how = {"context": CONTEXT, "longest": 96, "chunk": 16} | how
    return small.engine(layers=LAYERS, config=CONFIG, **how)


def asks(lengths, limit=24, shared=0, first=0):
    rng = np.random.default_rng(first)
    start = np.random.default_rng(99).integers(0, 256, shared)
    prompts = [np.concatenate([start, rng.integers(0, 256, n - shared)]) for n in lengths]
    return [
        Request(p.astype(np.int32), i % 3, Sampling(limit), (0, first + i, 0))
        for i, p in enumerate(prompts)
    ]


def of_full_forward(requests, done):
    everything = [r.prompt for r in requests], [c.ids for c in done], [r.owner for r in requests]
    return small.full_forward(
        small.adapters(3, layers=LAYERS), *everything, [1.0] * len(done),
        rows=8, width=CONTEXT, config=CONFIG,
    )  # fmt: skip


def assert_full(requests, done):
    for completion, expected in zip(done, of_full_forward(requests, done), strict=True):
        picked = expected[np.arange(len(completion.ids)), completion.ids]
        np.testing.assert_allclose(completion.logprobs, picked, atol=ROUNDING)


def kinds(one):
    caches = one._slots.cache
    return [(type(x), x.v_BGTC.shape[-2]) for x in caches]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.slow
def test_actions_of_prompts_of_every_length_are_those_of_a_full_forward_pass(stacked):
    """Shorter than the ring, as long, once round, twice round; actions that go round too."""
    one = engine(stacked=stacked)
    assert kinds(one)[:2] == [(Ring, RING), (KV, CONTEXT)]
    assert len(kinds(one)) == (2 if stacked else LAYERS)
    requests = asks([3, 40, 127, 128, 129, 200, 260]) + asks([100], limit=90, first=20)
    assert_full(requests, small.answers(one, requests))


@pytest.mark.slow
def test_a_group_and_a_conversation_go_on_from_rings():
    one, other = engine(), engine(reuse=False)
    [request] = asks([210], limit=40)
    group = [request._replace(key=(0, i, 0)) for i in range(6)]  # four slots
    done = small.answers(one, group)
    assert small.copied(one) >= 3 * 209
    for a, b in zip(done, small.answers(other, group), strict=True):
        assert np.array_equal(a.ids, b.ids)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=ROUNDING)
    before = small.copied(one)
    longer = np.concatenate([request.prompt, done[-1].ids, np.arange(20)]).astype(np.int32)
    follow = [request._replace(prompt=longer, key=(1, 0, 0))]
    assert_full(follow, small.answers(one, follow))
    assert small.copied(one) > before + 209


@pytest.mark.slow
def test_a_prefix_that_a_ring_no_longer_holds_is_computed_again():
    one = engine(slots=2)
    first, second = asks([300, 290], limit=4, shared=100)
    second = second._replace(owner=first.owner)
    done = [*small.answers(one, [first]), *small.answers(one, [second])]
    assert small.copied(one) == 0
    assert_full([first, second], done)


@pytest.mark.parametrize(("written", "found"), [(150, 100), (221, 100), (222, 0)])
def test_how_far_a_row_may_have_gone_on(written, found):
    """A ring of 128 positions for a window of 7 has room for 121 more."""
    held, ids = Prefixes(2, CONTEXT, slack=RING - WINDOW), np.arange(100, dtype=np.int32)
    held.put(0, 1, ids)
    held.grown(np.array([written, 0]))
    assert held.find(1, np.append(ids, 7)).tokens == found


@pytest.mark.slow
def test_rings_of_rows_on_several_devices():
    requests = asks([40, 180, 260, 129])
    split, whole = engine(where=small.mesh_of(2)), engine()
    for a, b in zip(small.answers(split, requests), small.answers(whole, requests), strict=True):
        assert np.array_equal(a.ids, b.ids)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=ROUNDING)


@pytest.mark.slow
def test_new_adapters_read_nothing_old():
    one = engine()
    requests = asks([200, 200])
    small.answers(one, requests)
    one.load({MAIN: small.adapters(3, layers=LAYERS)}, "")
    assert_full(requests, small.answers(one, requests))
