"""The same numbers, however they are computed: attention in pieces, remat, products of few rows."""

from __future__ import annotations

import functools
import re

import bounds
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from flax import nnx

from marft_jax.models import decoder, lora
from marft_jax.models.ops import attention as attention_lib
from marft_jax.models.ops import (
    blocks,
    cudnn,
    experts,
    kv,
    packed,
    per_device,
    platforms,
    products,
    reductions,
)
from marft_jax.models.ops.attention import KV, causal_attention
from marft_jax.models.ops.attention_choice import attention_on
from marft_jax.models.ops.cpu_attention import attention_by_rule, causal_attention_in_pieces
from marft_jax.models.ops.remat import Remat, rematerialised
from marft_jax.models.weights.load import abstract_decoder
from marft_jax.parallel import compilation
from marft_jax.parallel import mesh as mesh_lib


def draw(seed: int, *shape: int):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def tree(t: int):
    """Until where each position of two rows is read: sequences that share all, some or nothing."""
    rng = np.random.default_rng(3)

    def fill(start: int, end: int) -> list[int]:
        if end - start < 2:
            return [end - 1] * (end - start)
        own = int(rng.integers(0, end - start))
        cut = int(rng.integers(start + own, end + 1))
        return [end - 1] * own + fill(start + own, cut) + fill(cut, end)

    return jnp.asarray([fill(0, t), fill(0, t)], jnp.int32)


def test_a_position_is_read_from_itself_to_where_it_says():
    read = np.asarray(attention_lib.reading(jnp.asarray([[4, 2, 2, 4, 4, 5]])))[0]
    assert [np.flatnonzero(row).tolist() for row in read] == [
        [0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4], [5],
    ]  # fmt: skip
    part = attention_lib.reading(tree(50), 20, 40)
    np.testing.assert_array_equal(part, attention_lib.reading(tree(50))[:, 20:40, :40])


def positions_of(until_BT):
    """Within its sequence: as many as a token reads before itself."""
    return attention_lib.reading(until_BT).sum(-1, dtype=jnp.int32) - 1


def test_a_window_counts_positions_of_the_sequence_and_not_places_in_the_row():
    until_BT = tree(60)
    either = attention_lib.masks(until_BT, positions_of(until_BT), 5)
    apart = 0
    for full, sliding in zip(
        np.concatenate(either.full), np.concatenate(either.sliding), strict=True
    ):
        (keys,) = np.nonzero(full)
        np.testing.assert_array_equal(np.flatnonzero(sliding), keys[-5:])
        apart += keys[-5:][0] < keys[-1] - 4
    assert apart > 5, "meant to have shared prefixes within windows"
    part = attention_lib.masks(until_BT, positions_of(until_BT), 5, 20, 40)
    np.testing.assert_array_equal(part.sliding, either.sliding[:, 20:40, :40])


WINDOWS = {
    "full": (0, False),
    "full of a windowed model": (37, False),
    "sliding": (37, True),
    "sliding, known in a scan": (37, jnp.asarray(True)),
    "full, known in a scan": (37, jnp.asarray(False)),
}


def assert_alike(got, expected, dtype=jnp.float32):
    """A sum over all that is computed, and gradients. In bfloat16 sums are float32's, of results
    that are rounded a few times."""
    chex.assert_trees_all_equal_dtypes(got, expected)
    count = jax.tree.leaves(expected)[1].size
    roundings, eps = bounds.sums(count), bounds.EPS
    if dtype == jnp.bfloat16:
        roundings, eps = 4, bounds.BFLOAT16
    bounds.close(got, expected, roundings, 1.0, eps)


@pytest.mark.slow
@pytest.mark.parametrize("t, dtype, window", [
    *((t, jnp.float32, "full") for t in (1, 63)),
    *((300, jnp.float32, window) for window in WINDOWS),
    (200, jnp.bfloat16, "full"),
])  # fmt: skip
def test_attention_in_pieces_is_attention(t, dtype, window):
    q, kv = draw(0, 2, 4, t, 8), KV(draw(1, 2, 2, 8, t), draw(2, 2, 2, t, 8))
    q, kv = jax.tree.map(lambda x: x.astype(dtype), (q, kv))
    ours, theirs = (
        loss_and_gradients(form, small.one_device(), q, kv, tree(t), window)
        for form in (causal_attention_in_pieces, causal_attention)
    )
    assert_alike(ours, theirs, dtype)


