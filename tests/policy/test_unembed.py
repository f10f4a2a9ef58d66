"""Adapters on the matrix to logits: in learning, in sampling, beside adapters without one."""

from __future__ import annotations

import functools

import bounds
import jax
import jax.numpy as jnp
import numpy as np
import on_data
import pytest

from marft_jax import policy as verbs
from marft_jax.engine.compiled import Shape
from marft_jax.models import decoder, lora
from marft_jax.models.weights import tiny
from marft_jax.policy import Datum
from marft_jax.run.samplers import engine_on
from marft_jax.sampling.protocol import Request
from marft_jax.types import Sampling

RANK = 8
EVERY = (lora.ALL_LINEAR, lora.UNEMBED)


@pytest.fixture(scope="module")
def empty():
    return verbs.open_policy("tiny", room=3, rank=RANK, targets=EVERY)


def moved(adapter, seed, size=0.02):
    """An adapter whose B is not zero."""
    rng = np.random.default_rng(seed)
    factors = {
        name: {"a": x["a"], "b": rng.normal(0, size, x["b"].shape).astype(np.float32)}
        for name, x in adapter.factors.items()
    }
    return adapter._replace(factors=factors)


@pytest.fixture(scope="module")
def adapters(empty):
    """With the matrix to logits, without it, and with it alone; by slot."""
    return {
        0: moved(verbs.fresh(empty, rank=4, alpha=16.0, seed=1), 1),
        1: moved(verbs.fresh(empty, rank=RANK, alpha=16.0, targets=["q", "v"], seed=2), 2),
        2: moved(verbs.fresh(empty, rank=2, alpha=2.0, targets=[lora.UNEMBED], seed=3), 3, 0.2),
    }


@pytest.fixture(scope="module")
def policy(empty, adapters):
    for slot, adapter in adapters.items():
        empty = verbs.add(empty, slot, adapter)
    return empty


def data_of(slot, n=3):
    rng = np.random.default_rng(slot)
    return [
        Datum.of(
            slot, rng.integers(0, 200, 14), positions := np.arange(4, 12),
            rng.integers(0, 200, len(positions)),
            weights=rng.uniform(0.5, 2, len(positions)),
        )
        for _ in range(n)
    ]  # fmt: skip


def by_definition(policy, adapter, datum, factors):
    """log softmax((W + B A · alpha / rank) h), with W apart from the layers."""
    scale, base = adapter.alpha / adapter.rank, policy.base
    tree = jax.tree.map(lambda x: jnp.asarray(x)[None], factors)
    head = tree.pop(lora.UNEMBED, None)
    fused = lora.fuse(tree, scale, jnp.float32) if tree else None
    ids = jnp.asarray(datum.ids)[None]
    at, until = jnp.arange(ids.shape[1])[None], jnp.full_like(ids, ids.shape[1] - 1)
    mask = lora.owner_mask(jnp.zeros_like(ids), fused) if fused else None
    hidden, _ = decoder.forward(base.graphdef, base.params, ids, at, until, fused, mask)
    matrix = decoder.vocabulary(base.graphdef, base.params).matrix_VD
    if head is not None:
        matrix += scale * (head["a"][0, 0] @ head["b"][0, 0]).T
    logprobs = jax.nn.log_softmax(hidden[0, datum.positions] @ matrix.T)
    return logprobs[np.arange(len(datum.targets)), datum.targets]


@pytest.mark.slow
def test_logprobs_and_gradients_are_those_of_the_sum_of_the_matrices(policy, adapters):
    data = [x for slot in adapters for x in data_of(slot, 1)]
    sums, found = on_data.forward_backward(policy, data, "cross_entropy")
    for slot, adapter in adapters.items():
        own = [(x, f) for x, f in zip(data, found, strict=True) if x.owner == slot]

        @jax.jit
        @functools.partial(jax.value_and_grad, has_aux=True)
        def gradients(factors, adapter=adapter, own=own):
            each = [by_definition(policy, adapter, x, factors) for x, _ in own]
            losses = [-(y * x.inputs["weights"]).sum() for y, (x, _) in zip(each, own, strict=True)]
            return sum(losses), each

        (_, each), expected = gradients(jax.tree.map(jnp.asarray, adapter.factors))
        for one, (_, learned) in zip(each, own, strict=True):
            np.testing.assert_allclose(learned.logprobs, one, atol=bounds.logprobs(tiny.CONFIG))
        for name, pair in expected.items():
            for kind, x in pair.items():
                got = np.asarray(sums.gradient[name][kind].sum(0)[slot])
                own = got[tuple(map(slice, x.shape))]
                bounds.close(own, x, bounds.backward(tiny.CONFIG))
                assert not got[..., adapter.rank :].any() if kind == "a" else True
    assert not np.asarray(sums.gradient[lora.UNEMBED]["b"][:, 1]).any()


