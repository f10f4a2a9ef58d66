"""Stacked adapters: every token passes through its owner's, and through no other."""

from __future__ import annotations

import bounds
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from marft_jax.errors import BadInput
from marft_jax.models import lora
from marft_jax.models.weights.load import abstract_decoder


def test_all_owners_at_once_is_each_owner_alone():
    adapters = small.adapters(3)
    x = jax.random.normal(jax.random.key(0), (4, 5, small.CONFIG.d_model))
    owners = jnp.asarray(np.random.default_rng(0).integers(-1, 3, (4, 5)))
    y = jnp.zeros((4, 5, small.CONFIG.matrices()["q"][0].d_out))
    fused = lora.fuse(adapters, lora.scale_of(adapters, small.ALPHA), jnp.float32)
    mask = lora.owner_mask(owners, fused)
    for layer in range(small.CONFIG.n_layers):
        together = lora.add_lora(y, x, fused.of(layer, small.CONFIG)["q"], mask)
        a, b = (adapters["q"][k][:, layer] for k in ("a", "b"))
        alone = jnp.stack([x @ a[n] @ b[n] for n in range(3)]) * small.ALPHA / small.RANK
        expected = sum(jnp.where((owners == n)[..., None], alone[n], 0) for n in range(3))
        bounds.close(together, expected, bounds.sums(32, 3))


def test_fresh_adapters_change_nothing_and_do_not_depend_on_their_number():
    few, many = (
        lora.init(jax.random.key(0), small.CONFIG, adapters=range(n), rank=3, targets=("q", "down"))
        for n in (1, 3)
    )
    assert not any(np.any(tree["b"]) for tree in many.values())
    chex.assert_trees_all_equal(few["down"]["a"][0], many["down"]["a"][0])
    assert lora.shape_of(many) == (3, 3)


def test_adapters_of_a_large_team_are_drawn_by_a_program_of_the_same_size():
    def equations(adapters: int) -> int:
        draw = lambda key: lora.init(  # noqa: E731
            key, small.CONFIG, adapters=range(adapters), rank=2, targets=("q", "down")
        )
        return len(jax.make_jaxpr(draw)(jax.random.key(0)).eqns)

    assert equations(300) == equations(3)


def test_each_owner_gets_a_gradient_from_its_own_tokens_only():
    adapters = small.adapters(3)
    x = jax.random.normal(jax.random.key(0), (6, small.CONFIG.d_model))
    owners = jnp.array([0, 0, 1, -1, 0, 1])

    @jax.jit
    def gradient(adapters, x):
        def total(adapters):
            fused = lora.fuse(adapters, lora.scale_of(adapters, small.ALPHA), jnp.float32)
            mask, ours = lora.owner_mask(owners, fused), fused.of(0, small.CONFIG)["q"]
            return jnp.square(lora.add_lora(jnp.ones((6, 32)), x, ours, mask)).sum()

        return jax.grad(total)(adapters)["q"]

    usual, other = gradient(adapters, x), gradient(adapters, x.at[2].mul(3))
    for part in ("a", "b"):
        assert not np.any(usual[part][2])
        chex.assert_trees_all_equal(usual[part][0], other[part][0])
        assert not np.array_equal(usual[part][1], other[part][1])


def test_gradients_are_those_of_the_formula():
    rng = np.random.default_rng(0)
    x, a, b, weight = (
        jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 3, 8), (4, 8), (4, 6), (2, 3, 6))
    )
    mask = lora.OwnerMask(jnp.asarray(rng.integers(0, 2, (2, 3, 4)), jnp.float32))

    def gradients(f):
        return jax.grad(lambda *args: jnp.sum(jnp.square(f(*args)) * weight), (0, 1, 2))(x, a, b)

    ours = gradients(lambda x, a, b: lora.add_lora(weight, x, lora.Fused(a, b), mask))
    plain = gradients(lambda x, a, b: weight + ((x @ a.T) * mask.columns) @ b)
    bounds.close(ours, plain, bounds.sums(8, 4, 6))


def test_fuse_keeps_each_layer_and_target_apart():
    adapters = small.adapters(2)
    fused = lora.fuse(adapters, lora.scale_of(adapters, 1.0), jnp.float32)
    for layer in range(2):
        for target in ("q", "v"):
            a = np.concatenate(list(adapters[target]["a"][:, layer]), axis=1).T
            b = np.concatenate(list(adapters[target]["b"][:, layer]), axis=0)
            np.testing.assert_array_equal(fused.of(layer, small.CONFIG)[target].a, a)
            np.testing.assert_array_equal(fused.of(layer, small.CONFIG)[target].b, b)


def test_a_target_that_the_base_lacks_is_refused_and_what_it_has_is_named():
    lora.check_targets([small.CONFIG], ("down", "q"))
    with pytest.raises(BadInput, match="q, k, v, o, gate, up, down, unembed, got .*'w'"):
        lora.check_targets([small.CONFIG], ("q", "w"))


def test_the_parts_of_a_layer_list_what_the_decoder_is_made_of():
    """Shapes, axes and names of every matrix follow from one list."""
    _, abstract = abstract_decoder(small.CONFIG, jnp.float32)
    [layer, *_] = small.CONFIG.layers
    for part, module in ((layer.mixer, "mixer"), (layer.mlp, "mlp")):
        assert list(part.matrices()) == list(part.MATRICES)
        for name, matrix in part.matrices().items():
            kernel = abstract["layers"][0][module][name]["kernel"]
            assert (kernel.shape, kernel.axes) == ((matrix.d_out, matrix.d_in), matrix.axes)
