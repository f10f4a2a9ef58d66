"""Adapters and models that travel: what others compute with them is what we compute."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import bounds
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from logits import TOKENS, our_logits
from safetensors.numpy import load_file, save_file

from marft_jax.errors import BadInput
from marft_jax.extras.export import huggingface
from marft_jax.interop import peft
from marft_jax.interop.initial import initial_adapters
from marft_jax.models import lora
from marft_jax.models.config_json import read_config
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.models.families import FAMILIES, dense, multipliers
from marft_jax.models.rope import RopeScaling
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer, from_directory
from marft_jax.models.weights.load import BaseModel, abstract_decoder, fill, load_base, shapes_of
from marft_jax.settings import config as config_lib
from marft_jax.settings.config import Lora
from marft_jax.team.team_files import load_team
from marft_jax.types import MAIN

SHAPE = dict(vocab_size=264, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48,
             max_position=128)  # fmt: skip
VARIANTS = {
    "llama": dense(**SHAPE, rope_scaling=RopeScaling("llama3", 4.0, 1.0, 4.0, 32)),
    "llama_bias": dense(**SHAPE, qkv_bias=True, o_bias=True, tie_embeddings=True),
    "qwen2": dense(**SHAPE, qkv_bias=True),
    "qwen3": dense(**SHAPE, qk_norm=True, rope_scaling=RopeScaling("linear", 2.0)),
    "qwen3_window": dense(**SHAPE, qk_norm=True, window=4, sliding=(False, True)),
    "mistral": dense(**SHAPE, window=4, sliding=(True, True)),
    "gemma3": dense(
        **SHAPE, tie_embeddings=True, rope_theta=1e6, rope_scaling=RopeScaling("linear", 8.0),
        window=4, sliding=(True, False), local_rope_theta=1e4, query_pre_attn_scalar=6,
        **FAMILIES["Gemma3ForCausalLM"].traits,
    ),
    "gemma2": dense(
        **SHAPE, tie_embeddings=True, window=4, sliding=(True, False), query_pre_attn_scalar=6,
        cap=3.0, logits_cap=2.0, **FAMILIES["Gemma2ForCausalLM"].traits,
    ),
    "smollm3": dense(**SHAPE, rotated=(False, True)),
    "granite": dense(**SHAPE, **multipliers(0.25, 3.0, 0.5, 4.0)),
    "olmo2": dense(**SHAPE, **FAMILIES["Olmo2ForCausalLM"].traits),
}  # fmt: skip
RANK, ALPHA = 3, 5.0
TARGETS = tuple(VARIANTS["llama"].matrices())


def random_base(variant: str | DecoderConfig) -> BaseModel:
    config = VARIANTS[variant] if isinstance(variant, str) else variant
    graphdef, abstract = abstract_decoder(config, jnp.float32)
    rng = np.random.default_rng(1)
    tensors = [
        (path, 0.2 * rng.normal(size=shape) + path.endswith("scale"))
        for path, shape in shapes_of(abstract).items()
    ]
    params = fill(abstract, tensors, lambda _, x: jnp.asarray(x, jnp.float32))
    return BaseModel(config, graphdef, params, ByteTokenizer(), "tiny", "0")


def random_factors(config: DecoderConfig, targets=TARGETS, rank=RANK, seed=2):
    rng = np.random.default_rng(seed)
    factors = {}
    for target in targets:
        matrices = config.adaptable()[target]
        d_in, d_out, *_ = matrices[0]
        a = rng.normal(size=(len(matrices), d_in, rank)) * 0.3
        b = rng.normal(size=(len(matrices), rank, d_out)) * 0.3
        factors[target] = {"a": a.astype(np.float32), "b": b.astype(np.float32)}
    return factors


def write(folder, factors, alpha=16.0, base="base", inside="model"):
    """Writes an adapter for a base of two layers."""
    peft.write(folder, factors, alpha, base, inside, small.CONFIG.layers_with, {})


def initial(team, settings, fresh):
    return initial_adapters(team, settings, {MAIN: fresh}, None, {MAIN: small.CONFIG})[MAIN]


def their_logits(folder, adapter=None):
    torch = pytest.importorskip("torch")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = pytest.importorskip("peft").PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits.numpy()


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_and_peft_compute_what_we_compute(variant, tmp_path):
    base = random_base(variant)
    factors = random_factors(base.config, (*TARGETS, lora.UNEMBED))
    huggingface.write_model(tmp_path / "base", base, {}, 1.0, {})
    write(tmp_path / "agent", factors, ALPHA, base=str(tmp_path / "base"))
    theirs = their_logits(tmp_path / "base", tmp_path / "agent")
    bounds.close(our_logits(base, factors), theirs, bounds.forward(base.config))
    assert np.abs(theirs - our_logits(base)).max() > 0.1  # the adapter matters


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_written_config_json_is_read_as_what_it_was(variant):
    config = dataclasses.replace(VARIANTS[variant], norm_eps=1e-6)
    assert read_config(huggingface.config_json(config), "config.json") == config


OLDER_KEYS = {
    "llama": {"rope_theta": 1e4, "rope_scaling": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}},
    "qwen2": {"rope_theta": 1e4},
    "qwen3": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "mistral": {"rope_theta": 1e4},
    "gemma3": {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "granite": {"rope_theta": 1e4, "torch_dtype": "float32", "dtype": "float32"},
}  # fmt: skip


@pytest.mark.parametrize("variant", OLDER_KEYS)
def test_settings_stand_where_older_programs_read_them_too(variant, tmp_path):
    base = random_base(variant)
    huggingface.write_model(tmp_path, base, {}, 1.0, {})
    written = json.loads((tmp_path / "config.json").read_text())
    assert {key: written[key] for key in OLDER_KEYS[variant]} == OLDER_KEYS[variant]
    assert read_config(written, "config.json") == read_config(
        huggingface.config_json(base.config), "config.json"
    )


@pytest.mark.parametrize("variant", ["llama_bias", "qwen3", "gemma3"])
def test_a_merged_model_is_the_base_with_its_adapter(variant, tmp_path):
    base = random_base(variant)
    head = () if base.config.tie_embeddings else (lora.UNEMBED,)
    factors = random_factors(base.config, (*TARGETS, *head))
    huggingface.write_model(tmp_path, base, factors, ALPHA / RANK, {"temperature": 0.5}, 20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(p.name for p in tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2 and set(index["weight_map"].values()) == set(shards)
    sizes = [sum(x.nbytes for x in load_file(tmp_path / name).values()) for name in shards]
    assert max(sizes) <= max(20_000, 264 * 32 * 4) and sum(sizes) == index["metadata"]["total_size"]
    ours = our_logits(base, factors)
    settings = config_lib.Model(base=str(tmp_path))
    loaded = load_base(settings, lambda _, x: jnp.asarray(x, jnp.float32))
    bounds.close(our_logits(loaded), ours, bounds.forward(base.config))
    bounds.close(their_logits(tmp_path), ours, bounds.forward(base.config))
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"eos_token_id": 257, "pad_token_id": 256, "temperature": 0.5}


FUSED: dict[str, dict[str, Any]] = {
    "Phi3ForCausalLM": dict(model_type="phi3", partial_rotary_factor=0.5),
    "GptOssForCausalLM": dict(
        model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=4,
        quantization_config={"quant_method": "mxfp4"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.slow
def test_a_merged_model_has_the_tensors_of_its_family(name, tmp_path):
    settings = dict(architectures=[name], vocab_size=264, hidden_size=32, intermediate_size=48,
                    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                    max_position_embeddings=128, **FUSED[name])  # fmt: skip
    config = read_config(settings, "config.json")
    base = random_base(config)._replace(source=str(tmp_path / "base"))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(settings))
    factors = random_factors(config, ("q", "v", "o"))
    huggingface.save_tokenizer(base.tokenizer, tmp_path / "base", None)
    huggingface.write_model(tmp_path / "merged", base, factors, ALPHA / RANK, {})
    model = config_lib.Model(base=str(tmp_path / "merged"))
    again = load_base(model, lambda _, x: jnp.asarray(x, jnp.float32))
    ours = our_logits(base, factors)
    bounds.close(our_logits(again), ours, bounds.forward(config))
    bounds.close(their_logits(tmp_path / "merged"), ours, bounds.forward(config))


def test_the_byte_tokenizer_travels_with_the_built_in_model(tmp_path):
    huggingface.save_tokenizer(ByteTokenizer(), tmp_path, None)
    theirs, ours = from_directory(tmp_path), ByteTokenizer()
    messages = [
        {"role": "system", "content": "plan"},
        {"role": "user", "content": "3+4=?\nplanner:  3+4 \x00\x7fé漢🙂"},
        {"role": "assistant", "content": " 7 "},
        {"role": "user", "content": "again"},
    ]
    assert theirs.chat(messages) == ours.chat(messages)
    assert theirs.eos_ids == ours.eos_ids and theirs.pad_id == ours.pad_id
    every = bytes(range(256)).decode("latin-1")
    assert theirs.encode(every) == ours.encode(every)
    assert theirs.decode(ours.encode("7 é漢 ") + [257]) == "7 é漢 "


def fresh_adapters(team, settings: Lora):
    names = dict(adapters=team.numbers[MAIN], rank=settings.rank, targets=settings.targets)
    return lora.init(jax.random.key(0), small.CONFIG, **names)


def team_and_fresh(settings: Lora):
    return (team := small.team(2)), fresh_adapters(team, settings)


QV_OF_8 = small.CONFIG, ("q", "v"), 8
"""Model, targets and rank of a pair of adapters."""


def products(adapters, n, scale):
    """What each matrix's output is corrected by: A B * scale."""
    return {
        target: np.einsum("lir,lro->lio", np.asarray(ab["a"][n]), np.asarray(ab["b"][n])) * scale
        for target, ab in adapters.items()
    }


