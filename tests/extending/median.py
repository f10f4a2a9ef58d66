"""An advantage normaliser: in units of each agent's median size, which one lucky turn cannot move.

python -m marft_jax.train --algo.normalize median:by_median
"""

import numpy as np


def by_median(advantages_EJ, chain):
    scaled_EJ = np.zeros_like(advantages_EJ)
    for agent in np.unique(chain.agent_EJ):
        own_EJ = (chain.agent_EJ == agent) & (chain.weight_EJ > 0)
        sizes = np.abs(advantages_EJ[own_EJ])
        if sizes.any():
            median = np.median(sizes[sizes > 0])
            scaled_EJ[own_EJ] = np.clip(advantages_EJ[own_EJ] / median, -3, 3)
    return scaled_EJ
