"""Files of strangers: broken, odd or made to harm, each is one clear line, and soon."""

from __future__ import annotations

import base64
import json
import pickle
import struct
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import test_gguf
import test_tokenizer
from safetensors.numpy import save_file
from test_load import SETTINGS, tensors_of

from marft_jax.config import Model
from marft_jax.envs.datasets import rows
from marft_jax.errors import BadInput
from marft_jax.extras.code import rows as code_rows
from marft_jax.formats import foreign
from marft_jax.interop import peft
from marft_jax.models import config_json
from marft_jax.models.tokenizers import tokenizer
from marft_jax.models.weights import gguf, gguf_config, load, safetensors, sources
from marft_jax.run import manifest
from marft_jax.team.team_files import load_team

DEEP, LONG = "[" * 5000 + "]" * 5000, "1" * 5001
ODD: list[Any] = [None, [], {}, [[1]], {"a": []}, "x", "", -1, 0, 1, 0.5, True, 10**30,
                  float("nan"), float("inf"), [10**12] * 3, "9" * 5000]  # fmt: skip


@pytest.fixture(autouse=True)
def soon():
    """Every case of this file within a few seconds of work: bounds come first."""
    start = time.thread_time()  # of this thread, however busy the machine is
    yield
    assert time.thread_time() - start < 15


def refused(call, *arguments) -> str:
    with pytest.raises(BadInput) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000
    return message


def harmless(call, *arguments) -> None:
    """It works, or it is bad input: nothing else."""
    try:
        call(*arguments)
    except BadInput as error:
        assert "\n" not in str(error)


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


def gguf_file(tmp_path: Path) -> gguf.GGUF:
    test_gguf.write(tmp_path / "m.gguf")
    return gguf.open_gguf(tmp_path / "m.gguf")


@pytest.mark.slow
def test_every_odd_field_of_a_gguf_file_is_named_or_harmless(tmp_path):
    file = gguf_file(tmp_path)
    keys = [*file.metadata, "llama.rope.freq_base", "llama.rope.scaling.factor",
            "llama.attention.key_length", "llama.attention.layer_norm_rms_epsilon",
            "llama.attention.sliding_window", "llama.expert_count"]  # fmt: skip
    for key in keys:
        for value in ODD:
            harmless(gguf_config.read_config, file._replace(metadata={**file.metadata, key: value}))
    metadata = test_gguf.byte_level_metadata("smollm")
    names = ["bos", "eos", "unknown", "padding", "eot"]
    keys = [*metadata, *(f"tokenizer.ggml.{name}_token_id" for name in names)]
    for at, key in enumerate(keys):  # each value at some of the keys: a tokenizer is not cheap
        for value in ODD[at % 3 :: 3]:
            harmless(tokenizer.from_gguf, {**metadata, key: value}, "m.gguf")


def test_a_gguf_file_with_any_bytes_changed_is_refused_or_harmless(tmp_path):
    test_gguf.write(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(150):
        data = bytearray(whole)
        for at in rng.integers(0, 1400, 3):
            data[at] = rng.choice([0, 1, 9, 127, 255])
        (tmp_path / "m.gguf").write_bytes(data)
        harmless(test_gguf.read, tmp_path / "m.gguf")


def header(*metadata: bytes, tensors: bytes = b"", count: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, count, len(metadata)) + b"".join(metadata) + tensors


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def test_gguf_headers_that_ask_for_too_much(tmp_path):
    nested = struct.pack("<IQ", 9, 1) * 100_000
    wide = text(b"t") + struct.pack("<I", 100_000) + b"\xff" * 800_000 + struct.pack("<IQ", 0, 0)
    for data, expected in (
        (header(text(b"k") + struct.pack("<I", 9) + nested), "GGUF"),
        (header(text(b"k") + struct.pack("<IIQ", 9, 10, 2**60)), "GGUF"),
        (header(text(b"k") + struct.pack("<IIQ", 9, 8, 2**60)), "GGUF"),
        (header(text(b"split.count") + struct.pack("<I", 8) + text(b"x")), "GGUF"),
        (header(text(b"general.alignment") + struct.pack("<II", 4, 0)), "GGUF"),
        (header(tensors=wide, count=1), "GGUF"),
    ):
        (tmp_path / "m.gguf").write_bytes(data)
        assert expected in refused(gguf.open_gguf, tmp_path / "m.gguf")
    test_gguf.write(tmp_path / "m.gguf", block_count=100_000)
    assert "block_count" in refused(test_gguf.read, tmp_path / "m.gguf")


@pytest.mark.slow
def test_a_gguf_header_larger_than_that_of_any_model_is_refused_in_little_memory(tmp_path):
    file, peak = tmp_path / "m.gguf", Peak()
    many = struct.pack("<IIQ", 9, 0, 3_000_000) + b"\1" * 3_000_000
    for data, size in (
        (header(text(b"k") + many), 0),
        (header(struct.pack("<Q", 3 << 30)), 4 << 30),  # a key of gigabytes, in a file with room
    ):
        file.write_bytes(data)
        with file.open("ab") as stream:
            stream.truncate(max(size, len(data)))  # sparse
        before = resident()
        with peak:
            assert "larger than that of any model" in refused(gguf.open_gguf, file)
        assert peak.bytes - before < 800e6


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
    peft.write(folder, factors, 8.0, "base")
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


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Peak:
    """The most memory that the process has, looked at every millisecond."""

    bytes = 0

    def __enter__(self):
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self):
        while not self.over.wait(0.001):
            self.bytes = max(self.bytes, resident())

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
