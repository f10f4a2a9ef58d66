"""The verbs on data: without a team, several adapters and losses in one call, each as if alone."""

from __future__ import annotations

import bounds
import jax
import jax.numpy as jnp
import numpy as np
import on_data
import pytest

from marft_jax import policy as verbs
from marft_jax.errors import BadInput
from marft_jax.models import decoder, lora
from marft_jax.models.weights import tiny
from marft_jax.policy import Datum

ROOM, RANK = 3, 8
HOW = {"eps": 1e-8, "b1": 0.8, "clip": 1.0}


@pytest.fixture(scope="module")
def empty():
    return verbs.open_policy("tiny", room=ROOM, rank=RANK)


def moved(adapter, seed):
    """An adapter whose B is not zero."""
    rng = np.random.default_rng(seed)
    factors = {
        name: {"a": x["a"], "b": rng.normal(0, 0.02, x["b"].shape).astype(np.float32)}
        for name, x in adapter.factors.items()
    }
    return adapter._replace(factors=factors)


@pytest.fixture(scope="module")
def adapters(empty):
    """Of unlike ranks, scales and matrices, by their slot."""
    small = verbs.fresh(empty, rank=2, alpha=4.0, targets=("q", "v"), seed=1)
    return {0: moved(small, 1), 2: moved(verbs.fresh(empty, rank=RANK, alpha=16.0, seed=2), 2)}


def data_of(slot, n=3, level="token"):
    rng, found = np.random.default_rng(slot), []
    for i in range(n):
        ids, positions = rng.integers(0, 200, 12 + 3 * i), np.arange(4, 12)
        units = positions * 0 if level == "action" else None
        count = 1 if level == "action" else len(positions)
        found.append(
            Datum.of(
                slot, ids, positions, rng.integers(0, 200, 8), logprobs=rng.normal(-3, 0.1, 8),
                temperature=0.7, units=units, advantages=rng.normal(size=count),
                weights=rng.uniform(0.5, 2, count),
            )
        )  # fmt: skip
    return found


DATA = {0: data_of(0), 2: data_of(2, level="action")}


@pytest.fixture(scope="module", autouse=True)
def sampled(empty, adapters):
    """The data were sampled by a policy not far away."""
    policy = with_adapters(empty, adapters)
    for slot, own in DATA.items():
        rng = np.random.default_rng(slot)
        logprobs = [x + rng.normal(0, 0.05, len(x)) for x in on_data.forward(policy, own)]
        DATA[slot] = [x._replace(logprobs=y) for x, y in zip(own, logprobs, strict=True)]


LOSS = {0: "cross_entropy", 2: "importance_sampling"}


def with_adapters(empty, adapters):
    for slot, adapter in adapters.items():
        empty = verbs.add(empty, slot, adapter)
    return empty


def learned(policy, slots, steps=2):
    """The policy after steps on the data of these slots, which alternate in each call."""
    both = [x for pair in zip(*(DATA[s] for s in slots), strict=True) for x in pair]
    losses = [LOSS[datum.owner] for datum in both]
    rates = np.linspace(1e-2, 3e-2, ROOM)
    for _ in range(steps):
        sums, found = on_data.forward_backward(policy, both, losses)
        policy, norms = verbs.optim_step(policy, sums, verbs.adam(rates, **HOW))
    return policy, {s: [f for f, x in zip(found, both, strict=True) if x.owner == s] for s in slots}


def leaves(adapter):
    return [np.asarray(x) for x in jax.tree.leaves(adapter)]


@pytest.mark.slow
def test_adapters_of_unlike_ranks_and_losses_in_one_call_are_bit_for_bit_those_alone(
    empty, adapters
):
    whole, found = learned(with_adapters(empty, adapters), [0, 2])
    for slot, adapter in adapters.items():
        alone, own = learned(verbs.add(empty, slot, adapter), [slot])
        before, after = leaves(adapter.factors), leaves(verbs.take(whole, slot).factors)
        assert max(np.abs(x - y).max() for x, y in zip(before, after, strict=True)) > 1e-3
        both = (leaves(verbs.take(policy, slot)) for policy in (whole, alone))
        for x, y in zip(*both, strict=True):
            np.testing.assert_array_equal(x, y)
        for x, y in zip(found[slot], own[slot], strict=True):
            np.testing.assert_array_equal(x.logprobs, y.logprobs)
            np.testing.assert_array_equal(x.losses, y.losses)
    assert not any(x[1].any() for x in jax.tree.leaves(whole.state.adapters))


