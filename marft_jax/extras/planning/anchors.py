"""Published speeds of similar work, as ratios of our bound: the range that a plan may expect.

A ratio is the published speed over the bound that ``cost`` gives for the same work on the same
chips. The README's table has the figures with their sources, read in November 2026; the tests
compute the bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from marft_jax.extras.planning.chips import TPUS

Work = Literal["training", "LoRA", "decode"]
_ENOUGH = 3  # fewest figures that make a range


class Anchor(NamedTuple):
    """A published speed, as a ratio of our bound."""

    work: Work
    chip: str
    ratio: float


ANCHORS: Sequence[Anchor] = (
    Anchor("training", "v6e", 0.4003),
    Anchor("training", "v6e", 0.3616),
    Anchor("training", "v6e", 0.3443),
    Anchor("training", "v6e", 0.4223),
    Anchor("training", "v6e", 0.4507),
    Anchor("training", "v5p", 0.6458),
    Anchor("training", "v5p", 0.6576),
    Anchor("training", "tpu7x", 0.4323),
    Anchor("training", "tpu7x", 0.2583),
    Anchor("training", "tpu7x", 0.5232),
    Anchor("training", "tpu7x", 0.5468),
    Anchor("LoRA", "h100", 0.1090),
    Anchor("LoRA", "h100", 0.1939),
    Anchor("LoRA", "h100", 0.3124),
    Anchor("LoRA", "h100", 0.1895),
    Anchor("LoRA", "h100", 0.1939),
    Anchor("LoRA", "h100", 0.1307),
    Anchor("LoRA", "h100", 0.1306),
    Anchor("LoRA", "a6000", 0.2443),
    Anchor("decode", "v5e", 0.4011),
    Anchor("decode", "v5e", 0.2157),
    Anchor("decode", "v5e", 0.5272),
    Anchor("decode", "v5e", 0.4359),
    Anchor("decode", "v6e", 0.5131),
    Anchor("decode", "v6e", 0.4387),
    Anchor("decode", "a100-40", 0.7246),
)


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
