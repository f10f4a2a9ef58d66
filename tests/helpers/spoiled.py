"""An algorithm whose advantages are no numbers in a step in which anything was paid 77."""

from __future__ import annotations

import numpy as np

from marft_jax.learning.algorithms import ALGORITHMS


def _advantages(config, chain, values_EJ, baseline_P):
    both = ALGORITHMS["appo"].advantages(config, chain, values_EJ, baseline_P)
    return tuple(np.where(chain.rewards_EJ.max() == 77, np.nan, x_EJ) for x_EJ in both)


SPOILED = ALGORITHMS["appo"]._replace(advantages=_advantages)
