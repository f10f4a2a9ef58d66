"""Estimates from rewards and values: the part of a training step that no gradient passes.

These are a few numbers for each decision, so they are computed on the host, in NumPy and float64,
in the order in which the paper defines them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from marft_jax.config import Algo
from marft_jax.learning import advantages as adv
from marft_jax.learning import losses
from marft_jax.learning.algorithms import Algorithm, normalized_advantages
from marft_jax.learning.batch import Batch, Chain, Rows
from marft_jax.learning.state import Moving

_SCALE_DECAY = 0.9  # share of the values' scale that stays in each step


class Loss(NamedTuple):
    """Weights of the decisions in the policy loss, which is Σ weight·loss / Σ count per adapter."""

    weight_EJ: np.ndarray
    count_EJ: np.ndarray
    entropy_EJ: np.ndarray  # coefficient of the entropy bonus


class Estimates(NamedTuple):
    """Estimates of each decision, in acting order."""

    advantages_EJ: np.ndarray  # as the losses use them
    targets_EJ: np.ndarray  # what the critic learns: returns, divided by the values' scale
    loss: Loss | None  # how the decisions' losses are averaged, where not all count the same
    values_EJ: np.ndarray | None  # the critic's, before the update; None without one
    baseline: Moving  # the moved averages
    values_scale: Moving
    report: dict[str, np.ndarray | float]  # metrics


def estimate(
    algo: Algo,
    algorithm: Algorithm,
    agents: int,
    batch: Batch,
    values_UBX: np.ndarray | None,
    reference_UBA: np.ndarray | None,
    baseline: Moving,
    values_scale: Moving,
    rounding: float = adv.ROUNDING,
) -> Estimates:
    """Computes KL, advantages and returns of every decision.

    Args:
        values_UBX: the critic's outputs, values without their scale.
        baseline, values_scale: the averages so far, as host arrays.
        rounding: of a log-prob, as a part of its size; depends on the dtype of the base.
    """
    chain, report = batch.chain, dict[str, np.ndarray | float]()
    if reference_UBA is not None:
        behaviour_UBA = batch.rows.behaviour_BA
        kl_UBA = _reference_kl(behaviour_UBA, reference_UBA, batch.rows, algo.estimator)
        report["ref_kl"] = by_agent(kl_UBA, batch.rows, agents)
        if algo.kl_in == "reward":
            # before the first update of an adapter, its KL is a rounding of log-probs
            moved_UBA = behaviour_UBA + rounding * (1 + abs(behaviour_UBA) + abs(reference_UBA))
            slack_UBA = _reference_kl(moved_UBA, reference_UBA, batch.rows, algo.estimator)
            slack_UBA -= kl_UBA
            kl_EJ, slack_EJ = (
                to_chain(x if algorithm.level == "token" else per_turn(x, batch.rows), chain)
                for x in (kl_UBA, np.square(slack_UBA))
            )
            size_E = algo.kl_coef * np.sqrt(slack_EJ.sum(1)) / adv.ROUNDING
            kl_EJ = algo.kl_coef * kl_EJ
            chain = chain._replace(
                rewards_EJ=chain.rewards_EJ - kl_EJ, kl_EJ=kl_EJ, size_E=chain.size_E + size_E
            )
    values_EJ = None
    if values_UBX is not None:
        largest = np.abs(adv.returns_to_go(chain)).max()
        largest *= not adv.is_rounding(largest, chain.size_E.max())
        values_scale = values_scale.moved(largest, largest, _SCALE_DECAY)
        values_EJ = to_chain(values_UBX, chain) * values_scale.mean
    known_EJ = np.zeros_like(chain.rewards_EJ) if values_EJ is None else values_EJ
    with np.errstate(invalid="ignore", over="ignore"):  # the guard looks for what is not finite
        advantages_EJ, returns_EJ = normalized_advantages(
            algo, algorithm, chain, known_EJ, baseline.mean
        )
    if algo.branches:
        for what, x_EJ in (("advantage", abs(advantages_EJ)), ("compared", advantages_EJ != 0)):
            report[what] = adv.role_means(x_EJ, chain, chain.agent_EJ, agents)[0]
    if algo.baseline in ("moving", "role"):
        labels_EJ = adv.roles(chain, algo.baseline)
        means = adv.role_means(returns_EJ, chain, labels_EJ, len(baseline.mean))
        baseline = baseline.moved(*means, algo.baseline_decay)
    if values_EJ is not None:
        explained = _explained(values_EJ, returns_EJ, chain.mask_EJ)
        report["critic/explained_variance"] = explained if adv.earns_differ(chain) else math.nan
    targets_EJ = returns_EJ / (values_scale.mean or 1)
    loss = _loss(algo, batch, agents)
    return Estimates(advantages_EJ, targets_EJ, loss, values_EJ, baseline, values_scale, report)


def _reference_kl(
    logprobs_UBA: np.ndarray, reference_UBA: np.ndarray, rows: Rows[np.ndarray], estimator: str
) -> np.ndarray:
    """KL to the reference at each action token; 0 for padding."""
    x, reference = jnp.asarray(logprobs_UBA), jnp.asarray(reference_UBA)
    return np.asarray(losses.reference_kl(x, reference, estimator)) * rows.mask_BA


def _loss(algo: Algo, batch: Batch, agents: int) -> Loss | None:
    """Chooses the weights that the settings ask for; none where every decision weighs one.

    ``loss_mean`` ``sequence`` is GRPO's (Shao et al. 2024, equation 3), a number N that of Dr. GRPO
    (arXiv 2503.20783): Σ loss / (N · actions). ``mask_truncated`` is overlong filtering (DAPO,
    arXiv 2503.14476, section 3.4). With ``entropy_target`` the bonus acts on agents whose entropy
    is below it (as in Skywork-OR1, arXiv 2505.22312, with a coefficient that stays); it
    is estimated as the mean of −log π over the sampled tokens.
    """
    if (algo.loss_mean, algo.mask_truncated, algo.entropy_target) == ("token", False, None):
        return None
    chain = batch.chain
    one_EJ = np.where(chain.cut_EJ > 0, 0.0, 1.0) if algo.mask_truncated else chain.mask_EJ
    weight_EJ = count_EJ = one_EJ
    if algo.loss_mean != "token":
        count_EJ = one_EJ * chain.weight_EJ
        weight_EJ = count_EJ if algo.loss_mean == "sequence" else one_EJ / algo.loss_mean
    coef_P = np.full(agents, algo.entropy_coef)
    if algo.entropy_target is not None:
        entropy_P = by_agent(-batch.rows.behaviour_BA, batch.rows, agents)
        coef_P = np.where(entropy_P < algo.entropy_target, coef_P, 0)
    return Loss(weight_EJ, count_EJ, coef_P[chain.agent_EJ])


def to_chain(x_UBX: np.ndarray, chain: Chain) -> np.ndarray:
    """Numbers of decisions in acting order."""
    return x_UBX.reshape(-1).astype(np.float64)[chain.flat_EJ] * chain.mask_EJ


def to_rows(x_EJ: np.ndarray, chain: Chain) -> np.ndarray:
    """Numbers of decisions where they stand in the rows; 0 for padding."""
    x_UBX = np.zeros(chain.shape_UBX, np.float32)
    real = chain.mask_EJ > 0
    x_UBX.reshape(-1)[chain.flat_EJ[real]] = x_EJ[real]
    return x_UBX


def per_turn(x_UBA: np.ndarray, rows: Rows[np.ndarray]) -> np.ndarray:
    """Sums over the tokens of each turn."""
    sums_UBK = np.zeros(rows.turn_mask_BK.shape)
    u, b = np.ogrid[: len(x_UBA), : x_UBA.shape[1]]
    np.add.at(sums_UBK, (u[..., None], b[..., None], rows.turn_BA), x_UBA * rows.mask_BA)
    return sums_UBK


def by_agent(x_UBA: np.ndarray, rows: Rows[np.ndarray], agents: int) -> np.ndarray:
    """Means over each agent's action tokens, ``[P]``."""
    agent_UBA = np.take_along_axis(rows.agent_BK, rows.turn_BA, axis=-1).ravel()
    total_P = np.bincount(agent_UBA, (x_UBA * rows.mask_BA).ravel(), agents)
    return total_P / np.maximum(np.bincount(agent_UBA, rows.mask_BA.ravel(), agents), 1)


def _explained(values: np.ndarray, returns: np.ndarray, mask: np.ndarray) -> float:
    """1 − Var(returns − values) / Var(returns) over the masked entries."""
    real = mask > 0
    return float(1 - np.var((returns - values)[real]) / max(np.var(returns[real]), 1e-8))