def reference(policy, adapter, data, name):
    """(log-probs, losses, gradient) of one adapter by itself, from the definitions."""
    base = policy.base

    def logprobs_of(factors, datum):
        tree = jax.tree.map(lambda x: jnp.asarray(x)[None], factors)
        fused = lora.fuse(tree, adapter.alpha / adapter.rank, jnp.float32)
        ids = jnp.asarray(datum.ids)[None]
        at, until = jnp.arange(ids.shape[1])[None], jnp.full_like(ids, ids.shape[1] - 1)
        mask = lora.owner_mask(jnp.zeros_like(ids), fused)
        hidden, _ = decoder.forward(base.graphdef, base.params, ids, at, until, fused, mask)
        logits = decoder.project(base.graphdef, base.params, hidden)[0, datum.positions]
        return jax.nn.log_softmax(logits / 0.7)[np.arange(len(datum.targets)), datum.targets]

    def total(factors):
        told, sums = [], 0.0
        for datum in data:
            logprobs = logprobs_of(factors, datum)
            units = datum.units[-1] + 1
            new, old = (
                jax.ops.segment_sum(jnp.asarray(x), datum.units, units)
                for x in (logprobs, datum.logprobs)
            )
            loss = -new
            if name == "importance_sampling":
                loss = -jnp.exp(new - old) * datum.inputs["advantages"]
            sums += (loss * datum.inputs["weights"]).sum()
            told.append((logprobs, loss))
        return sums, told

    gradient, told = jax.jit(jax.grad(total, has_aux=True))(adapter.factors)
    return told, gradient


@pytest.mark.parametrize("slot", DATA)
@pytest.mark.slow
def test_a_step_is_that_of_the_definitions(empty, adapters, slot):
    """Log-probs, losses, gradient sums and Adam as in PyTorch, as far as rounding goes."""
    policy, adapter = with_adapters(empty, adapters), adapters[slot]
    gap = bounds.logprobs(tiny.CONFIG) / 0.7
    told, gradient = reference(policy, adapter, DATA[slot], LOSS[slot])
    sums, found = on_data.forward_backward(policy, DATA[slot], LOSS[slot])
    for got, (logprobs, losses) in zip(found, told, strict=True):
        np.testing.assert_allclose(got.logprobs, logprobs, atol=gap)
        bounds.close(got.losses, losses, bounds.update(tiny.CONFIG))
    for got, (logprobs, _) in zip(on_data.forward(policy, DATA[slot]), told, strict=True):
        np.testing.assert_allclose(got, logprobs, atol=gap)
    after, norms = verbs.optim_step(policy, sums, verbs.adam(1e-2, **HOW))
    slopes = [x.astype(np.float64) for x in leaves(gradient)]
    norm = np.sqrt(sum((g**2).sum() for g in slopes))
    roundings = bounds.update(tiny.CONFIG)
    bounds.close(norms[slot], norm, roundings)
    slopes = [g * min(1, HOW["clip"] / norm) for g in slopes]
    expected = [  # of the first step m / √v is g / |g|
        x - 1e-2 * g / (np.abs(g) + HOW["eps"])
        for x, g in zip(leaves(adapter.factors), slopes, strict=True)
    ]
    got = leaves(verbs.take(after, slot).factors)
    bounds.close_steps(got, expected, [g**2 for g in slopes], 1e-2, roundings)


@pytest.mark.slow
def test_sums_over_calls_are_those_of_one_call(empty, adapters):
    policy, data = with_adapters(empty, adapters), DATA[0]
    whole, _ = on_data.forward_backward(policy, data, "ppo")
    parts, _ = on_data.forward_backward(policy, data[:1], "ppo")
    parts, _ = on_data.forward_backward(policy, data[1:], "ppo", parts)
    for x, y in zip(jax.tree.leaves(whole.gradient), jax.tree.leaves(parts.gradient), strict=True):
        bounds.close(x, y, bounds.update(tiny.CONFIG))


