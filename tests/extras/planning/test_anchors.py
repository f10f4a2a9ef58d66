"""Published speeds of other systems: bounds, the table of scripts, and the range of a plan."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

import pytest

from marft_jax.extras.planning import anchors, cost
from marft_jax.extras.planning.chips import GPUS, TPUS
from marft_jax.models import config_json
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.models.families import dense

_shape = functools.partial(dense, max_position=8192)
LLAMA3_8B = _shape(128256, 4096, 32, 32, 8, 128, 14336)
LLAMA3_70B = _shape(128256, 8192, 80, 64, 8, 128, 28672)
LLAMA3_405B = _shape(128256, 16384, 126, 128, 8, 128, 53248)
LLAMA2_7B = _shape(32000, 4096, 32, 32, 32, 128, 11008)
LLAMA2_70B = _shape(32000, 8192, 80, 64, 8, 128, 28672)
MISTRAL_7B = _shape(32768, 4096, 32, 32, 8, 128, 14336)
QWEN3_06B = _shape(151936, 1024, 28, 16, 8, 128, 3072)
QWEN3_4B = _shape(151936, 2560, 36, 32, 8, 128, 9728)
GEMMA_7B = _shape(256000, 3072, 28, 16, 16, 256, 24576)
SLIDING = tuple(i % 6 != 5 for i in range(48))
FULL_EVERY_4 = tuple(i % 4 != 3 for i in range(32))
OLMO3_7B = _shape(100278, 4096, 32, 32, 32, 128, 11008, window=4096, sliding=FULL_EVERY_4)
GEMMA3_12B = _shape(262208, 3840, 48, 16, 8, 256, 15360, window=1024, sliding=SLIDING)
MODELS = Path(__file__).parents[3] / "configs/models"
GEMMA4_E4B, GEMMA4_26B, QWEN3_30B = (
    config_json.read_config(json.loads((MODELS / name / "config.json").read_bytes()), name)
    for name in ("gemma-4-e4b", "gemma-4-26b-a4b", "qwen3-30b-a3b")
)
PEAKS = {name: (c.flops, c.bandwidth) for name, c in (TPUS | GPUS).items()}
PEAKS |= {"a6000": (155e12, 768e9), "a100-40": (312e12, 1.555e12)}


class Figure(NamedTuple):
    """A published speed.

    Attributes:
        measured: tokens per second of all chips.
        sequence: training: length of a row, 0 if unknown (attention is then left out); decode: mean
            length of the context.
        slots: sequences that are decoded together.
        bytes: bytes of a number in weights and cache.
    """

    work: str
    name: str
    chip: str
    chips: int
    measured: float
    model: DecoderConfig
    sequence: int = 0
    slots: int = 0
    bytes: int = 2

    @property
    def bound(self) -> float:
        """Upper bound of tokens per second."""
        flops, bandwidth = (self.chips * limit for limit in PEAKS[self.chip])
        if self.work == "decode":
            return self.slots * bandwidth / step_bytes(self)
        return flops / token_flops(self)


def step_bytes(f: Figure) -> float:
    m = f.model
    weights = cost.block_weights(m) + m.vocab_size * m.d_model
    return f.bytes * (weights + f.slots * cost.cache_entries(m, f.sequence))


def token_flops(f: Figure) -> float:
    """All weights are trained, or adapters of rank 16; nothing is recomputed."""
    m, vocabulary = f.model, 2 * f.model.vocab_size * f.model.d_model
    forward = cost.forward_flops(m, 1, f.sequence / 2)
    if f.work == "training":
        return 3 * (forward + vocabulary)
    attention = forward - cost.forward_flops(m, 1, 0)
    every = ["all-linear", "experts"]
    lora = cost.forward_flops(m, 1, 0, 16, every) - cost.forward_flops(m, 1, 0)
    return 2 * forward + attention + 3 * lora + 2 * vocabulary


FIGURES = (
    Figure("training", "Llama3.1-8B", "v6e", 8, 8 * 7139, LLAMA3_8B, 8192),
    Figure("training", "Mistral-7B", "v6e", 8, 8 * 7777, MISTRAL_7B),
    Figure("training", "Gemma3-12B", "v6e", 256, 256 * 4478, GEMMA3_12B),
    Figure("training", "Llama2-70B", "v6e", 256, 256 * 905, LLAMA2_70B, 4096),
    Figure("training", "Llama3.1-70B", "v6e", 32, 32 * 921, LLAMA3_70B, 8192),
    Figure("training", "Llama2-70B", "v5p", 512, 512 * 692, LLAMA2_70B, 4096),
    Figure("training", "Llama3.1-405B", "v5p", 512, 512 * 124.6, LLAMA3_405B),
    Figure("training", "Gemma4-E4B", "tpu7x", 128, 64 * 33755.24, GEMMA4_E4B, 8192),
    Figure("training", "Gemma4-26B-A4B", "tpu7x", 128, 64 * 23707.14, GEMMA4_26B, 4096),
    Figure("training", "Llama3.1-70B", "tpu7x", 128, 64 * 2686.98, LLAMA3_70B, 8192),
    Figure("training", "Llama3.1-405B", "tpu7x", 512, 256 * 499.77, LLAMA3_405B, 8192),
    Figure("LoRA", "Qwen3-0.6B", "h100", 1, 13340, QWEN3_06B, 16384),
    Figure("LoRA", "Qwen3-4B", "h100", 1, 6230, QWEN3_4B, 16384),
    Figure("LoRA", "Qwen3-4B", "h100", 1, 4160, QWEN3_4B, 65536),
    Figure("LoRA", "Qwen3-4B", "h100", 8, 48700, QWEN3_4B, 16384),
    Figure("LoRA", "OLMo-3-7B", "h100", 1, 5352, OLMO3_7B, 16384),
    Figure("LoRA", "Qwen3-30B-A3B", "h100", 4, 16279, QWEN3_30B, 16384),
    Figure("LoRA", "Qwen3-30B-A3B", "h100", 8, 32529, QWEN3_30B, 16384),
    Figure("LoRA", "Qwen3-4B", "a6000", 1, 1230, QWEN3_4B, 16384),
    Figure("decode", "Llama3-8B", "v5e", 8, 8249, LLAMA3_8B, 1536, 128),
    Figure("decode", "Llama3-8B, int8", "v5e", 8, 10873, LLAMA3_8B, 1536, 256, 1),
    Figure("decode", "Llama2-7B", "v5e", 8, 3663, LLAMA2_7B, 1536, 96),
    Figure("decode", "Gemma-7B", "v5e", 8, 3236, GEMMA_7B, 1536, 96),
    Figure("decode", "Llama3.3-70B", "v6e", 8, 64 / 25.35e-3, LLAMA3_70B, 1500, 64),
    Figure("decode", "Llama3.3-70B", "v6e", 8, 128 / 35.12e-3, LLAMA3_70B, 1500, 128),
    Figure("decode", "Llama3.1-8B", "a100-40", 1, 75, LLAMA3_8B, 100, 1),
)


def test_each_ratio_is_that_of_a_published_figure_and_our_bound():
    ratios = [(f.work, f.chip, round(f.measured / f.bound, 4)) for f in FIGURES]
    assert ratios == [*anchors.ANCHORS]
    assert all(0.1 < ratio < 0.8 for _, _, ratio in ratios)  # none beats the bound


def test_the_figures_of_scripts_have_the_table_of_published_figures(repository):
    text = (repository / "scripts/README.md").read_text(encoding="utf-8")
    for f in FIGURES:
        what = f"{f.work} | {f.name}"
        [row] = [x for x in text.splitlines() if what in x and f"{f.measured:,.0f} |" in x]
        assert f" {f.bound:,.0f} | {f.measured / f.bound:.2f} |" in row


def test_a_range_is_of_the_chip_or_of_its_maker():
    ratios = {a.ratio for a in anchors.ANCHORS if a.work == "LoRA" and a.chip == "h100"}
    assert anchors.expected("LoRA", "h100") == (1 / max(ratios), 1 / min(ratios))
    assert anchors.expected("LoRA", "rtx4090") == anchors.expected("LoRA", "h100")
    assert anchors.expected("LoRA", "v5e") == anchors.expected("training", "v5p")
    low, high = anchors.expected("decode", "h100")
    assert 1 < low < high < 5


@pytest.mark.parametrize("work", ["training", "LoRA", "decode"])
def test_every_chip_has_a_range(work):
    for chip in TPUS | GPUS:
        low, high = anchors.expected(work, chip)
        assert 1 < low <= high < 10
