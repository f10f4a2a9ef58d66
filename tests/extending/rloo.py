"""RLOO, the return minus the mean of the task's other samples: --algo.name rloo:RLOO.

Source: Ahmadian et al. 2024 (arXiv 2402.14740), equation 8, with turns of the same place compared.
"""

import dataclasses

import jax.numpy as jnp

from marft_jax.learning import advantages as adv
from marft_jax.learning.algorithms import Algorithm
from marft_jax.settings.config import Algo


def leave_one_out(config, chain, values_EJ, baseline_X):
    returns_EJ, n = adv.returns_to_go(chain), config.group_size
    return adv.place_advantage(returns_EJ, chain) * n / (n - 1), returns_EJ


def importance_weighted(config, logprobs, old_logprobs, advantages):
    return -jnp.exp(logprobs - old_logprobs) * advantages


@dataclasses.dataclass(frozen=True)
class Settings(Algo):
    group_size: int = 4


RLOO = Algorithm("action", leave_one_out, importance_weighted, Settings)
