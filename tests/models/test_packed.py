"""A base in 8 or 4 bits computes what its unpacked values would, and takes their memory nowhere."""

from __future__ import annotations

import bounds
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from marft_jax.engine.compiled import Shape, programs
from marft_jax.errors import BadInput
from marft_jax.models import lora
from marft_jax.models.decoder import forward
from marft_jax.models.ops import blocks
from marft_jax.models.ops.products import product
from marft_jax.models.weights import load
from marft_jax.sampling.protocol import Request
from marft_jax.settings.config import Model
from marft_jax.types import Sampling

pytestmark = pytest.mark.usefixtures("float16")  # scales are that
KINDS = {"int8": (8.25, 0.01), "int4": (4.5, 0.12), "nf4": (4.5, 0.11)}
"""Bits of a value with its share of the scale, and the largest relative error of normal weights."""


def matrix(out: int = 24, width: int = 64) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (out, width))


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_matrix_is_small_and_close(kind):
    whole, (bits, error) = matrix(), KINDS[kind]
    small_one = blocks.pack(whole, kind)
    four = small_one.qvalue.dtype in (jnp.int4, jnp.uint4)
    stored = small_one.qvalue.size * (4 if four else 8) + small_one.scale.size * 16
    assert stored == bits * whole.size
    distance = jnp.linalg.norm(blocks.unpacked(small_one, jnp.float32) - whole)
    assert distance / jnp.linalg.norm(whole) < error


def test_eight_bits_take_rows_of_any_length():
    assert blocks.fits(50, "int8") and not blocks.fits(50, "int4")
    assert blocks.pack(matrix(8, 50), "int8").scale.shape == (8, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_product_and_its_gradient_are_those_of_the_unpacked_matrix(kind, dtype):
    kernel = blocks.pack(matrix(), kind)
    x = jax.random.normal(jax.random.key(1), (40, 64)).astype(dtype)

    def ours(x):
        return jnp.sum(jnp.square(product(x, kernel)))

    def plain(x):
        return jnp.sum(jnp.square(product(x, blocks.unpacked(kernel, x.dtype))))

    found, expected = (jax.value_and_grad(f)(x) for f in (ours, plain))
    if dtype == "float32":
        bounds.close(found, expected, bounds.sums(40 * 24, 64))
    else:  # a few roundings to bfloat16
        bounds.close(found, expected, 4, eps=bounds.BFLOAT16)
    kept = jax.tree.leaves(jax.vjp(lambda x: product(x, kernel), x)[1])
    assert all(leaf.shape != (24, 64) or leaf.dtype.itemsize == 1 for leaf in kept)


def base_of(kind: str, stacked: bool, mesh: tuple[int, int, int]):
    """(packed base, the same with its values unpacked), of three layers, on that mesh."""
    where = small.mesh_of(*mesh)
    whole = small.base_on(where, 3, stacked)
    model = Model(quantize=kind, layers="stacked" if stacked else "unrolled")  # pyright: ignore
    _, graphdef, abstract = load.decoder_on("cpu", whole.config, model)
    paths = load.shapes_of(whole.params)

    def filled(abstract, source):
        tensor = load.reader(source)
        stream = [(path, np.asarray(tensor(path))) for path in paths]
        return load.fill(abstract, stream, small.mesh.placer(where))

    in_bits = filled(abstract, whole.params)
    _, plain = load.abstract_decoder(whole.config, jnp.float32)
    return (
        whole._replace(graphdef=graphdef, params=in_bits),
        whole._replace(graphdef=graphdef, params=filled(plain, in_bits)),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stacked", "mesh"), [(False, (1, 1, 1)), (True, (2, 2, 2))], ids=str)
@pytest.mark.slow
def test_a_packed_base_computes_what_its_unpacked_values_would(kind, stacked, mesh):
    hidden = []
    for base in base_of(kind, stacked, mesh):
        tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 256, (8, 12)), jnp.int32)
        positions_BT = jnp.broadcast_to(jnp.arange(12), (8, 12))
        read = jax.jit(forward, static_argnums=0)
        hidden += read(base.graphdef, base.params, tokens_BT, positions_BT, positions_BT * 0 + 11)[
            :1
        ]
    bounds.close(*hidden, bounds.forward(layers=3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_what_the_engine_samples_has_the_learners_log_probs(kind, monkeypatch):
    base, _ = base_of(kind, False, (1, 1, 1))
    monkeypatch.setattr(small, "base_on", lambda *_, **__: base)
    small._scorer.cache_clear()
    prompts = [np.arange(5 + i, dtype=np.int32) for i in range(3)]
    done = small.answers(
        small.engine(layers=3),
        [Request(p, i, Sampling(6), (0, i, 0)) for i, p in enumerate(prompts)],
    )
    scored = small.full_forward(
        small.adapters(3, layers=3), prompts, [c.ids for c in done], range(3), [1.0] * 3
    )
    small._scorer.cache_clear()
    for completion, of_step in zip(done, scored, strict=True):
        expected = [row[token] for row, token in zip(of_step, completion.ids, strict=True)]
        np.testing.assert_allclose(completion.logprobs, expected, atol=bounds.logprobs(layers=3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", ["unrolled", "stacked"])
@pytest.mark.slow
def test_no_loop_of_decoding_holds_the_unpacked_base(kind, layers):
    """XLA would unpack it before the loop, for all steps at once."""
    config = small.config_of(d_model=256, d_ff=1024, head_dim=64, n_layers=4)
    config, graphdef, base = load.decoder_on("cpu", config, Model(quantize=kind, layers=layers))  # pyright: ignore
    run = programs(
        config, graphdef, small.one_device(), Shape(2, 4, 64, 16), jnp.float32,
        eos_ids=(0,), alpha=1.0,
    )  # fmt: skip
    fused = run.fuse.eval_shape(
        lora.init(jax.random.key(0), config, adapters=[0], rank=2, targets=("q",))
    )
    decode = run.decode.lower(
        base=base, adapters=fused, slots=run.slots,
        stop_at=jnp.int32(0), chunk=4, read=64,
    ).compile()  # fmt: skip
    layer = sum(4 * x.d_in * x.d_out for x, *_ in config.matrices().values())
    assert decode.memory_analysis().temp_size_in_bytes < 2 * layer  # of four


def test_a_matrix_that_cannot_be_packed_is_named():
    config = small.config_of(d_ff=72)
    with pytest.raises(BadInput, match="quantize int4: .*multiple of 32 long, got 72 .down"):
        load.decoder_on("cpu", config, Model(quantize="int4"))
    load.decoder_on("cpu", config, Model(quantize="int8"))
