"""Learning: credit, packing, values, advantages, and the gradients that follow from them.

An algorithm of your own is an ``Algorithm``, named as ``--algo.name package.module:NAME``; a
normaliser is ``f(advantages_EJ, chain)``, named as ``--algo.normalize package.module:function``.
"""

from marft_jax.learning.advantages import NORMALIZERS
from marft_jax.learning.algorithms import ALGORITHMS, Algorithm, find_algorithm, settle
from marft_jax.learning.batch import Batch, Chain

__all__ = [
    "ALGORITHMS",
    "NORMALIZERS",
    "Algorithm",
    "Batch",
    "Chain",
    "find_algorithm",
    "settle",
]
