"""Published speeds of similar work, as ratios of our bound: the range that a plan may expect.

A ratio is the published speed over the bound that ``cost`` gives for the same work on the same
chips. The table of ``scripts/README.md`` has the figures with their sources, read in November 2026;
the tests compute the bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from marft_jax.extras.planning.chips import TPUS

Work = Literal["training", "LoRA", "decode"]
_ENOUGH = 3  # fewest figures that make a range


class Anchor(NamedTuple):
    """A published speed, as a ratio of our bound."""

    work: Work
    chip: str
    ratio: float


_RATIOS: Mapping[tuple[Work, str], Sequence[float]] = {
    ("training", "v6e"): (0.4003, 0.3616, 0.3443, 0.4223, 0.4507),
    ("training", "v5p"): (0.6458, 0.6576),
    ("training", "tpu7x"): (0.4323, 0.2583, 0.5232, 0.5468),
    ("LoRA", "h100"): (0.1090, 0.1939, 0.3124, 0.1895, 0.1939, 0.1307, 0.1306),
    ("LoRA", "a6000"): (0.2443,),
    ("decode", "v5e"): (0.4011, 0.2157, 0.5272, 0.4359),
    ("decode", "v6e"): (0.5131, 0.4387),
    ("decode", "a100-40"): (0.7246,),
}
ANCHORS = [Anchor(*what, ratio) for what, ratios in _RATIOS.items() for ratio in ratios]


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