@pytest.mark.slow
def test_counts_make_a_mean_and_no_weight_moves_nothing(empty, adapters):
    policy = with_adapters(empty, adapters)

    def step(**inputs):
        units = {name: np.full(8, x) for name, x in inputs.items()}
        data = [x._replace(inputs={**x.inputs, **units}) for x in DATA[0]]
        sums, _ = on_data.forward_backward(policy, data, "reinforce")
        return verbs.optim_step(policy, sums, verbs.adam(1e-2))

    total, mean = step(weights=1.0), step(weights=1.0, counts=1.0)
    bounds.close(total[1][0], mean[1][0] * 8 * len(DATA[0]), bounds.update(tiny.CONFIG))
    still, _ = step(weights=0.0)
    jax.tree.map(np.testing.assert_array_equal, still.state, policy.state)


@pytest.mark.slow
def test_an_adapter_is_saved_with_its_optimiser_and_goes_on(empty, adapters, tmp_path):
    policy, _ = learned(with_adapters(empty, adapters), [0, 2], steps=1)
    verbs.save(verbs.take(policy, 0), tmp_path / "one.safetensors")
    read = verbs.load(tmp_path / "one.safetensors")
    assert read.rank == 2 and {*read.factors} == {"q", "v"} and read.count == 1
    elsewhere, _ = learned(verbs.add(verbs.drop(policy, 0), 0, read), [0, 2], steps=1)
    stayed, _ = learned(policy, [0, 2], steps=1)
    jax.tree.map(np.testing.assert_array_equal, elsewhere.state, stayed.state)
    again = verbs.take(verbs.add(policy, 0, read._replace(moments=None, count=0)), 0)
    assert again.count == 0 and not any(x.any() for x in jax.tree.leaves(again.moments))


def test_what_does_not_fit_is_one_line(empty, adapters, tmp_path):
    with pytest.raises(BadInput, match="expected rank 1 to 8 .* got rank 9"):
        verbs.add(empty, 0, verbs.fresh(empty, rank=9, alpha=1.0))
    policy, [datum, *_] = with_adapters(empty, adapters), DATA[0]
    for slot in (1, 3, -1):
        with pytest.raises(BadInput, match=rf"data\[0\].owner: .* adapter, .*, got {slot}"):
            on_data.forward(policy, [datum._replace(owner=slot)])
    for slot in (ROOM, -1):
        with pytest.raises(BadInput, match=f"slot: expected a slot, from 0 to 2, got {slot}"):
            verbs.add(policy, slot, adapters[0])
    with pytest.raises(BadInput, match="slot: expected a slot with an adapter, .* got 1"):
        verbs.take(policy, 1)
    with pytest.raises(BadInput, match="--lora.targets"):
        verbs.fresh(policy, rank=2, alpha=1.0, targets=("nothing",))
    for name in ("ids", "targets"):
        for token in (-1, policy.base.config.vocab_size):
            wrong = datum._replace(**{name: np.full_like(getattr(datum, name), token)})
            said = rf"data\[1\].{name}: expected tokens .* got {token} to"
            with pytest.raises(BadInput, match=said):
                on_data.forward(policy, [datum, wrong])
    with pytest.raises(BadInput, match="loss: expected one of .* got 'crossentropy'"):
        on_data.forward_backward(policy, [datum], "crossentropy")
    with pytest.raises(ValueError, match="positions: expected 0 to 2"):
        Datum.of(0, [1, 2, 3], [3], [4])
    with pytest.raises(ValueError, match="units: expected numbers from 0"):
        Datum.of(0, [1, 2, 3], [0, 1], [4, 5], units=[0, 2])
    with pytest.raises(ValueError, match="advantages: expected one number for each of 1 units"):
        Datum.of(0, [1, 2, 3], [0, 1], [4, 5], units=[0, 0], advantages=[1, 2])
    (tmp_path / "x").write_bytes(b"no tensors")
    with pytest.raises(BadInput, match="x"):
        verbs.load(tmp_path / "x")
