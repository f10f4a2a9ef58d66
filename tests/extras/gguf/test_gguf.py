"""Reading GGUF files: headers, tensor types, vocabularies."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import bounds
import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import transformers

from marft_jax.errors import BadInput
from marft_jax.extras.gguf import config as gguf_config
from marft_jax.extras.gguf import tensors as gguf_files
from marft_jax.extras.gguf import tokenizer, vocabulary
from marft_jax.models import config_json
from marft_jax.models.families import dense
from marft_jax.models.names import source_name
from marft_jax.models.ops import blocks
from marft_jax.models.parts.experts import ExpertsConfig
from marft_jax.models.weights import load

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def settings(writer: gguf.GGUFWriter, **changes) -> None:
    """Metadata of a small model, llama unless the writer says otherwise."""
    numbers = {
        "block_count": 1, "context_length": 64, "embedding_length": 256,
        "feed_forward_length": 256, "attention.head_count": 2, "attention.head_count_kv": 1,
    }  # fmt: skip
    for key, value in {**numbers, **changes}.items():
        if isinstance(value, str):
            writer.add_string(f"{writer.arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{writer.arch}.{key}", value)


def weights(writer: gguf.GGUFWriter, kind="F32", dense=True) -> dict[str, np.ndarray]:
    """Random bytes as matrices of ``kind``, with ``dense`` those of an mlp, too; returns what each
    tensor stands for."""
    rng, type_ = np.random.default_rng(0), gguf.GGMLQuantizationType[kind]
    shapes = {"token_embd": (32, 256), "blk.0.attn_q": (256, 256), "blk.0.attn_k": (128, 256)}
    shapes |= {"blk.0.attn_v": (128, 256), "blk.0.attn_output": (256, 256)}
    if dense:
        shapes |= dict.fromkeys((f"blk.0.ffn_{x}" for x in ("gate", "up", "down")), (256, 256))
    values = {}
    for name, shape in shapes.items():
        blocks = random_blocks(rng, shape, type_)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=type_)
        values[f"{name}.weight"] = gguf.dequantize(blocks, type_)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        values[f"{name}.weight"] = rng.normal(size=256).astype(np.float32)
        writer.add_tensor(f"{name}.weight", values[f"{name}.weight"])
    return values


def random_blocks(rng, shape, type_) -> np.ndarray:
    """Any bytes are a valid tensor as long as the scales, small float16 numbers, are finite."""
    if type_.name == "F32":
        return rng.normal(size=shape).astype(np.float32)
    block, size = gguf.GGML_QUANT_SIZES[type_]
    rows = rng.integers(0, 256, (shape[0], shape[1] // block, size), np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    for start in {"Q6_K": [208], "Q4_K": [0, 2], "Q4_1": [0, 2]}.get(type_.name, [0]):
        rows[:, :, start : start + 2] = scale
    return rows.reshape(shape[0], -1)


def write(path: Path, arch="llama", kind="F32", more=(), **changes) -> dict[str, np.ndarray]:
    """A file of a small model, and ``more`` tensors: their names and values."""
    writer = gguf.GGUFWriter(str(path), arch)
    settings(writer, **changes)
    values = weights(writer, kind)
    for name, array, *type_ in more:
        writer.add_tensor(name, array, raw_dtype=type_[0] if type_ else None)
    finish(writer)
    return values


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(path: Path, quantize: str = "none") -> dict[str, Any]:
    file = gguf_files.open_gguf(path)
    config = gguf_config.read_config(file)
    shapes = load.shapes_of(load.abstract_decoder(config, np.float32)[1])
    return dict(gguf_files.read(file, config, shapes, quantize))


@pytest.mark.parametrize(
    "kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "MXFP4"]
)
def test_every_tensor_type_unpacks_to_its_values(kind, tmp_path):
    values = write(tmp_path / "m.gguf", "qwen2", kind)
    tensors = read(tmp_path / "m.gguf")
    for ours, stored in (
        ("embed/embedding", values["token_embd.weight"]),
        ("layers/0/mixer/q/kernel", values["blk.0.attn_q.weight"]),
        ("layers/0/mlp/down/kernel", values["blk.0.ffn_down.weight"]),
        ("final_norm/scale", values["output_norm.weight"]),
    ):
        np.testing.assert_array_equal(tensors[ours].astype(np.float32), stored)
    direct = {"F16": np.float16, "BF16": ml_dtypes.bfloat16}
    assert tensors["layers/0/mixer/q/kernel"].dtype == direct.get(kind, np.float32)


def test_a_tensor_of_all_experts_is_unpacked_expert_by_expert(tmp_path):
    """Of Qwen3-MoE; llama.cpp has no field that says whether weights of experts sum to 1."""
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "qwen3moe")
    counts = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
    settings(writer, **counts)
    values, rng = weights(writer, "F32", dense=False), np.random.default_rng(1)
    shapes = {"attn_q_norm": (128,), "attn_k_norm": (128,), "ffn_gate_inp": (4, 256)}
    shapes |= {"ffn_gate_exps": (4, 32, 256), "ffn_up_exps": (4, 32, 256)}
    for name, shape in (shapes | {"ffn_down_exps": (4, 256, 32)}).items():
        kind = gguf.GGMLQuantizationType["Q8_0" if "exps" in name else "F32"]
        packed = gguf.quantize(rng.normal(size=shape).astype(np.float32), kind)
        writer.add_tensor(f"blk.0.{name}.weight", packed, raw_dtype=kind)
        values[name] = gguf.dequantize(packed, kind).reshape(shape)
    finish(writer)
    tensors = read(tmp_path / "m.gguf")
    for ours, expected in (
        ("experts_gate_up/3/0", values["ffn_gate_exps"][3]),
        ("experts_gate_up/1/1", values["ffn_up_exps"][1]),
        ("experts_down/2/0", values["ffn_down_exps"][2]),
    ):
        np.testing.assert_array_equal(tensors[f"layers/0/mlp/{ours}/kernel"], expected)
    [layer] = gguf_config.read_config(gguf_files.open_gguf(tmp_path / "m.gguf")).layers
    assert layer.mlp == ExpertsConfig(256, 32, n_experts=4, n_chosen=2, normalised=True)


SIZES = dict(
    vocab_size=32, hidden_size=64, intermediate_size=96, num_attention_heads=4, rms_norm_eps=2**-17,
    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
STORED_SIZES = {
    "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 4,
    "attention.head_count_kv": 2, "context_length": 64, "attention.layer_norm_rms_epsilon": 2**-17,
}  # fmt: skip
DELTA = dict(
    num_hidden_layers=4, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=6,
    linear_key_head_dim=16, linear_value_head_dim=32, linear_conv_kernel_dim=3,
)  # fmt: skip
STORED_DELTA = {
    "block_count": 5, "nextn_predict_layers": 1, "attention.key_length": 32,
    "attention.value_length": 32, "rope.dimension_count": 8, "rope.freq_base": 1e4,
    "ssm.group_count": 2, "ssm.time_step_rank": 6, "ssm.state_size": 16, "ssm.inner_size": 192,
    "ssm.conv_kernel": 3, "full_attention_interval": 4,
}  # fmt: skip
GEMMA4 = dict(architectures=["Gemma4ForCausalLM"], head_dim=16, global_head_dim=32,
              sliding_window=8, tie_word_embeddings=True)  # fmt: skip
STORED_GEMMA4 = {
    "attention.key_length": 32, "attention.value_length": 32, "attention.key_length_swa": 16,
    "attention.value_length_swa": 16, "rope.dimension_count": 32, "rope.dimension_count_swa": 16,
    "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "attention.sliding_window": 8,
}  # fmt: skip
UNROTATED = {"rope_freqs.weight": np.array([1] * 4 + [1e30] * 12, np.float32)}
CONVERTED = {
    "lfm2": (
        dict(architectures=["Lfm2ForCausalLM"], num_hidden_layers=3, conv_L_cache=5,
             layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False,
             norm_eps=2**-17),
        {"block_count": 3, "attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 5},
    ),
    "qwen35": (dict(architectures=["Qwen3_5ForCausalLM"], **DELTA), STORED_DELTA),
    "qwen35moe": (
        dict(architectures=["Qwen3_5MoeForCausalLM"], num_experts=12, num_experts_per_tok=3,
             moe_intermediate_size=24, shared_expert_intermediate_size=40, **DELTA),
        STORED_DELTA | {
            "feed_forward_length": None, "expert_count": 12, "expert_used_count": 3,
            "expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40},
    ),
    "gpt-oss": (
        dict(architectures=["GptOssForCausalLM"], num_hidden_layers=2, head_dim=32,
             num_local_experts=4, num_experts_per_tok=2, sliding_window=16, rope_theta=1e4,
             rope_parameters=dict(rope_type="yarn", factor=8.0, truncate=False,
                                  original_max_position_embeddings=8)),
        {"block_count": 2, "attention.key_length": 32, "attention.value_length": 32,
         "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96,
         "attention.sliding_window": 16, "rope.freq_base": 1e4, "rope.scaling.type": "yarn",
         "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 8},
    ),
    "gemma4 E2B": (
        GEMMA4 | dict(num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3,
                      num_kv_shared_layers=3, use_double_wide_mlp=True, final_logit_softcapping=3.0,
                      hidden_size_per_layer_input=8, vocab_size_per_layer_input=32),
        STORED_GEMMA4 | {
            "block_count": 6, "attention.sliding_window_pattern": [True, False] * 3,
            "attention.shared_kv_layers": 3, "feed_forward_length": [96] * 3 + [192] * 3,
            "final_logit_softcapping": 3.0, "embedding_length_per_layer_input": 8},
    ),
    "gemma4 26B": (
        GEMMA4 | dict(num_hidden_layers=3,
                      layer_types=["sliding_attention"] * 2 + ["full_attention"],
                      attention_k_eq_v=True, num_global_key_value_heads=1, enable_moe_block=True,
                      num_experts=12, top_k_experts=3, moe_intermediate_size=24),
        STORED_GEMMA4 | {
            "block_count": 3, "attention.sliding_window_pattern": [True, True, False],
            "attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0,
            "attention.head_count_kv": [2, 2, 1], "expert_count": 12, "expert_used_count": 3,
            "expert_feed_forward_length": 24},
    ),
}  # fmt: skip
"""By architecture of llama.cpp a config.json, and what its converter makes of it."""
UNREAD = {
    "qwen35": {"blk.4.nextn.eh_proj.weight": np.ones((64, 128), np.float32)},
    "qwen35moe": {"blk.4.ffn_gate_exps.weight": np.ones((12, 24, 64), np.float32)},
    "gemma4 E2B": {"blk.4.attn_k.weight": np.ones((32, 64), np.float32), **UNROTATED},
    "gemma4 26B": UNROTATED,
}
"""Further tensors that it writes."""


def stored(arch: str, name: str, x: np.ndarray) -> tuple[str, np.ndarray]:
    """A tensor of a checkpoint as llama.cpp's converter writes it (conversion/, November 2026)."""
    if arch.startswith("qwen35"):
        module = name.split(".")[-1 if name.endswith(("A_log", "dt_bias")) else -2]
        if "linear_attn" in name and module != "norm":
            x = x.T if module == "out_proj" else x
            keys = 2 * 2 * 16 if module in ("in_proj_qkv", "conv1d") else 0
            # value heads of key heads 0 0 0 1 1 1 become those of 0 1 0 1 0 1
            heads = np.split(x[keys:], 6)
            x = np.concatenate([x[:keys], *(heads[i] for i in (0, 3, 1, 4, 2, 5))])
            x = x.T if module == "out_proj" else x
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            x = x + 1
        x = -np.exp(x) if module == "A_log" else x
        name = name.replace(".dt_bias", ".dt_proj.bias")
    if arch == "gemma4":
        name = re.sub("mlp.experts.[0-9]+.(gate|up)_proj", "experts.gate_up_proj", name)
        name = re.sub("mlp.experts.[0-9]+.down_proj", "experts.down_proj", name)
    name += ".weight" if name.endswith(("sinks", "layer_scalar")) else ""
    return name, x.squeeze()


SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}


@pytest.mark.parametrize("model", CONVERTED)
def test_a_converted_checkpoint_has_the_decoder_and_the_weights_of_the_checkpoint(model, tmp_path):
    (hf, metadata), arch = CONVERTED[model], model.split()[0]
    config, rng = config_json.read_config(SIZES | hf, "config.json"), np.random.default_rng(0)
    writer, stacks = gguf.GGUFWriter(str(tmp_path / "m.gguf"), arch), dict[str, list[np.ndarray]]()
    kinds = {int: "uint32", float: "float32", str: "string", list: "array"}
    for key, value in (STORED_SIZES | metadata).items():
        if value is not None:
            getattr(writer, f"add_{kinds[type(value)]}")(f"{arch}.{key}", value)
    [architecture] = [kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch]
    names, written = gguf.get_tensor_name_map(architecture, config.n_layers), {}
    for path, shape in load.shapes_of(load.abstract_decoder(config, np.float32)[1]).items():
        written[path] = rng.normal(size=shape).astype(np.float32)
        name, x = stored(arch, source_name(config, path, "hf"), written[path])
        found = names.get_name(re.sub(r"experts\.\d+", "experts", name), (".weight", ".bias"))
        for scale, renamed in SCALES.items():
            found = f"blk.{name.split('.')[2]}.{renamed}" if name.endswith(scale) else found
        assert found is not None, name
        stacks.setdefault(found, []).append(x)
    for name, arrays in stacks.items():  # several: of experts, or first their gate, then their up
        if "gate_up" in name:
            halves = np.split(np.stack(arrays), 2)
            arrays = [np.concatenate(both) for both in zip(*halves, strict=True)]
        writer.add_tensor(name, arrays[0] if len(arrays) == 1 else np.stack(arrays))
    for name, array in UNREAD.get(model, {}).items():
        writer.add_tensor(name, array)
    finish(writer)
    assert gguf_config.read_config(gguf_files.open_gguf(tmp_path / "m.gguf")) == config
    bounds.close(read(tmp_path / "m.gguf"), written)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_blocks_of_four_bits_stay_packed_and_keep_their_values(arch, tmp_path):
    """Also where queries and keys are laid out anew."""
    write(tmp_path / "m.gguf", arch, "Q4_0")
    whole, kept = read(tmp_path / "m.gguf"), read(tmp_path / "m.gguf", "int4")
    for path, values in kept.items():
        if path.startswith("layers/") and path.endswith("/kernel"):
            assert values.qvalue.dtype == "int4" and values.scale.dtype == np.float16
            values = blocks.unpacked(jax.tree.map(jnp.asarray, values), jnp.float32)
        np.testing.assert_array_equal(values, whole[path])
    assert isinstance(read(tmp_path / "m.gguf", "nf4")["layers/0/mixer/q/kernel"], np.ndarray)