@pytest.mark.parametrize("rslora", [False, True])
def test_another_alpha_and_a_lower_rank_are_converted_exactly(rslora, tmp_path):
    factors = random_factors(small.CONFIG, ("q", "v"))
    write(tmp_path / "planner", factors, ALPHA)
    scale = ALPHA / RANK
    if rslora:
        file = tmp_path / "planner" / peft.CONFIG
        file.write_text(json.dumps(json.loads(file.read_text()) | {"use_rslora": True}))
        scale = ALPHA / RANK**0.5
    settings = Lora(rank=8, alpha=16.0, targets=("q", "k", "v"))
    team, fresh = team_and_fresh(settings)
    planner = dataclasses.replace(team.profiles[0], init=str(tmp_path / "planner"))
    profiles = (planner, team.profiles[1])
    loaded = initial(team._replace(profiles=profiles), settings, fresh)
    expected = {t: np.einsum("lir,lro->lio", f["a"], f["b"]) * scale for t, f in factors.items()}
    got = products(loaded, 0, settings.alpha / settings.rank)
    for target in ("q", "v"):
        bounds.close(got[target], expected[target])
    assert np.abs(got["k"]).max() == 0  # not in the folder: starts as the base
    np.testing.assert_array_equal(loaded["q"]["a"][0, :, :, RANK:], fresh["q"]["a"][0, :, :, RANK:])
    for new, old in zip(jax.tree.leaves(loaded), jax.tree.leaves(fresh), strict=True):
        np.testing.assert_array_equal(new[1], old[1])  # the other agent is as it was