def test_attention_in_pieces_keeps_what_its_backward_pass_reads():
    def exponentials(remat: Remat) -> int:
        q, kv = draw(0, 1, 2, 40, 8), KV(draw(1, 1, 2, 8, 40), draw(2, 1, 2, 40, 8))
        run = rematerialised(causal_attention_in_pieces(jnp.full((1, 40), 39)), remat, ())

        def loss(q, kv):
            return run(q, kv).sum()

        return str(jax.make_jaxpr(jax.grad(loss))(q, kv)).count("= exp ")

    assert exponentials("products") == exponentials("none") == 2  # of the scores, in each pass
    assert exponentials("block") == 3


@pytest.mark.parametrize("activation, formula", [
    ("silu", lambda x: x / (1 + jnp.exp(-x))),
    ("gelu_pytorch_tanh",
     lambda x: x / 2 * (1 + jnp.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))),
])  # fmt: skip
def test_the_gate_has_the_gradient_of_its_formula(activation, formula):
    gate, up, weight = draw(0, 5, 7), draw(1, 5, 7), draw(2, 5, 7)

    def gradients(f):
        return jax.grad(lambda gate, up: jnp.sum(f(gate, up) * weight), argnums=(0, 1))(gate, up)

    expected = gradients(lambda gate, up: formula(gate) * up)
    ours = gradients(lambda gate, up: products.gated(gate, up, activation))
    bounds.close(ours, expected)


def test_each_platform_has_its_attention():
    shape = 4, 2, 8, "bfloat16"
    assert attention_on("cpu", *shape) is causal_attention_in_pieces
    for platform, plain in (("tpu", True), ("tpu", False), ("cpu", False)):
        assert attention_on(platform, *shape, plain=plain) is attention_by_rule


def attention_in_xla(q, k, v, bias):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    context = jax.nn.dot_product_attention(q, k, v, bias, is_causal=True, implementation="xla")
    return context.swapaxes(1, 2)


@pytest.fixture
def without_kernels(monkeypatch):
    """What cuDNN's form is, apart from the kernels: in their place stands JAX's attention."""

    def backward(q, k, v, bias, log_total, context, d):
        assert log_total.shape == q.shape[:3] and context.shape == q.shape
        _, pull = jax.vjp(lambda q, k, v: attention_in_xla(q, k, v, bias), q, k, v)
        return pull(d)

    def forward(q, *others):
        return attention_in_xla(q, *others), jnp.zeros(q.shape[:3])

    monkeypatch.setattr(cudnn, "_forward", per_device.of_places(forward))
    monkeypatch.setattr(cudnn, "_backward", per_device.of_places(backward))
    cudnn.works.cache_clear()
    yield monkeypatch
    cudnn.works.cache_clear()


@pytest.mark.parametrize(
    "installed, width, dtype, taken",
    [(True, 128, "bfloat16", True), (True, 64, "float16", True), (False, 128, "bfloat16", False),
     (True, 128, "float32", False), (True, 256, "bfloat16", False), (True, 100, "bfloat16", False)],
)  # fmt: skip
def test_for_a_gpu_that_is_not_there_the_kernel_is_taken_where_it_is_made_for_it(
    installed, width, dtype, taken, without_kernels, caplog
):
    without_kernels.setattr(cudnn.util, "find_spec", lambda name: installed)
    chosen = attention_on("gpu", 4, 2, width, dtype)
    assert chosen is (cudnn.cudnn_attention if taken else causal_attention)
    assert ("it is not installed" in caplog.text) == (not installed)


@pytest.mark.slow
def test_on_a_gpu_the_kernel_is_taken_if_it_works(without_kernels, caplog):
    def chosen(*heads):
        return attention_on("gpu", *heads, "bfloat16")

    without_kernels.setattr(jax, "default_backend", lambda: "gpu")
    assert chosen(4, 2, 8) is cudnn.cudnn_attention and not caplog.records
    without_kernels.setattr(cudnn, "_forward", per_device.of_places(cudnn._attend))
    with caplog.at_level("INFO", "marft_jax"):
        assert chosen(4, 2, 16) is causal_attention
    assert "attention without cuDNN: " in caplog.text
    without_kernels.setattr(cudnn, "_on_one_device", lambda q, k, v, bias: q)
    assert chosen(4, 2, 24) is causal_attention
    assert "it computes something else" in caplog.text


@pytest.mark.parametrize("shape, window, t", [
    *(((1, 1, 1), window, 64) for window in WINDOWS),
    ((1, 1, 1), "sliding", 63),
    ((2, 1, 2), "full", 63),
    ((2, 1, 2), "sliding", 64),
    ((2, 1, 2), "sliding, known in a scan", 64),
], ids=str)  # fmt: skip
def test_attention_by_cudnn_is_attention_apart_from_the_kernel(shape, window, t, without_kernels):
    """With shared prefixes and windows, on meshes; rows of odd length take another way."""
    where = small.mesh_of(*shape)
    q, kv = draw(0, 2, 4, t, 8), KV(draw(1, 2, 2, 8, t), draw(2, 2, 2, t, 8))
    operands = jax.device_put((q, kv, tree(t)), mesh_lib.rows(where))
    ours = loss_and_gradients(cudnn.cudnn_attention, where, *operands, window)
    theirs = loss_and_gradients(causal_attention, where, *operands, window)
    assert_alike(ours, theirs)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2)], ids=str)
