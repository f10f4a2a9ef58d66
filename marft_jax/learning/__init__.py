"""Learning: credit, packing, values, advantages, and the gradients that follow from them.

An algorithm of your own is an ``Algorithm``, named as ``--algo.name package.module:NAME``; a
normaliser is ``f(advantages_EJ, chain)``, named as ``--algo.normalize package.module:function``.
Their settings come without JAX (``settings.py``), all else when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from marft_jax.learning.advantages import NORMALIZERS as NORMALIZERS
    from marft_jax.learning.algorithms import ALGORITHMS as ALGORITHMS
    from marft_jax.learning.algorithms import Algorithm as Algorithm
    from marft_jax.learning.algorithms import find_algorithm as find_algorithm
    from marft_jax.learning.batch import Batch as Batch
    from marft_jax.learning.batch import Chain as Chain
else:
    _HOMES = dict(
        NORMALIZERS="advantages", ALGORITHMS="algorithms", Algorithm="algorithms",
        find_algorithm="algorithms", Batch="batch", Chain="batch",
    )  # fmt: skip

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'marft_jax.learning' has no attribute {name!r}")
        return getattr(importlib.import_module(f"marft_jax.learning.{_HOMES[name]}"), name)
