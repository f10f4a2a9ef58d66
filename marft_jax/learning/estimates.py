"""Estimates that no gradient passes: KL, advantages, returns and weights of each decision.

These are a few numbers for each decision, so they are computed on the host, in NumPy and float64,
in the order in which the paper defines them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from marft_jax.config import Algo, Branching, Update
from marft_jax.learning.advantages import returns_to_go, reward_sizes
from marft_jax.learning.algorithms import Algorithm, normalized_advantages
from marft_jax.learning.batch import Batch
from marft_jax.learning.cells import SAME
from marft_jax.learning.chain import Chain
from marft_jax.learning.moving import label_means, roles
from marft_jax.learning.normalizers import earns_differ
from marft_jax.learning.settings import Clipped, Distill, Reinforce, TokenLevel
from marft_jax.learning.state import EMA
from marft_jax.policy import losses
from marft_jax.policy.rows import Rows, means_by_agent, sums_by_turn

_SCALE_DECAY = 0.9  # share of the values' scale that stays in each step


class Estimates(NamedTuple):
    """Estimates of each decision, in acting order.

    Attributes:
        advantages_EJ: as the losses use them.
        targets_EJ: what the critic learns: returns divided by the values' scale.
        inputs: what the objective reads of each decision, by name: see ``objective.Inputs``.
        values_EJ: the critic's values before the update; None without a critic.
        baseline, values_scale: the moving averages after this step.
        report: metrics.
    """

    advantages_EJ: np.ndarray
    targets_EJ: np.ndarray
    inputs: dict[str, np.ndarray]
    values_EJ: np.ndarray | None
    baseline: EMA
    values_scale: EMA
    report: dict[str, np.ndarray | float]


def estimate(
    algo: Update,
    algorithm: Algorithm,
    agents: int,
    batch: Batch,
    values: Mapping[str, np.ndarray] | None,
    reference: Mapping[str, np.ndarray] | None,
    baseline: EMA,
    values_scale: EMA,
    rounding: float = SAME,
    taught_EJ: np.ndarray | None = None,
) -> Estimates:
    """Computes KL, advantages and returns of every decision.

    Args:
        values: the critic's outputs on each base, ``[U, B, X]``: values divided by their scale.
        reference: log-probs of the reference policy in each base's rows, ``[U, B, A]``; None
            without a KL.
        baseline, values_scale: the moving averages so far, on the host.
        rounding: of a log-prob, relative to its size; depends on the dtype of the base.
        taught_EJ: advantages from teachers (``teaching.py``), added to those of the rewards.
    """
    chain, report, own = batch.chain, dict[str, np.ndarray | float](), algo.part(Algo)
    if reference is not None:
        kls = {
            base: _reference_kl(batch.rows[base].actions.behaviour_BA, known, batch.rows[base], own)
            for base, known in reference.items()
        }
        report["ref_kl"] = means_by_agent(kls, batch.rows, agents)
        if own.kl_in == "reward":
            chain = _charge_kl(own, algorithm, batch, kls, reference, rounding)
    values_EJ = None
    if values is not None:
        returns_EJ = np.abs(returns_to_go(chain))
        largest = returns_EJ.max(where=np.isfinite(returns_EJ), initial=0.0)
        largest *= largest > SAME * reward_sizes(chain).max()
        values_scale = values_scale.update(largest, largest, _SCALE_DECAY)
        values_EJ = batch.gather(values) * values_scale.mean
    known_EJ = np.zeros_like(chain.rewards_EJ) if values_EJ is None else values_EJ
    with np.errstate(invalid="ignore", over="ignore"):  # the guard looks for what is not finite
        advantages_EJ, returns_EJ = normalized_advantages(
            algo, algorithm, chain, known_EJ, baseline.mean
        )
    if taught_EJ is not None and isinstance(algo, Distill):
        advantages_EJ = algo.reward_coef * advantages_EJ + algo.teacher_coef * taught_EJ
        tokens = chain._replace(weight_EJ=chain.mask_EJ)
        report["teacher_kl"] = label_means(-taught_EJ, tokens, chain.agent_EJ, agents)[0]
    if algo.part(Branching).branches:
        for name, x_EJ in (("advantage", abs(advantages_EJ)), ("compared", advantages_EJ != 0)):
            report[name] = label_means(x_EJ, chain, chain.agent_EJ, agents)[0]
    if (moving := algo.part(Reinforce)).baseline != "group":
        labels_EJ = roles(chain, moving.baseline)
        means = label_means(returns_EJ, chain, labels_EJ, len(baseline.mean))
        baseline = baseline.update(*means, moving.baseline_decay)
    if values_EJ is not None:
        explained = _explained(values_EJ, returns_EJ, chain.mask_EJ)
        report["critic/explained_variance"] = explained if earns_differ(chain) else math.nan
    return Estimates(
        advantages_EJ,
        targets_EJ=returns_EJ / (values_scale.mean or 1),
        inputs={"advantages": advantages_EJ, **_loss_weights(algo, batch, agents)},
        values_EJ=values_EJ,
        baseline=baseline,
        values_scale=values_scale,
        report=report,
    )


def _reference_kl(
    logprobs_UBA: np.ndarray, reference_UBA: np.ndarray, rows: Rows[np.ndarray], algo: Algo
) -> np.ndarray:
    """KL to the reference at each action token; 0 for padding."""
    x, reference = jnp.asarray(logprobs_UBA), jnp.asarray(reference_UBA)
    return np.asarray(losses.reference_kl(x, reference, algo.estimator)) * rows.actions.mask_BA


def _charge_kl(
    algo: Algo,
    algorithm: Algorithm,
    batch: Batch,
    kls: Mapping[str, np.ndarray],
    reference: Mapping[str, np.ndarray],
    rounding: float,
) -> Chain:
    """Subtracts ``kl_coef``·KL from the reward of each decision.

    Before the first update of an adapter the KL is a rounding of log-probs, which must teach
    nothing: its noise is what the KL changes by where each log-prob misses by that rounding.
    """
    squares = dict[str, np.ndarray]()
    for base, known_UBA in reference.items():
        rows, own_UBA = batch.rows[base], batch.rows[base].actions.behaviour_BA
        missed_UBA = own_UBA + rounding * (1 + abs(own_UBA) + abs(known_UBA))
        squares[base] = np.square(_reference_kl(missed_UBA, known_UBA, rows, algo) - kls[base])
    if algorithm.level == "action":
        kls, squares = (
            {base: sums_by_turn(x_UBA, batch.rows[base]) for base, x_UBA in by_base.items()}
            for by_base in (kls, squares)
        )
    kl_EJ, noise_E = algo.kl_coef * batch.gather(kls), np.sqrt(batch.gather(squares).sum(1))
    return batch.chain._replace(
        rewards_EJ=batch.chain.rewards_EJ - kl_EJ,
        kl_EJ=kl_EJ,
        kl_noise_E=algo.kl_coef * np.nan_to_num(noise_E, posinf=0),
    )


def _loss_weights(algo: Update, batch: Batch, agents: int) -> dict[str, np.ndarray]:
    """Weights of the decisions in the policy loss, which is Σ weight·loss / Σ count per adapter,
    and coefficients of the entropy bonus, where the settings ask for one; by default every decision
    has the weight 1.

    ``loss_mean`` ``sequence`` is GRPO's (Shao et al. 2024, equation 3), a number N that of Dr. GRPO
    (arXiv 2503.20783): Σ loss / (N · actions). ``mask_truncated`` is overlong filtering (DAPO,
    arXiv 2503.14476, section 3.4). With ``entropy_target`` the bonus acts on agents whose entropy
    is below it (as in Skywork-OR1, arXiv 2505.22312, with a constant coefficient). The entropy is
    estimated as the mean of −log π over the sampled tokens.
    """
    chain, clipped, mean = batch.chain, algo.part(Clipped), algo.part(TokenLevel).loss_mean
    one_EJ = chain.mask_EJ
    if clipped.mask_truncated:
        one_EJ = np.where(chain.turn.truncated_EJ > 0, 0.0, 1.0)
    weight_EJ = count_EJ = one_EJ
    if mean != "token":
        count_EJ = one_EJ * chain.weight_EJ
        weight_EJ = count_EJ if mean == "sequence" else one_EJ / mean
    found = {"weights": weight_EJ, "counts": count_EJ}
    if coef := algo.part(Algo).entropy_coef:
        coef_P = np.full(agents, coef)
        if clipped.entropy_target is not None:
            surprises = {base: -rows.actions.behaviour_BA for base, rows in batch.rows.items()}
            entropy_P = means_by_agent(surprises, batch.rows, agents)
            coef_P = np.where(entropy_P < clipped.entropy_target, coef_P, 0)
        found["entropy"] = coef_P[chain.agent_EJ]
    return found


def _explained(values: np.ndarray, returns: np.ndarray, mask: np.ndarray) -> float:
    """1 − Var(returns − values) / Var(returns) over the masked entries."""
    real = mask > 0
    return float(1 - np.var((returns - values)[real]) / max(np.var(returns[real]), 1e-8))