def test_attention_by_cudnn_lowers_to_its_kernels_and_to_no_scores(shape):
    """For CUDA, as in an update, without a device; no gradient of the mask is computed."""
    where, places, b, h, t, c = small.mesh_of(*shape), shape[0], 2, 6, 64, 16
    q, kv = draw(0, b, h, t, c), KV(draw(1, b, 2, c, t), draw(2, b, 2, t, c))
    operands = *jax.tree.map(lambda x: x.astype(jnp.bfloat16), (q, kv)), tree(t)

    def loss(q, kv, until_BT):
        attend = cudnn.cudnn_attention(until_BT, positions_of(until_BT), 5)
        both = (attend(q, kv, slides).astype(jnp.float32) for slides in (False, True))
        return sum(jnp.sum(x * x) for x in both)

    each = jax.vmap(
        jax.grad(loss, (0, 1)), axis_name=mesh_lib.PLACES, spmd_axis_name="data"
    )  # fmt: skip
    operands = jax.tree.map(lambda x: jnp.stack([x] * places), operands)
    run = jax.jit(mesh_lib.with_mesh(where, each))
    text = run.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    called = re.findall(r"custom_call @(__cudnn\$\w+)", text)
    assert sorted(called) == [
        *["__cudnn$fmhaScaleBiasSoftmax"] * 2,
        *["__cudnn$fmhaScaleBiasSoftmaxBackward"] * 2,
    ], text
    results = re.findall(r"SoftmaxBackward\(.*-> \((.*)\)", text)
    assert len(results) == 2 and all(f"{t}x{t}" not in result for result in results)
    assert f"tensor<{b}x1x{t}x{t}xbf16>" in text
    assert f"{h}x{t}x{t}x" not in text and f"{h // 2}x{t}x{t}x" not in text, text


def loss_and_gradients(attend, where, q, kv, until_BT, window="full"):
    """Of a weighted sum of the context."""
    (window, slides), weight = WINDOWS[window], draw(4, *q.shape)
    positions_BT = positions_of(until_BT)

    def loss(q, kv, slides):
        context = attend(until_BT, positions_BT, window)(q, kv, slides)
        return jnp.sum(context * weight), context

    known = isinstance(slides, bool)
    loss = functools.partial(loss, slides=slides) if known else loss
    run = jax.value_and_grad(mesh_lib.with_mesh(where, loss), argnums=(0, 1), has_aux=True)
    return jax.jit(run)(q, kv, *([] if known else [slides]))


@pytest.mark.parametrize("t, pieces", [(100, 1), (300, 3)])
def test_what_rows_read_is_worked_out_once_for_all_layers(t, pieces):
    config = small.config_of(n_layers=3)
    graphdef, base = abstract_decoder(config, jnp.float32, attention=causal_attention_in_pieces)
    ids = jax.ShapeDtypeStruct((2, t), jnp.int32)
    traced = jax.make_jaxpr(functools.partial(decoder.forward, graphdef))(base, ids, ids, ids)
    called = [equation.params.get("name") for equation in traced.eqns]
    assert (called.count("tril"), called.count("run")) == (pieces, 3)  # none within a layer


def gradients_and_memory(remat: Remat):
    """Of a loss through four layers: the adapters' gradients, and the bytes of scratch memory."""
    config = small.config_of(n_layers=4)
    graphdef, abstract = abstract_decoder(config, jnp.float32, remat=remat)
    leaves, tree = jax.tree.flatten(abstract)
    shapes = [x.shape for x in leaves]
    drawn = [0.1 * draw(i, *s) if len(s) > 1 else jnp.ones(s) for i, s in enumerate(shapes)]
    base = jax.tree.unflatten(tree, drawn)
    tokens_BT = jnp.zeros((2, 48), jnp.int32) + jnp.arange(48)[None]
    until_BT = jnp.full_like(tokens_BT, 47)

    def loss(adapters):
        fused = lora.fuse(adapters, lora.scale_of(adapters, 2.0), jnp.float32)
        mask = lora.owner_mask(0 * tokens_BT, fused)
        hidden, _ = decoder.forward(graphdef, base, tokens_BT, tokens_BT, until_BT, fused, mask)
        return jnp.sum(jnp.square(hidden[:, ::7]))

    options = compilation.compiler_options(small.one_device())
    run = jax.jit(jax.grad(loss)).lower(small.adapters(2, layers=4)).compile(options)
    return run(small.adapters(2, layers=4)), run.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_remat_changes_memory_and_not_gradients():
    whole, most = gradients_and_memory("none")
    products, less = gradients_and_memory("products")
    block, least = gradients_and_memory("block")
    for other in (products, block):
        bounds.close(other, whole, bounds.backward(layers=4))
    assert least < less < most