def test_metadata_becomes_the_decoder_config(tmp_path):
    write(tmp_path / "m.gguf", "qwen2")
    config = gguf_config.read_config(gguf_files.open_gguf(tmp_path / "m.gguf"))
    sizes = dict(vocab_size=32, d_model=256, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=128)
    assert config == dense(**sizes, d_ff=256, max_position=64, tie_embeddings=True)


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("mamba2", {}, "architecture 'mamba2' is not supported; supported: llama, qwen2, qwen3"),
        ("llama", {"expert_count": 8}, "llama.expert_count 8"),
        ("llama", {"attention.sliding_window": 32}, "llama.attention.sliding_window 32"),
        ("llama", {"rope.dimension_count": 64}, "llama.rope.dimension_count 64.*supported: 128"),
        ("llama", {"rope.scaling.type": "longrope"}, "llama.rope.scaling.type 'longrope'"),
        ("llama", {"rope.scaling.type": "yarn"}, "scaling 'yarn' lacks a usable"),
        ("llama", {"block_count": None}, "'block_count', at most 512, got nothing"),
        ("llama", {"block_count": 2}, "9 tensors are missing: blk.1.attn_k.weight"),
        ("llama", {"feed_forward_length": 128}, "ffn_gate.weight.*expected shape .128, 256."),
    ],
)
def test_what_the_decoder_cannot_do_is_refused_by_name(arch, changes, message, tmp_path):
    write(tmp_path / "m.gguf", arch, **changes)
    with pytest.raises(BadInput, match=message) as caught:
        read(tmp_path / "m.gguf")
    assert "\n" not in str(caught.value)


