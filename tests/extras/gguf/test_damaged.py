"""GGUF files of strangers: broken, odd or made to harm, each is one clear line, and soon."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import numpy as np
import pytest
import test_gguf
from strangers import ODD, Peak, harmless, refused, resident

from marft_jax.extras.gguf import config, tensors, tokenizer


@pytest.fixture(autouse=True)
def soon():
    """Every case of this file within a few seconds of work: bounds come first."""
    start = time.thread_time()  # of this thread, however busy the machine is
    yield
    assert time.thread_time() - start < 60


def gguf_file(tmp_path: Path) -> tensors.GGUF:
    test_gguf.write(tmp_path / "m.gguf")
    return tensors.open_gguf(tmp_path / "m.gguf")


@pytest.mark.slow
def test_every_odd_field_of_a_gguf_file_is_named_or_harmless(tmp_path):
    file = gguf_file(tmp_path)
    keys = [*file.metadata, "llama.rope.freq_base", "llama.rope.scaling.factor",
            "llama.attention.key_length", "llama.attention.layer_norm_rms_epsilon",
            "llama.attention.sliding_window", "llama.expert_count"]  # fmt: skip
    for key in keys:
        for value in ODD:
            harmless(config.read_config, file._replace(metadata={**file.metadata, key: value}))
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
        assert expected in refused(tensors.open_gguf, tmp_path / "m.gguf")
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
            assert "larger than that of any model" in refused(tensors.open_gguf, file)
        assert peak.bytes - before < 800e6
