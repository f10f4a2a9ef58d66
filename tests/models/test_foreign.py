"""Files of strangers: broken, odd or made to harm, each is one clear line, and soon."""

from __future__ import annotations

import base64
import json
import pickle
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import test_tokenizer
from safetensors.numpy import save_file
from strangers import ODD, Peak, harmless, refused, resident
from test_load import SETTINGS, tensors_of

from marft_jax.envs.datasets import rows
from marft_jax.extras.code import rows as code_rows
from marft_jax.formats import foreign
from marft_jax.interop import peft
from marft_jax.models import config_json
from marft_jax.models.tokenizers import tokenizer
from marft_jax.models.weights import load, safetensors, sources
from marft_jax.run import manifest
from marft_jax.settings.config import Model
from marft_jax.team.team_files import load_team

DEEP, LONG = "[" * 5000 + "]" * 5000, "1" * 5001


@pytest.fixture(autouse=True)
def soon():
    """Every case of this file within a few seconds of work: bounds come first."""
    start = time.thread_time()  # of this thread, however busy the machine is
    yield
    assert time.thread_time() - start < 15


@pytest.mark.parametrize("text", [DEEP, LONG, "[1,", "\udc80", '{"a":' * 200 + "1" + "}" * 200])
def test_json_beyond_its_bounds_is_a_value_error(text):
    with pytest.raises(ValueError):
        foreign.loads(text)


def test_ordinary_json_is_what_it_was():
    value = {"a": [{"b": [[[1.5, None, True]]]}] * 60}
    assert foreign.loads(json.dumps(value)) == value


@pytest.mark.parametrize("text", [DEEP, f'{{"r": {LONG}}}', "{", "[]", "\udc80"])
def test_settings_of_any_reader_that_are_no_settings(text, tmp_path):
    data = text.encode("utf-8", "surrogateescape")
    for name in ("config.json", "adapter_config.json", "team.json", "rows.json", "rows.jsonl",
                 manifest.MANIFEST, "tokenizer_config.json",
                 "model.safetensors.index.json"):  # fmt: skip
        (tmp_path / name).write_bytes(data)
    (tmp_path / "tokenizer.json").write_text("{}")
    refused(sources.decoder_config, str(tmp_path))
    refused(peft.read, tmp_path)
    refused(tokenizer.from_directory, tmp_path)
    refused(safetensors.weight_files, tmp_path)
    refused(load_team, str(tmp_path / "team.json"))
    assert manifest.damage(tmp_path)
    if text != "[]":
        refused(list, rows.rows_of(str(tmp_path / "rows.json")))
        harmless(list, rows.rows_of(str(tmp_path / "rows.jsonl")))


def test_a_name_with_a_nul_in_it_is_refused(tmp_path):
    refused(list, rows.rows_of("a\0b.jsonl"))
    refused(load_team, "a\0b.yaml")
    refused(load.load_base, Model(base="a\0b"), jnp.asarray)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a\\u0000b"}}')
    refused(safetensors.weight_files, tmp_path)


def test_every_odd_setting_of_a_model_is_named_or_harmless():
    more = {key: 1 for key in ("head_dim", "rms_norm_eps", "rope_theta", "sliding_window",
                               "layer_types", "rope_scaling", "rope_parameters", "model_type",
                               "attention_bias", "max_position_embeddings")}  # fmt: skip
    for key in {**SETTINGS, **more}:
        for value in ODD:
            harmless(config_json.read_config, {**SETTINGS, key: value}, "config.json")
    for layers in (10**5, 10**12):
        settings = {**SETTINGS, "num_hidden_layers": layers}
        assert "num_hidden_layers" in refused(config_json.read_config, settings, "config.json")


def tensor_file(file: Path, name: str, kind: str, shape: list[int], size: int) -> None:
    entry = {name: {"dtype": kind, "shape": shape, "data_offsets": [0, size]}}
    head = json.dumps(entry).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + b"\0" * size)


@pytest.mark.parametrize(
    ("kind", "shape", "size"),
    [("F8_E4M3", [16], 16), ("F8_E5M2", [16], 16), ("F4", [16], 8), ("F6_E2M3", [16], 12),
     ("C64", [16], 128), ("F32", [], 4), ("F32", [0], 0), ("F32", [1, 16], 64)],
)  # fmt: skip
def test_odd_safetensors_are_named(kind, shape, size, tmp_path):
    stored = tensors_of(SETTINGS)
    norm = stored.pop("model.norm.weight")
    save_file(stored, tmp_path / "a.safetensors")
    tensor_file(tmp_path / "b.safetensors", "model.norm.weight", kind, shape, size)
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    test_tokenizer.fast(test_tokenizer.TURNS, eos_token="</s>").save_pretrained(tmp_path)
    assert norm.shape == (16,)
    place = lambda _, x: jnp.asarray(x)  # noqa: E731
    assert "b.safetensors" in refused(load.load_base, Model(base=str(tmp_path)), place)
    folder = adapter(tmp_path / "adapter")
    name = f"{peft._PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
    tensor_file(folder / peft.WEIGHTS, name, kind, shape, size)
    assert peft.WEIGHTS in refused(peft.read, folder)


def adapter(folder: Path, **settings: Any) -> Path:
    factors = {"q": {"a": np.ones((2, 16, 4), np.float32), "b": np.ones((2, 4, 16), np.float32)}}
    peft.write(folder, factors, 8.0, "base", "model", lambda target: range(2), {})
    file = folder / peft.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


def test_odd_settings_of_an_adapter(tmp_path):
    for key in ("r", "lora_alpha", "use_rslora", "target_modules", "bias", "rank_pattern"):
        for value in ODD:
            harmless(peft.read, adapter(tmp_path, **{key: value}))
    for value in (float("nan"), float("inf"), -float("inf"), 10**400, True, "16", None):
        message = refused(peft.read, adapter(tmp_path, lora_alpha=value))
        assert "lora_alpha" in message


def test_hidden_tests_whose_pickle_asks_for_gigabytes_are_refused():
    program = pickle.dumps("[]", 2)[:-1] + b"r" + struct.pack("<I", 1 << 29) + b"."
    packed = base64.b64encode(zlib.compress(program)).decode()
    with (peak := Peak()):
        wrong = code_rows.as_task({"problem": "p", "private_test_cases": packed})
    assert "in place 536870912" in wrong and peak.bytes < resident() + 200e6