def test_two_scalings_of_rope_at_once_are_refused(tmp_path):
    write(tmp_path / "m.gguf", more=[("rope_freqs.weight", np.ones(64, np.float32))])
    file = gguf_files.open_gguf(tmp_path / "m.gguf")
    assert gguf_config.read_config(file).attentions[0].rope_scaling is None
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    with pytest.raises(BadInput, match="rope_freqs.weight' beside rope.scaling.factor 2 is not"):
        gguf_config.read_config(file._replace(metadata=file.metadata | linear))


def write_gemma(path: Path, **changes) -> dict[str, np.ndarray]:
    widths = {"post_attention": 256, "post_ffw": 256, "attn_q": 128, "attn_k": 128}
    norms = {name: np.linspace(0.5, 2, n, dtype=np.float32) for name, n in widths.items()}
    more = [(f"blk.0.{name}_norm.weight", scale) for name, scale in norms.items()]
    return norms | write(path, "gemma3", more=more, **{"attention.sliding_window": 16, **changes})


def test_of_gemma_a_file_holds_the_whole_scales_of_norms(tmp_path):
    values = write_gemma(tmp_path / "m.gguf")
    tensors = read(tmp_path / "m.gguf")
    for ours, stored in (
        ("layers/0/attn_norm/scale", values["blk.0.attn_norm.weight"]),
        ("layers/0/attn_post_norm/scale", values["post_attention"]),
        ("layers/0/mlp_norm/scale", values["blk.0.ffn_norm.weight"]),
        ("layers/0/mlp_post_norm/scale", values["post_ffw"]),
        ("layers/0/mixer/q_norm/scale", values["attn_q"]),
        ("final_norm/scale", values["output_norm.weight"]),
    ):
        bounds.close(tensors[ours], stored - 1)
    config = gguf_config.read_config(gguf_files.open_gguf(tmp_path / "m.gguf"))
    [mixer] = config.attentions
    assert (config.window, config.sliding, mixer.rope_theta) == (16, (True,), 1e4)
    assert mixer.query_pre_attn_scalar == mixer.head_dim