def write_pair(folder):
    for i, name in enumerate(("planner", "solver")):
        write(folder / name, random_factors(*QV_OF_8, i))


def test_a_whole_team_loads_from_a_folder_and_is_written_back_bit_for_bit(tmp_path):
    write_pair(tmp_path / "team")
    settings = Lora(init=str(tmp_path / "team"), targets=small.QV)
    team, fresh = team_and_fresh(settings)
    loaded = initial(team, settings, fresh)
    for n, name in enumerate(team.adapter_names[MAIN]):
        factors = jax.tree.map(lambda x, n=n: np.asarray(x[n]), loaded)
        write(tmp_path / "again" / name, factors, settings.alpha)
        for file in (peft.CONFIG, peft.WEIGHTS):
            again = (tmp_path / "again" / name / file).read_bytes()
            assert again == (tmp_path / "team" / name / file).read_bytes()


def test_a_value_head_of_the_first_release_is_refused_by_name(tmp_path):
    write_pair(tmp_path)
    (tmp_path / "value_head.pth").touch()
    settings = Lora(init=str(tmp_path), targets=small.QV)
    team, fresh = team_and_fresh(settings)
    with pytest.raises(BadInput, match="value_head.pth: value heads .* are not read; move"):
        initial(team, settings, fresh)


@pytest.mark.parametrize("name", ["quartet", "octet"])
def test_shipped_teams_take_the_first_releases_checkpoints(name, tmp_path):
    """Its folders are called by its roles; once continued, it saves one folder deeper."""
    blueprint = load_team(str(TEAMS / f"{name}.yaml"))
    for i, profile in enumerate(blueprint.agents):
        inner = (profile.name,) if i % 2 else ()
        factors = random_factors(*QV_OF_8, i)
        write(tmp_path.joinpath(profile.name, *inner), factors)
    settings = Lora(init=str(tmp_path), targets=small.QV)
    team = small.team_of(blueprint)
    fresh = fresh_adapters(team, settings)
    loaded = initial(team, settings, fresh)
    assert FIRST_ROLES[name] <= set(team.names)
    for n in range(len(team.names)):
        np.testing.assert_array_equal(loaded["q"]["a"][n], random_factors(*QV_OF_8, n)["q"]["a"])


TEAMS = Path(__file__).parents[2] / "configs" / "teams"
FIRST_ROLES = {
    "quartet": {"problem_decomposer", "planner", "executor", "verifier"},
    "octet": {"aggregator_explainer", "input_parser", "numeric_evaluator", "result_verifier"},
}


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva"])
def test_adapters_that_leave_the_base_as_it_is_load(start, tmp_path):
    write_pair(tmp_path)
    edited(init_lora_weights=start)(tmp_path / "solver")
    assert len(peft.read(tmp_path / "solver").matrices) == 4