@pytest.mark.slow
def test_what_is_sampled_with_it_has_the_logprobs_that_are_learned(policy, adapters):
    shape = Shape(slots=4, chunk=4, context=64, longest=16)
    engine = engine_on(policy.base, policy.mesh, shape, adapters=4, rank=RANK, targets=EVERY)
    owners = {slot: 3 - slot for slot in adapters}  # other places than where they are learned
    for slot, adapter in adapters.items():
        engine.replace(owners[slot], adapter.factors, adapter.alpha / adapter.rank, str(slot))
    rng = np.random.default_rng(0)
    asked = {
        engine.submit(
            Request(rng.integers(0, 200, 9).astype(np.int32), owners[s], Sampling(12), (0, i, 0))
        ): s
        for i, s in enumerate([0, 1, 2, 0, 1, 2])
    }
    prompts = {entry.ticket: entry.request.prompt for entry in engine._schedule._waiting}
    done = {}
    while engine.busy:
        done |= dict(engine.step())
    for ticket, slot in asked.items():
        ids, logprobs = done[ticket].ids, done[ticket].logprobs
        whole, first = np.concatenate([prompts[ticket], ids]), len(prompts[ticket]) - 1
        datum = Datum.of(slot, whole[:-1], first + np.arange(len(ids)), ids)
        [learned] = on_data.forward(policy, [datum])
        np.testing.assert_allclose(logprobs, learned, atol=bounds.logprobs(tiny.CONFIG))
        assert done[ticket].version == str(slot)


@pytest.mark.slow
def test_a_token_that_is_not_finite_stops_its_own_adapter_alone(policy):
    """All adapters share the product with the hidden states."""
    data = [*data_of(0), *data_of(2)]
    bad = data[0]._replace(inputs={"weights": data[0].inputs["weights"] * np.nan})
    good, _ = on_data.forward_backward(policy, data[3:], "cross_entropy")
    sums, _ = on_data.forward_backward(policy, [bad, *data[1:]], "cross_entropy")
    for one, other in zip(*map(jax.tree.leaves, (sums.gradient, good.gradient)), strict=True):
        np.testing.assert_array_equal(one[:, 2], other[:, 2])
        assert np.isfinite(one).all()
    after, norms = verbs.optim_step(policy, sums, verbs.adam(1e-2))
    assert np.isnan(norms[0]) and norms[2] > 0
    head = policy.state.adapters[lora.UNEMBED]["b"], after.state.adapters[lora.UNEMBED]["b"]
    np.testing.assert_array_equal(head[0][0], head[1][0])
    assert np.abs(head[0][2] - head[1][2]).max() > 1e-3


@pytest.mark.slow
def test_the_likeliest_tokens_at_each_place(policy, adapters):
    data = [x for slot in adapters for x in data_of(slot, 2)]
    again = [data[0]._replace(positions=data[0].positions * 0 + 5)]  # one place, many targets
    for datum, (ids, logprobs) in zip(
        [*data, *again], on_data.top(policy, [*data, *again], 3), strict=True
    ):
        each = [
            on_data.forward(policy, [datum._replace(targets=ids[:, k].astype(np.int32))])[0]
            for k in range(3)
        ]
        np.testing.assert_allclose(logprobs, np.stack(each, 1), atol=bounds.logprobs(tiny.CONFIG))
        assert (np.diff(logprobs) <= 0).all()
        [own] = on_data.forward(policy, [datum])
        assert (own <= logprobs[:, 0] + bounds.logprobs(tiny.CONFIG)).all()


@pytest.mark.slow
def test_adam_goes_on_without_an_advantage_if_it_is_asked_to(policy):
    data = data_of(0)
    sums, _ = on_data.forward_backward(policy, data, "cross_entropy")
    first, _ = verbs.optim_step(policy, sums, verbs.adam(1e-2))
    none = [x._replace(inputs={"weights": x.inputs["weights"] * 0}) for x in data]
    for always in (False, True):
        sums, _ = on_data.forward_backward(first, none, "cross_entropy")
        how = verbs.adam(1e-2, always=always)
        second, _ = verbs.optim_step(first, sums, how)
        steps = verbs.take(second, 0).count
        assert steps == (2 if always else 1)
        b = [np.asarray(p.state.adapters["q"]["b"][0]) for p in (first, second)]
        assert (np.abs(b[0] - b[1]).max() > 1e-4) == always
