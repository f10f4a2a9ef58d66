"""Published speeds of similar work, as ratios of our bound: the range that a plan may expect.

A ratio is the published speed over the bound that ``cost`` gives for the same work on the same
chips. A ratio above 1 would show an error of the bound. Read in November 2026; the README's table
has the sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from marft_jax.config import TARGETS
from marft_jax.extras.planning import cost
from marft_jax.extras.planning.chips import GPUS, TPUS
from marft_jax.models.decoder import DecoderConfig

Work = Literal["training", "LoRA", "decode"]
_ENOUGH = 3  # fewest figures that make a range


def _model(
    vocab: int, width: int, layers: int, heads: int, kv: int, head: int, mlp: int, **more: int
) -> DecoderConfig:
    window = more.get("window", 0)
    sliding = tuple(bool(window) and i % 6 != 5 for i in range(layers))
    return DecoderConfig(
        vocab, width, layers, heads, kv, head, mlp, 8192, window=window, sliding=sliding
    )


_LLAMA3_8B = _model(128256, 4096, 32, 32, 8, 128, 14336)
_LLAMA3_70B = _model(128256, 8192, 80, 64, 8, 128, 28672)
_LLAMA2_70B = _model(32000, 8192, 80, 64, 8, 128, 28672)
_QWEN3_4B = _model(151936, 2560, 36, 32, 8, 128, 9728)
_PEAKS = {name: (c.flops, c.bandwidth) for name, c in TPUS.items()}
_PEAKS |= {name: (g.flops, g.bandwidth) for name, g in GPUS.items()}
_PEAKS |= {"a6000": (155e12, 768e9), "a100-40": (312e12, 1.555e12)}


class Anchor(NamedTuple):
    """A published figure.

    Attributes:
        measured: tokens per second of all chips.
        sequence: training: length of a row, 0 if unknown (attention is then left out); decode: mean
            length of the context.
        slots: sequences that are decoded together.
        bytes: bytes of a number in weights and cache.
    """

    work: Work
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
        flops, bandwidth = (self.chips * limit for limit in _PEAKS[self.chip])
        if self.work == "decode":
            return self.slots * bandwidth / _step_bytes(self)
        return flops / _token_flops(self)

    @property
    def ratio(self) -> float:
        return self.measured / self.bound


def _step_bytes(a: Anchor) -> float:
    m = a.model
    weights = cost.block_weights(m) + m.vocab_size * m.d_model
    entries = 2 * m.n_layers * m.n_kv_heads * m.head_dim * a.sequence
    return a.bytes * (weights + a.slots * entries)


def _token_flops(a: Anchor) -> float:
    """FLOPs per token: all weights are trained, or adapters of rank 16; nothing is recomputed."""
    m, vocabulary = a.model, 2 * a.model.vocab_size * a.model.d_model
    forward = cost.forward_flops(m, 1, a.sequence / 2)
    if a.work == "training":
        return 3 * (forward + vocabulary)
    attention = forward - cost.forward_flops(m, 1, 0)
    lora = cost.forward_flops(m, 1, 0, 16, TARGETS) - cost.forward_flops(m, 1, 0)
    return 2 * forward + attention + 3 * lora + 2 * vocabulary


ANCHORS: Sequence[Anchor] = (
    Anchor("training", "Llama3.1-8B", "v6e", 8, 8 * 7139, _LLAMA3_8B, 8192),
    Anchor("training", "Mistral-7B", "v6e", 8, 8 * 7777,
           _model(32768, 4096, 32, 32, 8, 128, 14336)),
    Anchor("training", "Gemma3-12B", "v6e", 256, 256 * 4478,
           _model(262208, 3840, 48, 16, 8, 256, 15360, window=1024)),
    Anchor("training", "Llama2-70B", "v6e", 256, 256 * 905, _LLAMA2_70B, 4096),
    Anchor("training", "Llama3.1-70B", "v6e", 32, 32 * 921, _LLAMA3_70B, 8192),
    Anchor("training", "Llama2-70B", "v5p", 512, 512 * 692, _LLAMA2_70B, 4096),
    Anchor("training", "Llama3.1-405B", "v5p", 512, 512 * 124.6,
           _model(128256, 16384, 126, 128, 8, 128, 53248)),
    Anchor("LoRA", "Qwen3-0.6B", "h100", 1, 13340,
           _model(151936, 1024, 28, 16, 8, 128, 3072), 16384),
    Anchor("LoRA", "Qwen3-4B", "h100", 1, 6230, _QWEN3_4B, 16384),
    Anchor("LoRA", "Qwen3-4B", "h100", 1, 4160, _QWEN3_4B, 65536),
    Anchor("LoRA", "Qwen3-4B", "h100", 8, 48700, _QWEN3_4B, 16384),
    Anchor("LoRA", "Qwen3-4B", "a6000", 1, 1230, _QWEN3_4B, 16384),
    Anchor("decode", "Llama3-8B", "v5e", 8, 8249, _LLAMA3_8B, 1536, 128),
    Anchor("decode", "Llama3-8B, int8", "v5e", 8, 10873, _LLAMA3_8B, 1536, 256, 1),
    Anchor("decode", "Llama2-7B", "v5e", 8, 3663,
           _model(32000, 4096, 32, 32, 32, 128, 11008), 1536, 96),
    Anchor("decode", "Gemma-7B", "v5e", 8, 3236,
           _model(256000, 3072, 28, 16, 16, 256, 24576), 1536, 96),
    Anchor("decode", "Llama3.3-70B", "v6e", 8, 64 / 25.35e-3, _LLAMA3_70B, 1500, 64),
    Anchor("decode", "Llama3.3-70B", "v6e", 8, 128 / 35.12e-3, _LLAMA3_70B, 1500, 128),
    Anchor("decode", "Llama3.1-8B", "a100-40", 1, 75, _LLAMA3_8B, 100, 1),
)  # fmt: skip


def expected(work: Work, chip: str) -> tuple[float, float]:
    """Returns time over bound of published systems for a kind of work: the best, the worst.

    Uses figures of the chip if there are at least three, else of its maker, else all.
    """
    every = [a for a in ANCHORS if a.work == work or {a.work, work} == {"LoRA", "training"}]
    own = [a for a in every if a.chip.partition("-")[0] == chip]
    makers = [a for a in every if (a.chip in TPUS) == (chip in TPUS)]
    found = next(some for some in (own, makers, every) if len(some) >= _ENOUGH)
    ratios = [a.ratio for a in found]
    return 1 / max(ratios), 1 / min(ratios)
