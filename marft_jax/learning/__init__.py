"""Learning: credit, packing, values, advantages, and the gradients that follow from them.

An algorithm of your own is an ``Algorithm``, named as ``--algo.name package.module:NAME``; a
normaliser is ``f(advantages_EJ, chain)``, named as ``--algo.normalize package.module:function``.
Their settings come without JAX (``settings.py``), all else when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from marft_jax.learning.algorithms import ALGORITHMS, Algorithm, find_algorithm
    from marft_jax.learning.batch import Batch
    from marft_jax.learning.chain import Chain
    from marft_jax.learning.normalizers import NORMALIZERS

_HOMES = {
    "algorithms": ("ALGORITHMS", "Algorithm", "find_algorithm"),
    "batch": ("Batch",),
    "chain": ("Chain",),
    "normalizers": ("NORMALIZERS",),
}  # fmt: skip
__all__ = ["ALGORITHMS", "NORMALIZERS", "Algorithm", "Batch", "Chain", "find_algorithm"]


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"marft_jax.learning.{home}"), name)
    raise AttributeError(f"module 'marft_jax.learning' has no attribute {name!r}")