def test_gemmas_27b_divides_scores_by_another_root(tmp_path):
    write_gemma(tmp_path / "m.gguf")
    file = gguf_files.open_gguf(tmp_path / "m.gguf")
    metadata = file.metadata | {"gemma3.block_count": 62, "gemma3.attention.head_count": 4}
    pattern = [i % 3 == 0 for i in range(62)]
    more = {"gemma3.attention.sliding_window_pattern": pattern, "gemma3.attention.key_length": 128}
    config = gguf_config.read_config(file._replace(metadata=metadata | more))
    mixer = config.attentions[1]
    assert mixer.query_pre_attn_scalar == 256 / 4 and config.sliding == tuple(pattern)
    assert mixer.rope_theta == 1e6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"final_logit_softcapping": 30}, "gemma3.final_logit_softcapping 30.*supported: none"),
        ({"attention.sliding_window": 0}, "positive integer for 'sliding_window', .*got 0"),
        ({"attention.sliding_window_pattern": 0}, "not a readable GGUF file"),
    ],
)
def test_what_gemma_cannot_be_is_refused_by_name(changes, message, tmp_path):
    write_gemma(tmp_path / "m.gguf", **changes)
    with pytest.raises(BadInput, match=message):
        read(tmp_path / "m.gguf")


Q8_K = gguf.GGMLQuantizationType.Q8_K
UNPACKABLE = np.zeros((32, gguf.GGML_QUANT_SIZES[Q8_K][1]), np.uint8)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (("blk.0.attn_sinks.weight", np.ones(4, np.float32)), "unexpected tensor 'blk.0.attn_sin"),
        (("output.weight", UNPACKABLE, Q8_K), "'output.weight': not a readable tensor .* Q8_K"),
    ],
)
def test_a_tensor_that_cannot_be_used_is_named(tensor, message, tmp_path):
    write(tmp_path / "m.gguf", more=[tensor])
    with pytest.raises(BadInput, match=message):
        read(tmp_path / "m.gguf")


def test_a_damaged_file_is_one_clear_line(tmp_path):
    write(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    bad = tmp_path / "bad.gguf"
    for damage in (
        b"",
        b"PK\x03\x04" + whole[4:],
        whole[:4] + b"\x01" + whole[5:],  # version 1
        whole[:100],  # inside the header
        whole[: len(whole) // 2],  # inside the weights
        whole[:8] + b"\xff" * 8 + whole[16:],  # an absurd number of tensors
        whole[:24] + b"\xff" * 8 + whole[32:],  # an absurdly long key
    ):
        bad.write_bytes(damage)
        with pytest.raises(BadInput, match="bad.gguf: not a readable GGUF file") as caught:
            gguf_files.open_gguf(bad)
        assert "\n" not in str(caught.value)


def byte_level_metadata(pre: str, merges=("1 2", "3 4", "h e")) -> dict:
    alphabet = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    merged = [merge.replace(" ", "") for merge in merges]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *alphabet, *merged]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": CHATML,
    }


