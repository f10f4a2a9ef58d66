"""Every family computes what transformers' PyTorch models compute, from every kind of file."""

from __future__ import annotations

import dataclasses
import json
import zlib
from pathlib import Path

import bounds
import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from logits import logits_of
from safetensors.numpy import save_file

from marft_jax.errors import BadInput
from marft_jax.extras.gguf import config as gguf_config
from marft_jax.extras.gguf import tensors as gguf_files
from marft_jax.models import config_json, families
from marft_jax.models.names import paths_by_name
from marft_jax.models.rope import RopeScaling
from marft_jax.models.weights import load, safetensors
from marft_jax.models.weights.layout import expert_rows, layouts

BASE = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128,
)  # fmt: skip
LLAMA3 = dict(
    rope_theta=500.0, rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
LINEAR = dict(rope_theta=1e4, rope_type="linear", factor=2.0)
YARN = dict(rope_theta=500.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
VARIANTS = {
    "llama": ("Llama", {}),
    "llama_llama3_rope": ("Llama", dict(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama_linear_rope": ("Llama", dict(rope_parameters=LINEAR)),
    "mistral": ("Mistral", dict(sliding_window=None, head_dim=32)),
    "qwen2": ("Qwen2", dict(rms_norm_eps=1e-5)),
    "qwen3": ("Qwen3", dict(head_dim=32)),
    "qwen3_tied_bias": ("Qwen3", dict(tie_word_embeddings=True, attention_bias=True)),
    "qwen3_experts": ("Qwen3Moe",
        dict(num_hidden_layers=4, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        norm_topk_prob=True, mlp_only_layers=[1])),
    "qwen3_experts_every_other": ("Qwen3Moe",
        dict(num_experts=4, num_experts_per_tok=3, moe_intermediate_size=32,
        decoder_sparse_step=2)),
    "qwen3_experts_gguf": ("Qwen3Moe",
        dict(head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        norm_topk_prob=True)),
    "mistral_window": ("Mistral", dict(sliding_window=7, head_dim=32)),
    "qwen2_window": ("Qwen2", dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    "qwen3_window": ("Qwen3",
        dict(head_dim=32, use_sliding_window=True, sliding_window=9,
        layer_types=["sliding_attention", "full_attention"])),
    "gemma3": ("Gemma3",
        dict(num_hidden_layers=7, hidden_size=96, head_dim=32, sliding_window=8,
        query_pre_attn_scalar=24)),
    "gemma3_gguf": ("Gemma3",
        dict(num_hidden_layers=7, head_dim=32, sliding_window=8, query_pre_attn_scalar=32)),
    "gemma3_pattern": ("Gemma3",
        dict(num_hidden_layers=3, head_dim=16, sliding_window=5, query_pre_attn_scalar=16,
        sliding_window_pattern=2, rope_scaling=dict(rope_type="linear", factor=8.0))),
    "gemma2_gguf": ("Gemma2",
        dict(head_dim=32, sliding_window=8, query_pre_attn_scalar=32, attn_logit_softcapping=5.0)),
    "gemma2": ("Gemma2",
        dict(num_hidden_layers=3, head_dim=32, sliding_window=8, query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    "gemma4": ("Gemma4",
        dict(num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3,
        head_dim=16, global_head_dim=32, num_kv_shared_layers=3, use_double_wide_mlp=True,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=96, sliding_window=8,
        final_logit_softcapping=3.0)),
    "gemma4_values": ("Gemma4",
        dict(num_hidden_layers=3, layer_types=["sliding_attention"] * 2 + ["full_attention"],
        head_dim=16, global_head_dim=32, attention_k_eq_v=True, num_global_key_value_heads=1,
        hidden_size_per_layer_input=0, sliding_window=8)),
    "gemma4_experts": ("Gemma4",
        dict(num_hidden_layers=2, head_dim=16, global_head_dim=32, sliding_window=8,
        hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=8, top_k_experts=2,
        moe_intermediate_size=48)),
    "smollm3": ("SmolLM3", dict(num_hidden_layers=4, pad_token_id=None)),
    "granite": ("Granite",
        dict(attention_multiplier=0.3, embedding_multiplier=6.0, residual_multiplier=0.3,
        logits_scaling=4.0, tie_word_embeddings=True)),
    "granite4": ("GraniteMoeHybrid",
        dict(num_local_experts=0, layer_types=["attention"] * 2, shared_intermediate_size=48,
        position_embedding_type="rope", residual_multiplier=0.3, attention_multiplier=0.3,
        mamba_n_heads=8)),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3",
        dict(num_hidden_layers=4, sliding_window=8,
        rope_parameters=dict(full_attention=YARN,
        sliding_attention=dict(rope_type="default", rope_theta=500.0)))),
    "phi3": ("Phi3",
        dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.5, rope_theta=1e4),
        pad_token_id=None)),
    "phi3_long": ("Phi3",
        dict(original_max_position_embeddings=64, pad_token_id=None,
        rope_parameters=dict(rope_type="longrope", rope_theta=1e4, partial_rotary_factor=0.5,
        short_factor=[1.0, 1.5, 2.0, 2.5], long_factor=[9.0] * 4))),
    "ministral3": ("Ministral3",
        dict(head_dim=32,
        rope_parameters=YARN | dict(original_max_position_embeddings=16, mscale=1.0,
        mscale_all_dim=0.5, llama_4_scaling_beta=0.3))),
    "gpt_oss": ("GptOss",
        dict(head_dim=16, sliding_window=8, num_local_experts=4, num_experts_per_tok=2,
        swiglu_limit=0.6, rope_parameters=YARN | dict(truncate=False))),
    "qwen2_yarn": ("Qwen2", dict(rope_parameters=YARN)),
    "qwen3_yarn": ("Qwen3",
        dict(head_dim=32,
        rope_parameters=YARN | dict(attention_factor=0.9, beta_fast=4.0, truncate=False))),
    "lfm2": ("Lfm2",
        dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"],
        block_multiple_of=32, norm_eps=1e-5)),
    "lfm2_untied": ("Lfm2",
        dict(num_hidden_layers=2, layer_types=["conv", "full_attention"], conv_L_cache=5,
        tie_word_embeddings=False, block_auto_adjust_ff_dim=False,
        rope_parameters=dict(rope_theta=1e4, rope_type="default"))),
    "qwen3_5": ("Qwen3_5",
        dict(head_dim=32, num_hidden_layers=4, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=24)),
    "qwen3_5_experts": ("Qwen3_5Moe",
        dict(head_dim=32, linear_num_key_heads=2, linear_num_value_heads=2, num_experts=8,
        linear_key_head_dim=16, linear_value_head_dim=16, num_experts_per_tok=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=48,
        layer_types=["linear_attention", "full_attention"])),
}  # fmt: skip


OF_TEXT = ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe")
LESS_1 = ("Gemma2", "Gemma3", "Qwen3_5", "Qwen3_5Moe")
"""Families whose scales of norms are stored less 1."""


def reference(variant: str):
    """A random PyTorch model whose norms and biases do something too."""
    torch = pytest.importorskip("torch")
    import transformers

    family, settings = VARIANTS[variant]
    kind = getattr(transformers, f"{family}{'Text' if family in OF_TEXT else ''}Config")
    config = kind(**{**BASE, **settings})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        scales = (x for x in model.named_buffers() if x[0].endswith("layer_scalar"))
        for name, parameter in [*model.named_parameters(), *scales]:
            parameter.copy_(torch.tensor(drawn(name, tuple(parameter.shape), family)))
    return model


def drawn(name: str, shape: tuple[int, ...], family: str) -> np.ndarray:
    """The random tensor of this name."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    stored_less_1 = family in LESS_1 and "linear_attn" not in name
    offset = ("norm" in name and not stored_less_1) or "scal" in name
    return (noise * (0.5 if len(shape) == 1 else 0.15) + offset).astype(np.float32)


def torch_logits(model, tokens: np.ndarray) -> np.ndarray:
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def our_logits(config, tensors, tokens: np.ndarray) -> np.ndarray:
    graphdef, abstract = load.abstract_decoder(config, jnp.float32)
    stream = tensors(load.shapes_of(abstract))
    base = load.fill(abstract, stream, lambda _, a: jnp.asarray(a, jnp.float32))
    return logits_of(graphdef, base, tokens)


def some_tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, BASE["vocab_size"], (2, 40))


@pytest.mark.parametrize("variant", VARIANTS)
def test_safetensors_give_the_logits_of_transformers(variant, tmp_path):
    model, tokens = reference(variant), some_tokens()
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(safetensors.weight_files(tmp_path)) > 1, "meant to be sharded"
    config = config_json.read_config(model.config.to_dict(), "config.json")
    ours = our_logits(config, lambda shapes: safetensors.read(tmp_path, config, shapes), tokens)
    bounds.close(ours, torch_logits(model, tokens), bounds.forward(config))


RECORDED = Path(__file__).with_name("recorded_logits.json")
"""config.json and some logits of the variants that follow ``gemma2``; see ``record``."""


def some_of(logits: np.ndarray) -> np.ndarray:
    return logits[:, [9, -1], :12]


def record() -> None:
    """Writes transformers' logits: ``python tests/models/test_families.py``, where torch is."""
    found = {}
    for variant in [*VARIANTS][[*VARIANTS].index("gemma2") :]:
        model = reference(variant)
        logits = some_of(torch_logits(model, some_tokens()))
        settings = json.loads(model.config.to_json_string())
        found[variant] = {"config": settings, "logits": logits.astype(float).round(4).tolist()}
    lines = (f"{json.dumps(name)}: {json.dumps(own)}" for name, own in found.items())
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


@pytest.mark.parametrize("variant", [*VARIANTS][[*VARIANTS].index("gemma2") :])
@pytest.mark.slow
def test_logits_are_those_that_transformers_once_computed(variant, tmp_path):
    """Of the same tensors, without torch."""
    known = json.loads(RECORDED.read_text())[variant]
    config = config_json.read_config(known["config"], "config.json")
    _, abstract = load.abstract_decoder(config, jnp.float32)
    shapes, family = load.shapes_of(abstract), VARIANTS[variant][0]
    whole, tensors = expert_rows(config, shapes), {}  # as transformers names its parameters
    single = {name for layout in whole.values() for name in layout.names}
    for name, layout in (layouts(config, shapes) | whole).items():
        if name in single:
            continue
        tensors[name] = drawn(name, layout.shape(shapes), family)
    save_file(tensors, tmp_path / "model.safetensors")
    ours = our_logits(
        config, lambda shapes: safetensors.read(tmp_path, config, shapes), some_tokens()
    )
    known = np.array(known["logits"])  # rounded to 4 digits
    atol = 5e-5 + bounds.of(bounds.forward(config), np.abs(ours).max())
    np.testing.assert_allclose(some_of(ours), known, atol=atol)


def rope_divisors(head_dim: int) -> np.ndarray:
    """What llama.cpp's converter stores for LLAMA3, from the formula in Llama 3.1's release."""
    wavelength = 2 * np.pi * LLAMA3["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((LLAMA3["original_max_position_embeddings"] / wavelength - 1) / 3, 0, 1)
    return (1 / ((1 - smooth) / LLAMA3["factor"] + smooth)).astype(np.float32)


INTERLEAVED = ("llama", "smollm3", "granite")


def write_gguf(path, model, arch: str, kind: str, rope=None) -> None:
    """Writes a model as llama.cpp's converter does; matrices as ``kind``, and back into the model
    what that kind made of them."""
    torch = pytest.importorskip("torch")
    c, writer = model.config, gguf.GGUFWriter(str(path), arch)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if arch == "lfm2":
        writer.add_feed_forward_length(len(model.model.layers[0].feed_forward.w1.weight))
        writer.add_head_count_kv([0 if kind == "conv" else c.num_key_value_heads
                                  for kind in c.layer_types])  # fmt: skip
        writer.add_layer_norm_rms_eps(c.norm_eps)
        writer.add_shortconv_l_cache(c.conv_L_cache)
    else:
        writer.add_feed_forward_length(c.intermediate_size)
        writer.add_head_count_kv(c.num_key_value_heads)
        writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    rope_settings = c.rope_parameters.get("full_attention", c.rope_parameters)
    writer.add_rope_freq_base(rope_settings["rope_theta"])
    if arch.startswith("gemma"):
        writer.add_sliding_window(c.sliding_window)
    if arch == "gemma3" and c._sliding_window_pattern != 6:
        writer.add_sliding_window_pattern([kind.startswith("s") for kind in c.layer_types])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(c.attn_logit_softcapping)
        writer.add_final_logit_softcapping(c.final_logit_softcapping)
    if arch == "granite":
        writer.add_attention_scale(c.attention_multiplier)
        writer.add_embedding_scale(c.embedding_multiplier)
        writer.add_residual_scale(c.residual_multiplier)
        writer.add_logit_scale(c.logits_scaling)
    if arch == "qwen3moe":
        writer.add_expert_count(c.num_experts)
        writer.add_expert_used_count(c.num_experts_per_tok)
        writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    if rope_settings["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope_settings["factor"])
    if rope_settings["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_divisors(head_dim) if rope is None else rope)
    heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], c.num_hidden_layers)

    def put(name: str, stored: np.ndarray) -> np.ndarray:
        whole = stored.ndim == 1 or stored.shape[-1] % 32
        type_ = gguf.GGMLQuantizationType["F32" if whole else kind]
        packed = gguf.quantize(stored, type_)
        writer.add_tensor(name, packed, raw_dtype=type_)
        return gguf.dequantize(packed, type_).reshape(stored.shape)

    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy()
        n = heads.get(name.split(".")[-2]) if arch in INTERLEAVED else None
        stored = permute(array, n) if n else array
        short = "conv.conv" in name
        stored = stored[:, 0] if short else stored
        offset = arch.startswith("gemma") and "norm" in name  # the file holds what is multiplied by
        stored = stored + 1 if offset else stored
        if name.endswith("gate_up_proj"):  # of all experts; llama.cpp has two tensors
            layer = name.split(".")[2]
            halves = zip(("gate", "up"), np.split(stored, 2, axis=1), strict=True)
            rounded = np.concatenate(
                [put(f"blk.{layer}.ffn_{half}_exps.weight", own) for half, own in halves], axis=1
            )
        else:
            of_experts = "" if name.endswith((".weight", ".bias")) else ".weight"
            found = names.get_name(f"{name}{of_experts}", try_suffixes=(".weight", ".bias"))
            rounded = put(found, stored)
        rounded = unpermute(rounded, n) if n else rounded - offset
        rounded = rounded[:, None] if short else rounded
        with torch.no_grad():
            parameter.copy_(torch.tensor(np.ascontiguousarray(rounded)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permute(rows, heads):
    """llama.cpp's converter: channels (i, i + C/2) of a head become neighbours."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def unpermute(rows, heads):
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize(("variant", "kind"), [
    *(("llama", kind) for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")),
    ("llama_llama3_rope", "F32"), ("llama_linear_rope", "F32"), ("qwen2", "F32"), ("qwen3", "F32"),
    ("qwen3_tied_bias", "Q8_0"), ("qwen3_experts_gguf", "Q8_0"), ("gemma3_gguf", "F32"),
    ("gemma3_gguf", "Q8_0"), ("gemma3_pattern", "F32"), ("gemma2_gguf", "F32"), ("smollm3", "F32"),
    ("granite", "Q8_0"), ("olmo2", "F32"), ("lfm2", "F32"), ("lfm2_untied", "Q8_0"),
])  # fmt: skip
def test_gguf_gives_the_logits_of_transformers(variant, kind, tmp_path):
    model, tokens = reference(variant), some_tokens()
    arch = VARIANTS[variant][0].lower()
    write_gguf(tmp_path / "m.gguf", model, arch, kind)
    file = gguf_files.open_gguf(tmp_path / "m.gguf")
    config = gguf_config.read_config(file)
    ours = our_logits(config, lambda shapes: gguf_files.read(file, config, shapes), tokens)
    bounds.close(ours, torch_logits(model, tokens), bounds.forward(config))


def test_rope_divisors_of_another_formula_are_refused(tmp_path):
    model = reference("llama_llama3_rope")
    odd = np.linspace(1.0, 4.0, 8).astype(np.float32)
    write_gguf(tmp_path / "m.gguf", model, "llama", "F32", rope=odd)
    with pytest.raises(BadInput, match="rope_freqs.weight.*Llama 3's formula"):
        gguf_config.read_config(gguf_files.open_gguf(tmp_path / "m.gguf"))


LLAMA = dict(BASE, architectures=["LlamaForCausalLM"])
_NAMES = "Mistral Gemma3 Gemma4 GptOss GraniteMoeHybrid Phi3 SmolLM3".split()
_KINDS: list[dict[str, object]] = [{"architectures": [f"{name}ForCausalLM"]} for name in _NAMES]
MISTRAL, GEMMA3, GEMMA4, GPT_OSS, _HYBRID, PHI3, SMOLLM3 = _KINDS
GRANITE4 = _HYBRID | {"layer_types": ["attention"] * 2, "num_local_experts": 0}
LONG: dict[str, object] = {"type": "longrope", "factor": 2.0}


@pytest.mark.parametrize(("model_type", "name"), [
    ("llama", "LlamaForCausalLM"),
    ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    ("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    ("gemma4_unified_text", "Gemma4UnifiedForCausalLM"),
    ("bert", None),
    (None, None),
])  # fmt: skip
def test_a_model_type_names_a_class_of_transformers(model_type, name):
    assert config_json.class_of(model_type) == name


def test_rope_reads_alike_in_the_spelling_of_transformers_4_and_5():
    scaling = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    old = dict(LLAMA, rope_theta=500.0, rope_scaling=scaling)
    new = dict(LLAMA, rope_parameters=LLAMA3)
    configs = [config_json.read_config(c, "config.json") for c in (old, new)]
    assert configs[0] == configs[1]
    [mixer, *_] = configs[0].attentions
    assert mixer.rope_theta == 500.0
    assert mixer.rope_scaling == RopeScaling("llama3", 4.0, 1.0, 4.0, 32)
    older = dict(LLAMA, rope_scaling={"type": "linear", "factor": 2})
    [mixer, *_] = config_json.read_config(older, "c").attentions
    assert mixer.rope_scaling == RopeScaling("linear", 2.0)
    for none in (None, {"rope_type": "default"}):
        unscaled = config_json.read_config(dict(LLAMA, rope_scaling=none), "c")
        assert unscaled.attentions[0].rope_scaling is None


@pytest.mark.parametrize(("new", "old", "theta", "scaling"), [
    (LINEAR, {"type": "linear", "factor": 2}, 1e4, 2.0),
    ({"rope_theta": 5.0}, LINEAR | {"rope_theta": 5.0}, 5.0, 2.0),
    ({"rope_theta": 5.0}, {"type": "linear", "factor": 3}, 5.0, 3.0),
    ({"rope_theta": 5.0}, {}, 5.0, None),
    ({}, LINEAR, 1e4, 2.0),
])  # fmt: skip
def test_both_spellings_of_rope_together_are_both_applied(new, old, theta, scaling):
    settings = LLAMA | {"rope_parameters": new, "rope_scaling": old}
    [mixer, *_] = config_json.read_config(settings, "c").attentions
    assert mixer.rope_theta == theta
    assert mixer.rope_scaling == (scaling and RopeScaling("linear", scaling))


@pytest.mark.parametrize(("changes", "message"), [
    ({"rope_parameters": LINEAR, "rope_scaling": {"type": "linear", "factor": 4}},
     "expected the same in rope_parameters and rope_scaling.*factor"),
    ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*supported: LlamaForCausalLM"),
    ({"architectures": None, "model_type": "gpt2"}, "'gpt2' is not supported"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
     "weight_block_size.*supported: .*fp8 in blocks of 128 x 128.* or GGUF"),
    ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "'ntk'.*default, linear, llama3"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "'llama3' lacks.*low_freq"),
    ({"partial_rotary_factor": 1.5}, "partial_rotary_factor above 0 and up to 1, got 1.5"),
    ({"use_sliding_window": True}, "use_sliding_window 'True'.*supported: false"),
    (MISTRAL | {"sliding_window": 0}, "positive integer for 'sliding_window', .*got 0"),
    (MISTRAL | {"layer_types": ["full_attention"]}, "each of 2 layers in 'layer_types', got 1"),
    (GEMMA3 | {"layer_types": ["chunked_attention"] * 2}, "layer_types.*and sliding_attention"),
    (GEMMA4 | {"per_layer_config": {"1": {"sliding_window": 3}}},
     "per_layer_config with sliding_window is not supported"),
    (GEMMA4 | {"num_kv_shared_layers": 1}, "a layer of each kind before the 1 of.*got sliding"),
    (GEMMA4 | {"hidden_size_per_layer_input": 8}, "vocab_size_per_layer_input of 96.*None"),
    (GEMMA4 | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
    (GEMMA3 | {"final_logit_softcapping": 30.0}, "final_logit_softcapping '30.0'"),
    (GEMMA3 | {"hidden_activation": "gelu"}, "hidden_activation 'gelu'.*gelu_pytorch_tanh"),
    (GPT_OSS | {"quantization_config": {"quant_method": "fp8"}}, "fp8.*supported: mxfp4 or GGUF"),
    (GRANITE4 | {"layer_types": ["mamba", "attention"]}, "layer_types.*full_attention only"),
    (GRANITE4 | {"num_local_experts": 2}, "num_local_experts '2' is not supported"),
    (PHI3 | {"rope_scaling": LONG | {"short_factor": [1.0]}}, "rotated channels.*got 16 and 1"),
    (PHI3 | {"rope_scaling": {"type": "yarn", "short_factor": 1}}, "'longrope' lacks a usable"),
    (SMOLLM3 | {"no_rope_layers": [1]}, "each of 2 layers in 'no_rope_layers', got 1"),
    (GEMMA3 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar, got 0"),
    (GEMMA3 | {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
     "type 'linear' in layers that slide"),
    ({"hidden_size": None}, "positive integer for 'hidden_size', .*got nothing"),
    ({"num_key_value_heads": 3}, "divisible by the key-value heads.* got 4, 3 and"),
])  # fmt: skip
def test_what_the_decoder_cannot_do_is_refused_by_name(changes, message):
    with pytest.raises(BadInput, match=message) as caught:
        config_json.read_config({**LLAMA, **changes}, "config.json")
    assert "\n" not in str(caught.value)


def test_defaults_that_config_json_leaves_out():
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert config_json.read_config(mistral, "c").max_position == 128  # the window of 4096 is wider
    assert not config_json.read_config(mistral, "c").window
    long = config_json.read_config({**mistral, "max_position_embeddings": 32768}, "c")
    assert (long.window, long.sliding) == (4096, (True, True))
    bare = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    config = config_json.read_config(bare, "c")
    mixer = config.attentions[0]
    assert (mixer.n_kv_heads, mixer.head_dim, config.norm_eps) == (4, 16, 1e-6)


def test_gemma_3_as_it_stands_on_the_hub():
    """google/gemma-3-27b-it: a text_config, what it leaves out, the older spelling of rope."""
    text = dict(
        model_type="gemma3_text", head_dim=128, hidden_size=5376, intermediate_size=21504,
        num_attention_heads=32, num_hidden_layers=62, num_key_value_heads=16,
        query_pre_attn_scalar=168, sliding_window=1024,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
    )  # fmt: skip
    settings = dict(
        architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3", text_config=text,
        vision_config={"num_hidden_layers": 27},
    )  # fmt: skip
    config = config_json.read_config(settings, "config.json")
    assert config == families.dense(
        vocab_size=262208, d_model=5376, n_layers=62, n_heads=32, n_kv_heads=16, head_dim=128,
        d_ff=21504, max_position=131072, norm_eps=1e-6, rope_theta=1e6,
        rope_scaling=RopeScaling("linear", 8.0), tie_embeddings=True, qk_norm=True, window=1024,
        sliding=tuple(i % 6 != 5 for i in range(62)), local_rope_theta=1e4,
        query_pre_attn_scalar=168, activation="gelu_pytorch_tanh", post_norms=True,
        norm_offset=True, scale_embeddings=True,
    )  # fmt: skip
    bare = {k: v for k, v in settings.items() if k != "architectures"}
    assert config_json.read_config(bare, "config.json") == config
    assert config_json.read_config({**text, "architectures": None}, "config.json") == config


def gemma_in_numpy(c: dict, w: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Logits of one sequence, by the formulas of the Gemma 3 report and its release."""
    t, heads, channels = len(tokens), c["num_attention_heads"], c["head_dim"]

    def norm(x, name):
        rms = np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6)
        return x / rms * (1 + w[f"model.{name}.weight"])

    def rotated(x_THC, theta, factor):
        angles = np.arange(t)[:, None] / factor * theta ** (-np.arange(0, channels, 2) / channels)
        turn = np.exp(1j * angles)[:, None]
        pairs = (x_THC[..., : channels // 2] + 1j * x_THC[..., channels // 2 :]) * turn
        return np.concatenate([pairs.real, pairs.imag], -1)

    x = w["model.embed_tokens.weight"][tokens] * c["hidden_size"] ** 0.5
    distance = np.arange(t)[:, None] - np.arange(t)
    for i in range(c["num_hidden_layers"]):
        at, slides = f"layers.{i}", (i + 1) % c["sliding_window_pattern"] != 0
        turns = (1e4, 1.0) if slides else (1e6, c["rope_scaling"]["factor"])

        def product(x, name, at=at):
            return x @ w[f"model.{at}.{name}_proj.weight"].T

        h = norm(x, f"{at}.input_layernorm")
        q, k, v = (product(h, f"self_attn.{n}").reshape(t, -1, channels) for n in "qkv")
        q = rotated(norm(q, f"{at}.self_attn.q_norm"), *turns)
        k = rotated(norm(k, f"{at}.self_attn.k_norm"), *turns)
        k, v = (np.repeat(y, heads // y.shape[1], axis=1) for y in (k, v))
        scores = np.einsum("thc,shc->hts", q, k) / c["query_pre_attn_scalar"] ** 0.5
        reads = (distance >= 0) & (distance < (c["sliding_window"] if slides else t))
        weights = np.where(reads, np.exp(scores - scores.max(-1, keepdims=True)), 0)
        weights /= weights.sum(-1, keepdims=True)
        context = np.einsum("hts,shc->thc", weights, v).reshape(t, -1)
        x = x + norm(product(context, "self_attn.o"), f"{at}.post_attention_layernorm")
        h = norm(x, f"{at}.pre_feedforward_layernorm")
        gate, up = product(h, "mlp.gate"), product(h, "mlp.up")
        gate = gate / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        x = x + norm(product(gate * up, "mlp.down"), f"{at}.post_feedforward_layernorm")
    return norm(x, "norm") @ w["model.embed_tokens.weight"].T


@pytest.mark.parametrize("stacked", [False, True])
def test_gemma_3_computes_its_formulas(stacked):
    settings = BASE | dict(
        architectures=["Gemma3ForCausalLM"], num_hidden_layers=3, hidden_size=96, head_dim=32,
        sliding_window=6, sliding_window_pattern=3, query_pre_attn_scalar=20,
        rope_scaling=dict(rope_type="linear", factor=4.0),
    )  # fmt: skip
    config = dataclasses.replace(config_json.read_config(settings, "config.json"), stacked=stacked)
    rng, drawn = np.random.default_rng(0), {}

    def tensors(shapes):
        for name, path in paths_by_name(config, shapes).items():
            drawn[name] = rng.normal(size=shapes[path]) * (0.5 if "norm" in name else 0.15)
            yield path, drawn[name].astype(np.float32)

    tokens = some_tokens()
    ours = our_logits(config, tensors, tokens)
    for row, expected in zip(ours, tokens, strict=True):
        expected = gemma_in_numpy(settings, drawn, expected)
        bounds.close(row, expected, bounds.forward(config))


if __name__ == "__main__":
    record()
