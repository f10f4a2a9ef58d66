"""Estimates that no gradient passes: KL, advantages, returns and weights of each decision.

These are a few numbers for each decision, so they are computed on the host, in NumPy and float64,
in the order in which the paper defines them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from marft_jax.learning.advantages import returns_to_go, reward_sizes
from marft_jax.learning.algorithms import Algorithm, normalized_advantages
from marft_jax.learning.batch import Batch
from marft_jax.learning.chain import Chain
from marft_jax.learning.group_stats import SAME
from marft_jax.learning.moving import label_means, roles
from marft_jax.learning.normalizers import earns_differ
from marft_jax.learning.settings import Clipped, Distill, Reinforce, TokenLevel
from marft_jax.learning.state import EMA
from marft_jax.policy import losses
from marft_jax.settings.config import Algo, Branching, Update

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
    baseline: EMA,
    values_scale: EMA,
    *,
    values_EJ: np.ndarray | None = None,
    reference: Sequence[np.ndarray] | None = None,
    taught_EJ: np.ndarray | None = None,
    rounding: float = SAME,
) -> Estimates:
    """Computes KL, advantages and returns of every decision.

    Args:
        baseline, values_scale: the moving averages so far, on the host.
        values_EJ: the critic's outputs: values divided by their scale.
        reference: log-probs of the reference policy of each turn's action tokens, in acting order;
            None without a KL.
        taught_EJ: advantages from teachers (``teaching.py``), added to those of the rewards.
        rounding: of a log-prob, relative to its size; depends on the dtype of the base.
    """
    chain, report, of_samples = batch.chain, dict[str, np.ndarray | float](), algo.part(Algo)
    if reference is not None:
        kls = _reference_kl(batch.behaviour, reference, of_samples)
        report["ref_kl"] = chain.agent_means(kls, agents)
        if of_samples.kl_in == "reward":
            chain = _charge_kl(of_samples, batch, kls, reference, rounding)
    if values_EJ is not None:
        returns_EJ = np.abs(returns_to_go(chain))
        largest = returns_EJ.max(where=np.isfinite(returns_EJ), initial=0.0)
        largest *= largest > SAME * reward_sizes(chain).max()
        values_scale = values_scale.update(largest, largest, _SCALE_DECAY)
        values_EJ = values_EJ * values_scale.mean
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
    logprobs: Sequence[np.ndarray], reference: Sequence[np.ndarray], algo: Algo
) -> list[np.ndarray]:
    """KL to the reference at each action token of each turn."""
    x, known = (jnp.asarray(np.concatenate(y), jnp.float32) for y in (logprobs, reference))
    kl = np.asarray(losses.reference_kl(x, known, algo.estimator))
    return np.split(kl, np.cumsum(list(map(len, logprobs)))[:-1])


def _charge_kl(
    algo: Algo,
    batch: Batch,
    kls: Sequence[np.ndarray],
    reference: Sequence[np.ndarray],
    rounding: float,
) -> Chain:
    """Subtracts ``kl_coef``·KL from the reward of each decision.

    Before the first update of an adapter the KL is a rounding of log-probs, which must teach
    nothing: its noise is the change of the KL where each log-prob misses by that rounding.
    """
    chain, pairs = batch.chain, zip(batch.behaviour, reference, strict=True)
    missed = [x + rounding * (1 + abs(x) + abs(known)) for x, known in pairs]
    missed_kls = _reference_kl(missed, reference, algo)
    squares = [np.square(a - b) for a, b in zip(missed_kls, kls, strict=True)]

    def lay(of_tokens: Sequence[np.ndarray]) -> np.ndarray:
        if batch.level == "action":
            of_tokens = [x.sum(keepdims=True, dtype=np.float64) for x in of_tokens]
        return chain.lay(of_tokens)

    kl_EJ, noise_E = algo.kl_coef * lay(kls), np.sqrt(lay(squares).sum(1))
    return chain._replace(
        rewards_EJ=chain.rewards_EJ - kl_EJ,
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
    inputs = {"weights": weight_EJ, "counts": count_EJ}
    if coef := algo.part(Algo).entropy_coef:
        coef_P = np.full(agents, coef)
        if clipped.entropy_target is not None:
            entropy_P = chain.agent_means([-x for x in batch.behaviour], agents)
            coef_P = np.where(entropy_P < clipped.entropy_target, coef_P, 0)
        inputs["entropy"] = coef_P[chain.agent_EJ]
    return inputs


def _explained(values: np.ndarray, returns: np.ndarray, mask: np.ndarray) -> float:
    """1 − Var(returns − values) / Var(returns) over the masked entries."""
    real = mask > 0
    return float(1 - np.var((returns - values)[real]) / max(np.var(returns[real]), 1e-8))