def test_rows_of_a_gguf_file_that_only_fill_up_are_no_tokens():
    """llama.cpp writes unused names for rows without a token, at the end or between tokens."""
    metadata = byte_level_metadata("qwen2")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    n, hole = len(tokens), tokens.index("~")
    filled = [*tokens, "[PAD300]", "[PAD301]"]
    filled[hole] = "[PAD7]"
    kinds = [*types, 5, 5]
    kinds[hole] = 5
    merged = tokens.index("he")
    kinds[merged] = 5  # unused, but a merge makes it
    more = {"tokenizer.ggml.tokens": filled, "tokenizer.ggml.token_type": kinds}
    own = tokenizer.from_gguf(metadata | more, "test")
    assert own.gaps(n + 2) == ((hole, hole + 1), (n, n + 2)) and own.vocab_size == n
    assert own.decode([n]) == "" and own.encode("he") == [merged]
    assert own.gaps(hole) == () and own.gaps(n + 5) == ((hole, hole + 1), (n, n + 5))


def test_the_named_pre_tokenizer_decides_how_digits_are_cut():
    def cut(pre: str) -> list[str]:
        return vocabulary.from_gguf(byte_level_metadata(pre), "test").encode("1234 he").tokens

    assert cut("smollm") == ["1", "2", "3", "4", "Ġ", "he"]
    assert cut("qwen2") == ["1", "2", "3", "4", "Ġ", "he"]
    assert cut("llama-bpe") == ["12", "3", "4", "Ġ", "he"]  # groups of three: 123, 4
    assert cut("gpt-2") == ["12", "34", "Ġ", "he"]
    with pytest.raises(BadInput, match="pre-tokenizer 'exaone'.*smollm"):
        vocabulary.from_gguf(byte_level_metadata("exaone"), "test")
    with pytest.raises(BadInput, match="tokenizer model 'rwkv'"):
        vocabulary.from_gguf({"tokenizer.ggml.model": "rwkv"}, "test")


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("qwen2", "ox\u0301en", ["ox", "\u0301en"]),
        ("qwen35", "ox\u0301en", ["ox\u0301en"]),
        ("tekken", "HisCar's 1234", ["His", "Car", "'s", " ", "1", "2", "3", "4"]),
        ("gpt-4o", "HisCar's 1234", ["His", "Car's", " ", "123", "4"]),
    ],
)
def test_the_named_pre_tokenizer_decides_where_words_end(pre, text, words):
    cutter = vocabulary.from_gguf(byte_level_metadata(pre), "test").pre_tokenizer
    found = [text[slice(*at)] for _, at in cutter.pre_tokenize_str(text)]
    assert found == words


def test_gemma_4_merges_as_its_list_says_and_falls_back_to_bytes():
    """As transformers' tokenizer of the family does."""
    merges = ["h e", "l l", "▁ he", "he ll", "▁ ▁", "\n \n"]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"]
    letters = [*(f"<0x{i:02X}>" for i in range(256)), *"helo▁\n"]
    tokens = [*special, *letters, *(merge.replace(" ", "") for merge in merges)]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 5 + [6] * 256 + [1] * (len(tokens) - 261),
        "tokenizer.ggml.merges": merges,
    }
    ours = vocabulary.from_gguf(metadata, "test")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    theirs = transformers.GemmaTokenizer({token: i for i, token in enumerate(tokens)}, pairs)
    text = "hello  hé\n\n\n hell"
    ids = ours.encode(text).ids
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == text and ours.encode(f"he{special[4]}").tokens[-1] == special[4]


def test_special_tokens_and_chat_template_come_out_of_the_file():
    tok = tokenizer.from_gguf(byte_level_metadata("smollm"), "test")
    assert (tok.eos_ids, tok.pad_id) == ((2,), 0)
    ids = tok.chat([{"role": "user", "content": "hi"}])
    assert ids[0] == 1 and ids.count(1) == 2 and ids.count(2) == 1
    assert tok.decode([*tok.encode("he says 12"), 2, 0]) == "he says 12"


