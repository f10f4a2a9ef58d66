"""A model with windows and all else that Gemma has: in rows, in a cache, stacked, on meshes."""

from __future__ import annotations

import bounds
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from marft_jax.models import decoder, lora
from marft_jax.models.families import multipliers
from marft_jax.models.ops.attention import Scores, causal_attention
from marft_jax.models.ops.cpu_attention import attention_by_rule, causal_attention_in_pieces
from marft_jax.models.ops.kv import KV
from marft_jax.models.rope import RopeScaling
from marft_jax.models.weights.load import abstract_decoder
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.sampling.protocol import Request
from marft_jax.types import Sampling

LAYERS, WINDOW = 3, 7
CONFIG = small.config_of(
    n_layers=LAYERS, tie_embeddings=True, qk_norm=True, window=WINDOW, sliding=(True, False, True),
    local_rope_theta=100.0, query_pre_attn_scalar=12.0, activation="gelu_pytorch_tanh",
    post_norms=True, norm_offset=True, scale_embeddings=True,
)  # fmt: skip

RULES = small.config_of(
    n_layers=LAYERS, rope_scaling=RopeScaling("yarn", 4.0, 1.0, 32.0, 16, 1.1), rotary_channels=4,
    rotated=(True, False, True), window=WINDOW, sliding=(True, False, False), qk_norm=True,
    wide_norm=True, cap=2.0, sinks=True, pre_norms=False, post_norms=True, logits_cap=4.0,
    **multipliers(0.4, 2.0, 0.7, 1.5),
)  # fmt: skip
"""What other families have: rules for scores, layers without rotation, multipliers."""


def hidden(
    where, tokens, positions, until, *, stacked=False, attention=causal_attention, config=CONFIG
):
    """Final hidden states, and the adapters' gradients of the sum of their squares."""
    base = small.base_on(where, LAYERS, stacked, config)
    graphdef, _ = abstract_decoder(base.config, jnp.float32, attention=attention, remat="products")

    def loss(adapters):
        fused = lora.fuse(adapters, lora.scale_of(adapters, small.ALPHA), jnp.float32)
        mask = lora.owner_mask(0 * tokens, fused)
        out, _ = decoder.forward(graphdef, base.params, tokens, positions, until, fused, mask)
        return jnp.sum(jnp.square(out)), out

    run = jax.value_and_grad(mesh_lib.with_mesh(where, loss), has_aux=True)
    (_, out), gradients = jax.jit(run)(small.adapters(layers=LAYERS))
    return jax.device_get((out, gradients))


def rows(b: int = 4, t: int = 60):
    """Two sequences to a row that share a prefix of 20 tokens."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (b, t)), jnp.int32)
    places = np.arange(t)
    positions = np.where(places < 40, places, places - 20)
    until = np.where(places < 20, t - 1, np.where(places < 40, 39, t - 1))
    return tokens, *(jnp.asarray(np.broadcast_to(x, (b, t)), jnp.int32) for x in (positions, until))


@pytest.mark.parametrize("attention", [causal_attention, causal_attention_in_pieces])
@pytest.mark.slow
def test_a_sequence_that_shares_its_prefix_reads_as_far_as_it_does_alone(attention):
    tokens, positions, until = rows()
    where = small.one_device()
    shared, _ = hidden(where, tokens, positions, until, attention=attention)
    alone = jnp.concatenate([tokens[:, :20], tokens[:, 40:]], axis=1)
    positions = jnp.broadcast_to(jnp.arange(40), alone.shape)
    expected, _ = hidden(where, alone, positions, jnp.full_like(positions, 39))
    ours = np.concatenate([shared[:, :20], shared[:, 40:]], axis=1)
    bounds.close(ours, expected, bounds.forward(CONFIG))


@pytest.mark.parametrize(
    "shape, config",
    [((1, 1, 1), CONFIG), ((2, 2, 2), CONFIG), ((2, 2, 2), RULES)],
    ids=["one", "mesh", "mesh-rules"],
)
@pytest.mark.slow
def test_stacked_layers_that_differ_compute_what_unrolled_ones_do(shape, config):
    one = hidden(small.one_device(), *rows(), config=config)
    many = hidden(small.mesh_of(*shape), *rows(), stacked=True, config=config)
    bounds.close(many, one, bounds.backward(config))


def test_attention_by_rule_is_the_reference_in_pieces_and_by_gradient():
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((1, 4, 300, 8), (1, 2, 8, 300), (1, 2, 300, 8))
    )
    rule, until = Scores(2.0, jnp.asarray([0.3, -1.0, 2.0, 0.0])), jnp.full((1, 300), 299)
    positions = jnp.arange(300)[None]

    def gradients(form):
        def loss(q, k, v):
            return jnp.sum(jnp.sin(form(until, positions, 50)(q, KV(k, v), True, rule)))

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)

    expected, found = gradients(causal_attention), gradients(attention_by_rule)
    bounds.close(found, expected, bounds.sums(q.size, 300), size=1.0)


def asked(n: int, shared: int = 0) -> list[Request]:
    """Prompts much longer than the window."""
    rng = np.random.default_rng(1)
    start = rng.integers(0, 256, shared)
    prompts = [np.concatenate([start, rng.integers(0, 256, 20 + i)]) for i in range(n)]
    return [
        Request(prompt.astype(np.int32), 0 if shared else i % 3, Sampling(12), (0, i, 0))
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("stacked, config", [(False, CONFIG), (True, RULES)], ids=["", "stacked"])
def test_logprobs_of_the_engine_are_those_of_a_full_forward_pass(stacked, config):
    engine, requests = small.engine(layers=LAYERS, stacked=stacked, config=config), asked(6)
    done = small.answers(engine, requests)
    whole = small.full_forward(
        small.adapters(3, layers=LAYERS), [r.prompt for r in requests], [c.ids for c in done],
        [r.owner for r in requests], [1.0] * len(requests), config=config,
    )  # fmt: skip
    for completion, expected in zip(done, whole, strict=True):
        picked = expected[np.arange(len(completion.ids)), completion.ids]
        np.testing.assert_allclose(completion.logprobs, picked, atol=bounds.logprobs(config))


@pytest.mark.slow
def test_a_cached_prefix_is_read_as_far_as_the_window_goes():
    engines = [
        small.engine(context=192, layers=LAYERS, reuse=reuse, config=CONFIG)
        for reuse in (True, False)
    ]
    one, other = (small.answers(engine, asked(4, shared=80)) for engine in engines)
    assert small.copied(engines[0]) >= 3 * 80
    for a, b in zip(one, other, strict=True):
        assert a.ids.tolist() == b.ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=bounds.logprobs(CONFIG))