@pytest.mark.parametrize("before", [
    "base_model.model.model.layers", "layers", "base_model.model.language_model.model.layers",
    "base_model.model.model.language_model.layers", "base_model.model._orig_mod.model.layers",
])  # fmt: skip
@pytest.mark.parametrize("name", ["", ".default", ".agent-1"])
def test_names_of_every_class_and_version_load(before, name, tmp_path):
    write_pair(tmp_path)
    expected, file = peft.read(tmp_path / "solver"), tmp_path / "solver" / peft.WEIGHTS
    tensors = {
        key.replace("base_model.model.model.layers", before).replace(".weight", f"{name}.weight"): x
        for key, x in load_file(file).items()
    }
    save_file(tensors, file)
    read = peft.read(tmp_path / "solver").matrices
    jax.tree.map(np.testing.assert_array_equal, dict(read), dict(expected.matrices))


def edited(**settings):
    def edit(folder):
        file = folder / peft.CONFIG
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))

    return edit


def with_tensor(name, shape=(8, 32)):
    def edit(folder):
        tensors = load_file(folder / peft.WEIGHTS)
        save_file(tensors | {name: np.ones(shape, np.float32)}, folder / peft.WEIGHTS)

    return edit


LAYER = "base_model.model.model.layers."
WRONG = {
    "another method": (edited(peft_type="LOHA"), "peft_type 'LOHA'"),
    "weights split in another way": (edited(use_dora=True), "use_dora True"),
    "a rank of its own somewhere": (edited(rank_pattern={"q_proj": 4}), "rank_pattern"),
    "a rank that is not its tensors'": (edited(r=4), "a matrix of rank 4"),
    "no rank": (edited(r=None), "r None is not supported"),
    "a higher rank": (None, "set --lora.rank 8"),
    "a target that is not adapted": (with_tensor(f"{LAYER}0.mlp.up_proj.lora_A.weight"), "up_proj"),
    **{
        f"a changed base: {start}": (edited(init_lora_weights=start), "a base that it has changed")
        for start in ("pissa_niter_16", "olora", "loftq")
    },
    **{
        f"not only factors: {key}": (edited(**{key: value}), key)
        for key, value in {
            "lora_bias": True, "modules_to_save": ["lm_head"], "trainable_token_indices": [3, 4],
            "layer_replication": [[0, 2], [1, 2]], "alpha_pattern": {"q_proj": 4},
            "alora_invocation_tokens": [7], "use_qalora": True, "fan_in_fan_out": True,
            "bias": "lora_only", "use_bdlora": {"nblocks": 2}, "arrow_config": {"top_k": 3},
            "kasa_config": {"beta": 1e-4}, "monteclora_config": {"num_samples": 4},
        }.items()
    },
    **{
        f"of images: {name}": (with_tensor(f"base_model.model.{name}.lora_A.weight"), "is no LoRA")
        for name in (
            "model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
            "visual.blocks.0.mlp.gate_proj", "model.audio_tower.layers.0.self_attn.q_proj",
        )
    },
    "another module": (with_tensor("base_model.model.model.embed.lora_A.weight"), "embed"),
    "a layer too many": (None, "2 layers"),
    "weights as a pickle": (lambda folder: (folder / peft.WEIGHTS).rename(
        folder / "adapter_model.bin"), "safe_serialization"),
    "a damaged file": (lambda folder: (folder / peft.WEIGHTS).write_bytes(b"xx"), "not a readable"),
    "no settings": (lambda folder: (folder / peft.CONFIG).unlink(), "adapter_config.json"),
    "settings that are no JSON": (lambda f: (f / peft.CONFIG).write_text("{"), "readable JSON"),
    "no folder": (lambda folder: shutil.rmtree(folder), "adapter 'solver'"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_an_adapter_that_does_not_fit_is_one_clear_line(what, tmp_path):
    write_pair(tmp_path)
    spoil, message = WRONG[what]
    if what == "a layer too many":
        for letter, shape in (("A", (8, 32)), ("B", (32, 8))):
            with_tensor(f"{LAYER}2.self_attn.q_proj.lora_{letter}.weight", shape)(
                tmp_path / "solver"
            )
    elif spoil is not None:
        spoil(tmp_path / "solver")
    settings = Lora(init=str(tmp_path), rank=4 if what == "a higher rank" else 8, targets=small.QV)
    team, fresh = team_and_fresh(settings)
    with pytest.raises(BadInput) as caught:
        initial(team, settings, fresh)
    assert message in str(caught.value) and "\n" not in str(caught.value)
