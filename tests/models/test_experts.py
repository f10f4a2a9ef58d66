"""Mixtures of experts: Qwen3-MoE against NumPy, from its files to an export."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import bounds
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from logits import logits_of, random_adapters
from safetensors.numpy import load_file, save_file

from marft_jax.errors import BadInput
from marft_jax.extras.export import huggingface
from marft_jax.extras.planning import cost
from marft_jax.interop import peft
from marft_jax.interop.initial import initial_adapters
from marft_jax.models import config_json, decoder, lora
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.models.names import paths_by_name
from marft_jax.models.ops import experts
from marft_jax.models.ops.platforms import FORMS
from marft_jax.models.weights import load, safetensors, sources
from marft_jax.models.weights.layout import Stored, layouts
from marft_jax.settings.config import Model
from marft_jax.types import MAIN

QWEN3: dict[str, Any] = dict(
    architectures=["Qwen3MoeForCausalLM"], vocab_size=264, hidden_size=32, intermediate_size=64,
    num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=512, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
    norm_topk_prob=True, mlp_only_layers=[1], rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
)  # fmt: skip
QWEN3_30B = QWEN3 | dict(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48,
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
    num_experts_per_tok=8, moe_intermediate_size=768, mlp_only_layers=[],
)  # fmt: skip
TARGETS = ("q", "v", "experts")
RANK, ALPHA = small.RANK, small.ALPHA
TOKENS = np.random.default_rng(1).integers(0, 256, (2, 21))


def config_of(**changes: Any) -> DecoderConfig:
    return config_json.read_config(QWEN3 | changes, "config.json")


MIXED = config_of()
SPARSE = config_of(mlp_only_layers=[])


@functools.cache
def tensors(config: DecoderConfig) -> dict[str, np.ndarray]:
    """A random checkpoint, under the names of published ones."""
    rng = np.random.default_rng(0)
    shapes = load.shapes_of(load.abstract_decoder(config, jnp.float32)[1])

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        x = rng.normal(size=shape)
        return np.float32(1 + 0.2 * x if x.ndim == 1 else x * shape[-1] ** -0.5)  # norms, matrices

    names = sorted(paths_by_name(config, shapes).items())  # stacked or not, in the same order
    return {name: draw(shapes[path]) for name, path in names}


@functools.cache
def base(config: DecoderConfig, quantize: str = "none", mesh: tuple[int, int, int] = (1, 1, 1)):
    """(config, graphdef, params) from these tensors, in an order of their own."""
    layers = "stacked" if config.stacked else "unrolled"
    model = Model(layers=layers, quantize=quantize)  # pyright: ignore[reportArgumentType]
    config, graphdef, abstract = load.decoder_on("cpu", config, model)
    shapes = load.shapes_of(abstract)
    names = paths_by_name(config, shapes)
    stream = ((names[name], x) for name, x in sorted(tensors(config).items(), reverse=True))
    return config, graphdef, load.fill(abstract, stream, small.mesh.placer(small.mesh_of(*mesh)))


def published(folder: Path) -> small.BaseModel:
    """The model, whose config.json lies in this folder."""
    (folder / "config.json").write_text(json.dumps(QWEN3))
    return small.BaseModel(*base(MIXED), small.ByteTokenizer(), str(folder), "0")


@functools.cache
def adapters(config: DecoderConfig, n: int = 3) -> lora.Adapters:
    return random_adapters(config, TARGETS, n, RANK, 0.4)


def logits(model: Any, tree=None, owners=None) -> np.ndarray:
    """Logits of ``TOKENS``; the model as ``base`` returns it, or its config."""
    _, graphdef, params = base(model) if isinstance(model, DecoderConfig) else model
    return logits_of(graphdef, params, TOKENS, tree, ALPHA, owners)


def silu(x):
    return x / (1 + np.exp(-x))


def in_numpy(config: DecoderConfig, weights, tokens: np.ndarray, normalised=True) -> np.ndarray:
    """Qwen3-MoE token by token in float64: the definition, without any of our code."""
    w = {name: x.astype(float) for name, x in weights.items()}

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w[f"{name}.weight"]

    def rotated(x):  # [T, heads, 8]
        angle = np.arange(len(x))[:, None] * 1e4 ** (-np.arange(4) / 4)
        cos, sin = (f(np.concatenate([angle, angle], 1))[:, None] for f in (np.cos, np.sin))
        return x * cos + np.concatenate([-x[..., 4:], x[..., :4]], -1) * sin

    def mlp(x, at):
        gate, up, down = (w[f"{at}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return down @ (silu(gate @ x) * (up @ x))

    def mixture(x, at):
        if f"{at}.gate.weight" not in w:
            return mlp(x, at)
        scores = np.exp(w[f"{at}.gate.weight"] @ x)
        shares = scores / scores.sum()
        best = np.argsort(-shares)[:2]
        whole = shares[best].sum() if normalised else 1.0
        return sum(shares[e] / whole * mlp(x, f"{at}.experts.{e}") for e in best)

    rows = []
    for row in tokens:
        x = w["model.embed_tokens.weight"][row]
        for i in range(config.n_layers):
            at = f"model.layers.{i}"
            h = norm(x, f"{at}.input_layernorm")
            q, k, v = (
                (h @ w[f"{at}.self_attn.{n}_proj.weight"].T).reshape(len(row), -1, 8) for n in "qkv"
            )
            q = rotated(norm(q, f"{at}.self_attn.q_norm"))
            k = rotated(norm(k, f"{at}.self_attn.k_norm"))
            k, v = (np.repeat(each, 2, axis=1) for each in (k, v))
            scores = np.einsum("thc,shc->hts", q, k) / np.sqrt(8)
            scores = np.where(np.tri(len(row), dtype=bool), scores, -np.inf)
            weights_ = np.exp(scores - scores.max(-1, keepdims=True))
            weights_ /= weights_.sum(-1, keepdims=True)
            context = np.einsum("hts,shc->thc", weights_, v).reshape(len(row), -1)
            x = x + context @ w[f"{at}.self_attn.o_proj.weight"].T
            h = norm(x, f"{at}.post_attention_layernorm")
            x = x + np.stack([mixture(token, f"{at}.mlp") for token in h])
        rows.append(norm(x, "model.norm") @ w["lm_head.weight"].T)
    return np.stack(rows)


@pytest.mark.parametrize("rows", [9, 60, 300])
@pytest.mark.parametrize("over", [1, 2])
def test_grouped_products_and_their_gradients_are_those_of_each_row_alone(rows, over):
    """Few rows and many, an expert without rows, and three places under vmap."""
    rng = np.random.default_rng(0)
    expert_M = np.sort(rng.integers(0, 4, (3, rows)), axis=1)
    sizes = jnp.asarray([np.bincount(own, minlength=5) for own in expert_M], jnp.int32)
    x, weight, matrices = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((3, rows, 6), (3, rows, 4), (5, 4, 6))
    )
    matrices = matrices if over == 2 else matrices.swapaxes(1, 2)

    def ours(x, matrices, sizes, weight):
        return (experts.grouped(x, matrices, sizes, over) * weight).sum()

    def plain(x, matrices, expert_M, weight):
        own = matrices[expert_M] if over == 2 else matrices[expert_M].swapaxes(1, 2)
        return (jnp.einsum("mi,moi->mo", x, own) * weight).sum()

    def gradients(f, by):
        run = jax.vmap(jax.value_and_grad(f, (0, 1)), (0, None, 0, 0))
        return jax.jit(run)(x, matrices, by, weight)

    expected = gradients(plain, expert_M)
    bounds.close(gradients(ours, sizes), expected, bounds.sums(4 * rows, 6), size=1.0)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize(("rows", "groups"), [(9, 5), (60, 5), (700, 5), (64, 2)])
@pytest.mark.slow
def test_every_platforms_form_is_the_reference_for_few_rows_and_many(platform, rows, groups):
    """Also for the few experts that a device of a large mesh has."""
    rng = np.random.default_rng(0)
    sizes = jnp.asarray(np.bincount(rng.integers(0, groups - 1, rows), minlength=groups), jnp.int32)
    x, y = (jnp.asarray(rng.normal(size=(rows, n)), jnp.float32) for n in (6, 4))
    matrices = experts.Stack(
        jnp.asarray(rng.normal(size=(3, groups, 6, 4)), jnp.float32), jnp.int32(groups)
    )
    for reference, operands in (
        (functools.partial(experts._each_expert, over=1), (x, matrices, sizes)),
        (functools.partial(experts._each_expert, over=2), (y, matrices, sizes)),
        (experts._outer_of_each_expert, (y, x, sizes)),
    ):
        plain = getattr(reference, "func", reference)
        how = getattr(reference, "keywords", {})
        found = jax.jit(functools.partial(FORMS[plain][platform], **how))(*operands)
        bounds.close(found, reference(*operands), bounds.sums(rows))


@pytest.mark.parametrize("config", [MIXED, SPARSE], ids=["mixed", "sparse"])
@pytest.mark.slow
def test_logits_are_those_of_the_definition(config):
    expected = in_numpy(config, tensors(config), TOKENS)
    bounds.close(logits(config), expected, bounds.forward(config))
    chosen = config_of(mlp_only_layers=[], norm_topk_prob=False)
    if config is SPARSE:
        expected = in_numpy(chosen, tensors(config), TOKENS, normalised=False)
        bounds.close(logits(chosen), expected, bounds.forward(config))


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
@pytest.mark.slow
def test_packed_experts_compute_what_their_unpacked_values_would(kind):
    _, _, params = packed = base(MIXED, kind)
    mlp = params["layers"][0]["mlp"]
    kernel, router = mlp["experts_down"]["kernel"], mlp["router"]["weight"]
    assert not isinstance(kernel.get_value(), jax.Array) and kernel.shape == (1, 8, 32, 32)
    assert isinstance(router.get_value(), jax.Array)
    tensor = load.reader(params)
    graphdef, abstract = load.abstract_decoder(MIXED, jnp.float32)
    stream = ((path, np.asarray(tensor(path))) for path in load.shapes_of(abstract))
    whole = load.fill(abstract, stream, lambda _, x: jnp.asarray(x))
    bounds.close(logits(packed), logits((MIXED, graphdef, whole)), bounds.forward(MIXED))


def test_a_file_gives_the_stacks_and_an_export_its_tensors(tmp_path):
    """Also in two files, of which each holds some experts of a layer."""
    _, _, params = base(MIXED)
    found = tensors(MIXED)
    names = sorted(found)
    for i in range(2):
        part = {name: found[name] for name in names[i::2]}
        save_file(part, tmp_path / f"model-{i}.safetensors")
    _, abstract = load.abstract_decoder(MIXED, jnp.float32)
    stream = safetensors.read(tmp_path, MIXED, load.shapes_of(abstract))
    again = load.fill(abstract, stream, lambda _, x: jnp.asarray(x))
    chex.assert_trees_all_equal(jax.tree.leaves(again), jax.tree.leaves(params))
    kernel = again["layers"][2]["mlp"]["experts_gate_up"]["kernel"][...]
    up = found["model.layers.2.mlp.experts.5.up_proj.weight"]
    np.testing.assert_array_equal(kernel[1, 5], up.T)
    huggingface.write_model(tmp_path / "out", published(tmp_path), {}, 1.0, {})
    chex.assert_trees_all_equal(load_file(tmp_path / "out" / "model.safetensors"), found)
    assert sources.decoder_config(str(tmp_path / "out")) == MIXED


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("alternates", [True, False])
def test_a_tensor_of_all_experts_is_written_in_the_order_in_which_it_is_read(
    pieces, alternates, tmp_path
):
    """safetensors writes memory as it lies."""
    paths = [f"{expert}/{piece}" for expert in range(3) for piece in range(pieces)]
    rng = np.random.default_rng(0)
    arrays = {path: rng.normal(size=(5, 7)).astype(np.float32) for path in paths}
    stored = Stored(paths, 3, alternates)
    save_file({"x": stored.join([*arrays.values()])}, tmp_path / "m.safetensors")
    written = load_file(tmp_path / "m.safetensors")["x"]
    chex.assert_trees_all_equal(dict(stored.split(written, dict.fromkeys(paths, (5, 7)))), arrays)


def test_mxfp4_is_read_as_the_values_that_it_stands_for(tmp_path):
    """Of a tensor in two files, and of a layer that holds all of its experts."""
    settings = QWEN3 | dict(
        architectures=["GptOssForCausalLM"], num_local_experts=2, num_hidden_layers=1,
        intermediate_size=32, quantization_config={"quant_method": "mxfp4"},
    )  # fmt: skip
    config = config_json.read_config(settings, "config.json")
    _, abstract = load.abstract_decoder(config, jnp.float32)
    shapes, rng = load.shapes_of(abstract), np.random.default_rng(0)
    plain = {name: rng.normal(size=layout.shape(shapes)).astype(np.float32)
             for name, layout in layouts(config, shapes).items()}  # fmt: skip
    packed, at = {}, "model.layers.0.mlp.experts"
    for name, out in (("gate_up_proj", 64), ("down_proj", 32)):
        nibbles = rng.integers(0, 16, (2, out, 1, 32)).astype(np.uint8)
        scales = rng.integers(120, 130, (2, out, 1)).astype(np.uint8)
        packed[f"{at}.{name}_blocks"] = nibbles[..., ::2] + 16 * nibbles[..., 1::2]
        packed[f"{at}.{name}_scales"] = scales
        table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
        values = np.asarray(table)[nibbles[:, :, 0]] * 2.0 ** (scales.astype(float) - 127)
        plain[f"{at}.{name}"] = values.swapaxes(1, 2).astype(np.float32).copy()
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    rest = {name: x for name, x in plain.items() if f"{name}_blocks" not in packed}
    last = {f"{at}.down_proj_scales": packed.pop(f"{at}.down_proj_scales")}
    save_file(rest | packed, tmp_path / "model-0.safetensors")
    save_file(last, tmp_path / "model-1.safetensors")
    one, other = (
        dict(safetensors.read(folder, config, shapes)) for folder in (tmp_path, tmp_path / "plain")
    )
    chex.assert_trees_all_equal(one, other)
    up = one["layers/0/mlp/experts_gate_up/1/1/kernel"]
    np.testing.assert_array_equal(up, plain[f"{at}.gate_up_proj"][1, :, 1::2].T)


@pytest.mark.slow
def test_adapters_on_experts_are_their_products_added_to_each_expert(tmp_path):
    """The merged model, a peft folder read again, and all owners at once agree."""
    tree, owners = adapters(MIXED), jnp.asarray([[0], [2]]) + 0 * TOKENS
    together = logits(MIXED, tree, owners)
    model = published(tmp_path)
    for row, owner in enumerate((0, 2)):
        factors = jax.tree.map(lambda x, n=owner: np.asarray(x[n]), tree)
        folder = tmp_path / str(owner)
        huggingface.write_model(folder, model, factors, ALPHA / RANK, {})
        merged = in_numpy(MIXED, load_file(folder / "model.safetensors"), TOKENS[row : row + 1])
        bounds.close(together[row : row + 1], merged, bounds.forward(MIXED))
    assert np.abs(together - logits(MIXED)).max() > 0.1


def test_a_peft_folder_of_experts_is_read_as_it_was_written(tmp_path):
    tree = adapters(MIXED, 1)
    factors = jax.tree.map(lambda x: np.asarray(x[0]), tree)
    peft.write(tmp_path / "a", factors, ALPHA, "base", "model", MIXED.layers_with, {})
    stored = load_file(tmp_path / "a" / peft.WEIGHTS)
    prefix = "base_model.model.model.layers.2.mlp.experts"
    a = factors["experts_down"]["a"][1]  # layer 2 is the second that has experts: [8, 32, R]
    np.testing.assert_array_equal(
        stored[f"{prefix}.lora_A.weight"].reshape(8, RANK, 32), a.swapaxes(1, 2)
    )
    b = factors["experts_gate_up"]["b"][1]  # [8, R, 64]; peft: out, rank, expert
    np.testing.assert_array_equal(
        stored[f"{prefix}.base_layer.lora_B.weight"].reshape(64, RANK, 8), b.transpose(2, 1, 0)
    )
    profile = dataclasses.replace(small.team(1).profiles[0], init=str(tmp_path / "a"))
    team = small.team(1)._replace(profiles=(profile,))
    settings = small.config_lib.Lora(rank=RANK, alpha=ALPHA, targets=TARGETS)
    fresh = lora.init(jax.random.key(1), MIXED, adapters=[0], rank=RANK, targets=TARGETS)
    loaded = initial_adapters(team, settings, {MAIN: fresh}, None, {MAIN: MIXED})[MAIN]
    bounds.close(loaded, tree)


@pytest.mark.slow
@pytest.mark.parametrize(("stacked", "mesh"), [(True, (1, 1, 1)), (False, (2, 2, 2))], ids=str)
def test_gradients_of_each_owners_experts_are_the_same_on_every_mesh(stacked, mesh):
    expected = gradients(SPARSE, (1, 1, 1))
    found = gradients(dataclasses.replace(SPARSE, stacked=stacked), mesh)
    bounds.close(found, expected, bounds.backward(SPARSE))
    for name in ("experts_gate_up", "experts_down", "q"):
        for part in ("a", "b"):
            each = np.abs(expected[name][part]).reshape(3, -1).max(1)
            assert each[0] > 0 and each[2] > 0 and each[1] == 0  # who wrote nothing learns nothing


@functools.cache
def gradients(config: DecoderConfig, mesh: tuple[int, int, int]) -> lora.Adapters:
    config, graphdef, params = base(config, mesh=mesh)
    tokens = jnp.asarray(np.random.default_rng(4).integers(0, 256, (4, 24)))
    owners = jnp.asarray([[0], [2], [-1], [0]]) + 0 * tokens
    positions = jnp.broadcast_to(jnp.arange(24), tokens.shape)

    @jax.jit
    def run(params, tree):
        def loss(tree):
            fused = lora.fuse(tree, lora.scale_of(tree, ALPHA), jnp.float32)
            mask = lora.owner_mask(owners, fused)
            until = jnp.full_like(positions, 23)
            read = decoder.forward(graphdef, params, tokens, positions, until, fused, mask)
            return jnp.square(read[0]).mean()

        return jax.grad(loss)(tree)

    where = small.mesh_of(*mesh)
    return jax.device_get(small.mesh.with_mesh(where, run)(params, adapters(SPARSE)))


def test_targets_are_counted_for_each_kind_of_layer_and_refused_where_there_are_none():
    assert lora.adapted(MIXED, TARGETS) == ["q", "v", "experts_gate_up", "experts_down"]
    assert lora.counts(MIXED, ("q", "gate")) == "attention 3 of 12, experts 0 of 4, dense 1 of 3"
    lora.check_targets([MIXED], ("gate", "experts"))
    with pytest.raises(
        BadInput, match="--lora.targets: .* q, k, v, o, experts, unembed, got .*'gate'"
    ):
        lora.check_targets([SPARSE], ("q", "gate"))


def test_all_linear_is_every_matrix_of_each_base_but_those_of_routed_experts():
    assert lora.adapted(MIXED, ["all-linear"]) == ["q", "k", "v", "o", "gate", "up", "down"]
    assert lora.adapted(SPARSE, ["all-linear"]) == ["q", "k", "v", "o"]
    assert lora.named(SPARSE, ["all-linear", "experts", "q"]) == ["q", "k", "v", "o", "experts"]


def test_bases_of_a_team_may_differ_in_the_matrices_that_they_adapt():
    lora.check_targets([MIXED, SPARSE], ("q", "gate"))
    assert lora.adapted(SPARSE, ("q", "gate")) == ["q"]
    with pytest.raises(BadInput, match="--lora.targets: .* at least one of each base, got"):
        lora.check_targets([MIXED, SPARSE], ("gate",))


def test_a_plan_counts_all_weights_and_those_that_a_token_meets():
    attention, dense, expert = 32 * (32 + 16 + 16 + 32), 3 * 32 * 64, 3 * 32 * 32
    assert cost.block_weights(MIXED) == 3 * attention + dense + 2 * 8 * expert
    assert cost.active_weights(MIXED) == 3 * attention + dense + 2 * 2 * expert
    published = config_json.read_config(QWEN3_30B, "c")  # 30.5 billion, of which 3.3 are active
    vocabularies = 2 * 151936 * 2048
    assert round((cost.block_weights(published) + vocabularies) / 1e9, 1) == 30.5
    assert round((cost.active_weights(published) + vocabularies) / 1e9, 1) in (3.3, 3.4)
    ours = cost.forward_flops(MIXED, 1, 0, 5, ("experts",)) - cost.forward_flops(MIXED, 1, 0)
    assert ours == 2 * 5 * 2 * 2 * ((32 + 64) + (32 + 32))


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_experts": None}, "positive integer for 'num_experts', .*got nothing"),
    ({"num_experts_per_tok": 9}, "'num_experts_per_tok', at most 8, got 9"),
    ({"decoder_sparse_step": 0}, "positive integer for 'decoder_sparse_step'"),
    ({"use_sliding_window": True}, "use_sliding_window 'True'"),
])  # fmt: skip
def test_sizes_of_experts_are_checked(changes, message):
    with pytest.raises(BadInput, match=message):
        config_of(**changes)


def test_which_layers_have_experts():
    def sparse(**changes: Any) -> list[int]:
        return config_of(**changes).layers_with("experts_down")

    assert sparse() == [0, 2]
    assert sparse(decoder_sparse_step=2, mlp_only_layers=None) == [1]
    renamed = {k: v for k, v in QWEN3.items() if k != "num_experts"} | {"num_local_experts": 8}
    assert config_json.read_config(renamed, "c") == MIXED


def test_only_layers_that_repeat_are_stacked():
    twice = dataclasses.replace(MIXED, layers=MIXED.layers[:2] * 2)
    periods = [[s.period for s in c.segments] for c in (SPARSE, twice, MIXED)]
    assert periods == [[1], [2], [MIXED.n_layers]]
    assert load.decoder_on("tpu", twice, Model())[0].stacked
    assert not load.decoder_on("tpu", MIXED, Model())[0].stacked
    assert load.decoder_on("tpu", SPARSE, Model())[0].stacked
    with pytest.raises(BadInput, match="--model.layers stacked: .*layers differ"):
        load.decoder_on("cpu", MIXED, Model(layers="stacked"))


def test_an_adapter_is_written_for_each_expert_under_the_names_of_the_checkpoint(tmp_path):
    factors = jax.tree.map(lambda x: np.asarray(x[0]), adapters(MIXED, 1))
    peft.publish(tmp_path, factors, ALPHA, "base", "model", MIXED.layers_with, {})
    assert {place[0] for place in peft.read(tmp_path).matrices} == {*factors}
    each = tmp_path / peft.EACH  # in the adapter's own folder: no agent can be named so there
    stored = load_file(each / peft.WEIGHTS)
    names = {
        re.sub(r"base_model\.model\.(.*)\.lora_[AB]", r"\1", name)
        for name in stored
        if ".experts." in name
    }
    assert names == {name for name in tensors(MIXED) if ".experts." in name}

    def product(name):
        at = f"base_model.model.model.layers.2.mlp.experts.5.{name}"
        return (stored[f"{at}.lora_B.weight"] @ stored[f"{at}.lora_A.weight"]).T

    def ours(name):
        pair = {kind: x[1][5] for kind, x in factors[name].items()}
        return pair["a"] @ pair["b"]

    both = np.concatenate([product("gate_proj"), product("up_proj")], axis=1)
    bounds.close(both, ours("experts_gate_up"))
    bounds.close(product("down_proj"), ours("experts_down"))
    settings = json.loads((each / peft.CONFIG).read_text())
    assert "target_parameters" not in settings
    assert {"q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"} == {
        *settings["target_modules"]
    }
