"""The same numbers, however they are computed: attention in pieces, remat, products of few rows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from flax import nnx

from marft_jax import lora
from marft_jax import mesh as mesh_lib
from marft_jax.engine.sampling import _likeliest
from marft_jax.models import attention as attention_lib
from marft_jax.models import decoder
from marft_jax.models.attention import KV, causal_attention, causal_attention_in_pieces
from marft_jax.models.decoder import Remat
from marft_jax.models.load import abstract_decoder


def draw(seed: int, *shape: int):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("t", [1, 63, 200, 300])
def test_attention_in_pieces_is_attention(t):
    q, kv = draw(0, 2, 4, t, 8), KV(draw(1, 2, 2, 8, t), draw(2, 2, 2, t, 8))
    segments_BT = jnp.asarray(np.sort(np.random.default_rng(3).integers(0, 4, (2, t))), jnp.int32)
    weight = draw(4, 2, 4, t, 8)

    def loss(attend):
        return jax.value_and_grad(
            lambda q, kv: jnp.sum(attend(q, kv, segments_BT) * weight), argnums=(0, 1)
        )(q, kv)

    for a, b in zip(
        jax.tree.leaves(loss(causal_attention)),
        jax.tree.leaves(loss(causal_attention_in_pieces)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_cpu_takes_attention_in_pieces():
    assert attention_lib.attention_on("cpu") is causal_attention_in_pieces
    assert attention_lib.attention_on("tpu") is causal_attention


def gradients_and_memory(remat: Remat):
    """Of a loss through four layers: the adapters' gradients, and the bytes of scratch memory."""
    config = dataclasses.replace(small.CONFIG, n_layers=4)
    graphdef, abstract = abstract_decoder(config, jnp.float32, remat=remat)
    leaves, tree = jax.tree.flatten(abstract)
    shapes = [x.shape for x in leaves]
    drawn = [0.1 * draw(i, *s) if len(s) > 1 else jnp.ones(s) for i, s in enumerate(shapes)]
    base = jax.tree.unflatten(tree, drawn)
    tokens_BT = jnp.zeros((2, 48), jnp.int32) + jnp.arange(48)[None]
    ones = jnp.ones_like(tokens_BT)

    def loss(adapters):
        fused = lora.fuse(adapters, jnp.float32)
        mask = lora.owner_mask(0 * tokens_BT, adapters, 2.0, jnp.float32)
        hidden, _ = decoder.forward(graphdef, base, tokens_BT, tokens_BT, ones, fused, mask)
        return jnp.sum(jnp.square(hidden[:, ::7]))

    options = mesh_lib.compiler_options(small.one_device())
    run = jax.jit(jax.grad(loss)).lower(small.adapters(2, layers=4)).compile(options)
    return run(small.adapters(2, layers=4)), run.memory_analysis().temp_size_in_bytes


def test_remat_changes_memory_and_not_gradients():
    whole, most = gradients_and_memory("none")
    products, less = gradients_and_memory("products")
    block, least = gradients_and_memory("block")
    for other in (products, block):
        for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
    assert least < less < most


def test_few_rows_and_many_give_the_same_product():
    x, kernel = draw(0, 200, 24), draw(1, 40, 24)
    many, few = decoder.product(x, kernel), decoder.product(x[:5], kernel)
    np.testing.assert_allclose(many[:5], few, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(many, x @ kernel.T, rtol=1e-5, atol=1e-5)


def test_the_likeliest_token_is_the_first_of_the_greatest():
    logits = draw(0, 6, 1000).round(1)  # with ties
    logits = logits.at[5].set(-jnp.inf).at[5, 999].set(0.0)
    np.testing.assert_array_equal(_likeliest(logits), jnp.argmax(logits, axis=-1))


def test_blocks_are_alike_so_that_one_trace_serves_all():
    graphdef, abstract = abstract_decoder(small.CONFIG, jnp.float32)
    layers = nnx.merge(graphdef, abstract).layers
    assert len({nnx.split(block)[0] for block in layers}) == 1
