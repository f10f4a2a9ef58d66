"""Stacked layers, scanned, are the same layers."""

from __future__ import annotations

import functools

import bounds
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from marft_jax.models import decoder, lora
from marft_jax.models.ops.remat import Remat
from marft_jax.models.weights.load import abstract_decoder, reader, shapes_of

LAYERS = 3


@functools.cache
def forward(stacked: bool, mesh: tuple[int, int, int], remat: Remat = "none"):
    """(hidden states, keys and values of each layer, gradients of the adapters) of some rows."""
    where = small.mesh_of(*mesh)
    base = small.base_on(where, LAYERS, stacked)
    graphdef, _ = abstract_decoder(base.config, jnp.float32, remat=remat)
    rng = np.random.default_rng(0)
    tokens_BT = jnp.asarray(rng.integers(0, 256, (8, 12)), jnp.int32)
    owners_BT = jnp.asarray(rng.integers(-1, 3, (8, 12)), jnp.int32)
    positions_BT = jnp.broadcast_to(jnp.arange(12), (8, 12))

    def loss(adapters):
        fused = lora.fuse(adapters, lora.scale_of(adapters, small.ALPHA), jnp.float32)
        mask = lora.owner_mask(owners_BT, fused)
        until_BT = jnp.full((8, 12), 11)
        read = decoder.forward(
            graphdef, base.params, tokens_BT, positions_BT, until_BT, fused, mask
        )
        return jnp.mean(jnp.square(read[0])), read

    grads, (hidden, cache) = jax.jit(jax.grad(loss, has_aux=True))(small.adapters(3, layers=LAYERS))
    layers = [cache[0].of(i) for i in range(LAYERS)] if stacked else cache
    return hidden, layers, grads


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("remat", ["none", "products", "block"])
@pytest.mark.slow
def test_hidden_states_cache_and_gradients_are_those_of_unrolled_layers(mesh, remat):
    expected = forward(False, (1, 1, 1), remat)
    bounds.close(forward(True, mesh, remat), expected, bounds.backward(layers=LAYERS))


def test_every_tensor_finds_its_layer():
    """Placed one by one, and read one by one, as for an export."""
    stacked, unrolled = (small.base_on(small.one_device(), LAYERS, s) for s in (True, False))
    assert shapes_of(stacked.params) == shapes_of(unrolled.params)
    ours, theirs = reader(stacked.params), reader(unrolled.params)
    for path in shapes_of(stacked.params):
        np.testing.assert_array_equal(ours(path), theirs(path))
    assert len(jax.tree.leaves(stacked.params)) < len(jax.tree.leaves(unrolled.params))