def test_few_rows_and_many_give_the_same_product():
    x, kernel = draw(0, 200, 24), draw(1, 40, 24)
    many, few = products.product(x, kernel), products.product(x[:5], kernel)
    bounds.close(many[:5], few, bounds.sums(24))
    bounds.close(many, x @ kernel.T, bounds.sums(24))


@pytest.mark.parametrize("rows", [1, 2, 8, 200])
def test_a_product_of_halves_is_rounded_once_and_so_are_its_gradients(rows):
    """Sums are float32's: their rounding at the end is all that is lost."""
    x, kernel, d = (
        x.astype(jnp.bfloat16) for x in (draw(0, rows, 512), draw(1, 96, 512), draw(2, rows, 96))
    )
    y, backward = jax.vjp(products.product, x, kernel)
    whole_x, whole_kernel, whole_d = (np.asarray(z, np.float64) for z in (x, kernel, d))
    expected = whole_x @ whole_kernel.T, whole_d @ whole_kernel, whole_d.T @ whole_x
    for got, exact in zip((y, *backward(d)), expected, strict=True):
        assert got.dtype == jnp.bfloat16
        sums = bounds.of(bounds.sums(512), abs(exact).max())
        got = np.asarray(got, np.float64)
        np.testing.assert_allclose(got, exact, rtol=bounds.BFLOAT16 / 2, atol=sums)


def test_the_likeliest_token_is_the_first_of_the_greatest():
    logits = draw(0, 6, 1000).round(1)  # with ties
    logits = logits.at[5].set(-jnp.inf).at[5, 999].set(0.0)
    np.testing.assert_array_equal(reductions.argmax(logits), jnp.argmax(logits, axis=-1))


def test_blocks_are_alike_so_that_one_trace_serves_all():
    graphdef, abstract = abstract_decoder(small.CONFIG, jnp.float32)
    layers = nnx.merge(graphdef, abstract).layers
    assert len({nnx.split(block)[0] for block in layers}) == 1


def operands(seed: int = 0, dtype=jnp.float32):
    """Arrays, and constants, for every operation that has a form for some platform."""

    def some(i, *shape):
        return draw(seed + i, *shape).astype(dtype)

    cache = some(0, 3, 2, 8, 16), some(1, 3, 2, 16, 8)
    new = some(2, 3, 2, 8, 1), some(3, 3, 2, 1, 8)
    at_BT = jnp.asarray([[0], [15], [16]])  # the last lies past the end
    where = (jnp.arange(3), slice(None), slice(None), 5)
    sizes = jnp.asarray([33, 0, 7])  # rows of each expert
    stack = experts.Stack(some(1, 3, 4, 6), jnp.int32(0))
    return {
        reductions._sum: ((some(0, 5, 384),), {}),
        products._by_transpose: ((some(0, 5, 24), some(1, 40, 24)), {}),
        products._dot: ((some(0, 5, 24), some(1, 40, 24)), {"over": (1, 1)}),
        products._as_it_is: ((some(0, 5, 24),), {}),
        packed._unpacked_first: (
            (some(0, 5, 64), blocks.pack(some(1, 40, 64), "int8")), {"product": products.product},
        ),
        packed._dequantise: ((some(0, 5, 64), blocks.pack(some(1, 40, 64), "nf4")), {}),
        kv._by_head: ((*cache, *new, at_BT), {}),
        kv._put: ((cache[0].astype(jnp.bfloat16), some(2, 3, 2, 8).astype(jnp.bfloat16)),
                            {"where": where}),
        experts._each_expert: ((some(0, 40, 6), stack, sizes), {"over": 2}),
        experts._outer_of_each_expert: ((some(0, 40, 4), some(1, 40, 6), sizes), {}),
    }  # fmt: skip


@pytest.mark.parametrize("reference", platforms.FORMS, ids=lambda f: f.__name__)
@pytest.mark.usefixtures("float16")
def test_every_platforms_form_equals_its_reference(reference):
    arrays, constants = operands()[reference]
    expected = reference(*arrays, **constants)
    for form in platforms.FORMS[reference].values():
        bounds.close(form(*arrays, **constants), expected, bounds.sums(384))