SPECIAL = ["bos", "eos", "unknown", "padding", "eot"]


@pytest.mark.parametrize("none", [-1, 2**32 - 1])
@pytest.mark.parametrize("name", SPECIAL)
def test_a_special_token_that_a_file_lacks_is_none(name, none):
    """llama.cpp writes -1 for it, in 32 bits with or without a sign."""
    metadata = byte_level_metadata("smollm") | {"tokenizer.ggml.eot_token_id": 1}
    key = f"tokenizer.ggml.{name}_token_id"
    without = {k: v for k, v in metadata.items() if k != key}
    lacking, expected = (tokenizer.from_gguf(m, "m") for m in (metadata | {key: none}, without))
    assert (lacking.eos_ids, lacking.pad_id) == (expected.eos_ids, expected.pad_id)
    assert lacking.backend.special_tokens_map == expected.backend.special_tokens_map


@pytest.mark.parametrize("number", [-2, 105, 2**31, 2**32 - 2, "2", 2.5, [2], True], ids=repr)
@pytest.mark.parametrize("name", SPECIAL)
def test_a_special_token_that_is_none_of_the_file_is_refused(name, number):
    key = f"tokenizer.ggml.{name}_token_id"
    with pytest.raises(BadInput, match=f"{key}: expected an id below .* got"):
        tokenizer.from_gguf(byte_level_metadata("smollm") | {key: number}, "m")


def test_without_any_end_of_a_turn_it_says_so():
    ends = dict.fromkeys(("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"), -1)
    plain = {"tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    with pytest.raises(BadInput, match="m: expected an end-of-sequence token, found none"):
        tokenizer.from_gguf(byte_level_metadata("smollm") | ends | plain, "m")


WITH_TOOLS = CHATML + "{{ tools[0].function.name if tools }}"


@pytest.mark.parametrize(
    "templates, shown",
    [
        ({"": CHATML, ".rag": "rag"}, False),
        ({"": CHATML, ".rag": "rag", ".tool_use": WITH_TOOLS}, True),
        ({".tool_use": WITH_TOOLS}, True),
        ({".default": CHATML, ".tool_use": WITH_TOOLS}, True),
    ],
    ids=lambda x: str([*x]) if isinstance(x, dict) else str(x),
)
def test_of_several_templates_that_for_tools_is_used_where_there_are_tools(templates, shown):
    """As for a model's folder with the same templates."""
    metadata = byte_level_metadata("smollm")
    del metadata["tokenizer.chat_template"]
    metadata |= {f"tokenizer.chat_template{name}": text for name, text in templates.items()}
    metadata["tokenizer.chat_templates"] = [name[1:] for name in templates if name]
    tok, talk = tokenizer.from_gguf(metadata, "m"), [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "find", "description": "", "parameters": {}}}
    plain, tools = (tok.decode(tok.chat(talk, own), special=True) for own in ((), [tool]))
    assert "hi" in plain and "find" not in plain and ("find" in tools) == shown


REAL = Path(os.environ.get("MARFT_SMOLLM2", "models/SmolLM2-135M-Instruct.Q4_1.gguf"))


@pytest.mark.skipif(not REAL.is_file(), reason="python scripts/fetch_model.py fetches it")
def test_the_vocabulary_of_smollm2():
    file = gguf_files.open_gguf(REAL)
    tok = tokenizer.from_gguf(file.metadata, str(REAL))
    assert (tok.vocab_size, tok.eos_ids, tok.pad_id) == (49152, (2,), 2)
    assert tok.encode("1234 hello") == [33, 34, 35, 36, 33662]
    said = [{"role": "system", "content": "plan"}, {"role": "user", "content": "3+5+9=?"}]
    # <|im_start|>system\nplan<|im_end|>\n<|im_start|>user\n3+5+9=?<|im_end|>\n...assistant\n
    system = [1, 9690, 198, 12338, 2, 198]
    user = [1, 4093, 198, 35, 27, 37, 27, 41, 45, 47, 2, 198]
    assert tok.chat(said) == [*system, *user, 1, 520, 9531, 198]
