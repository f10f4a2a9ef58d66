"""What is minimised, and what is measured: a loss of each unit from the log-probs of its tokens.

A unit is what has one ratio and one loss: a turn or a token. ``measures`` is the one table of what
metrics and the guard read of units and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from marft_jax.errors import BadInput
from marft_jax.plugins import shown
from marft_jax.policy import logprobs, losses
from marft_jax.policy.rows import Rows
from marft_jax.types import Level

Loss = Callable[[jax.Array, Mapping[str, jax.Array]], jax.Array]
"""(log-probs of units, numbers of units by name) to one loss for each unit. The names are those of
the data's inputs, and ``old``: the log-probs under the policy that sampled."""


LOSSES: dict[str, Loss] = {
    "cross_entropy": lambda logprobs, x: -logprobs,
    "importance_sampling": lambda logprobs, x: -losses.ratio(logprobs, x["old"]) * x["advantages"],
    "ppo": lambda logprobs, x: losses.clipped_policy_loss(
        logprobs, x["old"], x["advantages"], 0.8, 1.2
    ),
    "reinforce": lambda logprobs, x: -logprobs * x["advantages"],
}
"""Losses by name: −log π;  −π/π_old · A;  PPO's with ε = 0.2;  −log π · A."""


class Objective(NamedTuple):
    """Σ over units of weight · (correction · loss − entropy coefficient · entropy + KL).

    A constant of the compiled functions. A term is there where the inputs have its numbers.

    Attributes:
        level: what a unit is: ``action``, or ``token`` if each token is one.
        loss: of each unit.
        clip: (low, high), for the fraction of ratios outside; None if the loss clips nothing.
        correction: (kind, cap, floor) of ``losses.correction_weight``, from the ``proximal``
            log-probs of tokens: those of the policy at the start of the update.
        corrects_turns: the correction is that of the turn, for all its tokens.
        kl: (coefficient, estimator) of the KL to the ``reference`` log-probs of tokens.
    """

    level: Level
    loss: Loss
    clip: tuple[float, float] | None = None
    correction: tuple[str, float, float] | None = None
    corrects_turns: bool = False
    kl: tuple[float, str] | None = None


class Inputs(NamedTuple):
    """Numbers by name that an objective reads besides the rows.

    Attributes:
        units: ``[B, X]``: those of the loss, such as ``advantages``; ``weights``, by default 1;
            ``counts``, whose sum over an adapter's units divides its gradient, by default 0, where
            nothing does; ``entropy``, the coefficients of the entropy bonus.
        tokens: ``[B, A]``: ``proximal``, ``reference``.
    """

    units: dict[str, jax.Array]
    tokens: dict[str, jax.Array]


class UnitValues(NamedTuple):
    """Numbers of the units, ``[B, X]``, and learned tokens, ``[B, A]``, of rows.

    Attributes:
        new_BX, old_BX: log-probs of units now, and under the policy that ratios are taken to.
        entropy_BX: mean over the tokens.
        correction_BX: weights of stale samples.
        loss_BX: all terms of the objective, without weights.
        inputs: as given.
        logprobs_BA, behaviour_BA: log-probs now, and under the policy that sampled.
    """

    new_BX: jax.Array
    old_BX: jax.Array
    entropy_BX: jax.Array
    correction_BX: jax.Array
    loss_BX: jax.Array
    inputs: Inputs
    logprobs_BA: jax.Array
    behaviour_BA: jax.Array


class Measure(NamedTuple):
    """A number of units or tokens, for metrics and the guard.

    Attributes:
        of: the number of each.
        reduction: its mean over the units of a training step; its mean over the tokens of the first
            minibatch; or how many tokens or units it marks as not finite.
        tokens: it is of tokens.
    """

    of: Callable[[UnitValues], jax.Array]
    reduction: Literal["mean", "first", "nonfinite"]
    tokens: bool = False


def measures(objective: Objective) -> dict[str, Measure]:
    """Measures of an objective's units and tokens, by name."""
    table = {
        "entropy": Measure(lambda x: x.entropy_BX, "mean"),
        "approx_kl": Measure(lambda x: losses.approx_kl(x.new_BX, x.old_BX), "mean"),
        "logprob_gap": Measure(lambda x: jnp.abs(x.logprobs_BA - x.behaviour_BA), "first", True),
        "logprobs": Measure(lambda x: ~jnp.isfinite(x.logprobs_BA), "nonfinite", True),
        "behaviour logprobs": Measure(lambda x: ~jnp.isfinite(x.behaviour_BA), "nonfinite", True),
        "advantages": Measure(lambda x: ~jnp.isfinite(advantages(x.inputs)), "nonfinite"),
    }
    if (clip := objective.clip) is not None:
        table["clip_fraction"] = Measure(
            lambda x: losses.clip_fraction(x.new_BX, x.old_BX, *clip), "mean"
        )
    if objective.correction is not None:
        table["correction_weight"] = Measure(lambda x: x.correction_BX, "mean")
    return table


def advantages(inputs: Inputs) -> jax.Array:
    """Advantages of units; 1 where the loss has none."""
    return inputs.units.get("advantages", jnp.ones_like(inputs.units["weights"]))


def objective_of_units(
    objective: Objective,
    r: Rows[jax.Array],
    inputs: Inputs,
    logprobs_BA: jax.Array,
    entropy_BA: jax.Array,
) -> UnitValues:
    """The terms of the objective, for each unit of a microbatch."""
    level, behaviour_BA = objective.level, r.actions.behaviour_BA

    def log_prob(x_BA: jax.Array) -> jax.Array:
        return logprobs.per_decision(x_BA, r, level, r.turns.divisor_BK)

    def mean(x_BA: jax.Array) -> jax.Array:
        return logprobs.per_decision(x_BA, r, level, r.turns.tokens_BK)

    new_BX, old_BX, entropy_BX = log_prob(logprobs_BA), log_prob(behaviour_BA), mean(entropy_BA)
    correction_BX = jnp.ones_like(r.decision_mask(level))
    if objective.correction is not None:
        kind, cap, floor = objective.correction
        present_BA = inputs.tokens["proximal"]
        stale, old_BX = (log_prob(present_BA), old_BX), log_prob(present_BA)
        if objective.corrects_turns:
            stale = logprobs.turn_sums(present_BA, r), logprobs.turn_sums(behaviour_BA, r)
        correction_BX = losses.correction_weight(*stale, kind, cap, floor)
    loss_BX = check_loss(objective.loss(new_BX, {**inputs.units, "old": old_BX}), new_BX)
    loss_BX = loss_BX * correction_BX
    if "entropy" in inputs.units:
        loss_BX = loss_BX - inputs.units["entropy"] * entropy_BX
    if objective.kl is not None:
        coefficient, estimator = objective.kl
        kl_BA = losses.reference_kl(logprobs_BA, inputs.tokens["reference"], estimator)
        loss_BX = loss_BX + coefficient * mean(kl_BA * r.actions.mask_BA)
    loss_BX += jnp.where(jnp.isfinite(loss_BX), 0, jnp.nan) * new_BX  # its gradient is not finite
    return UnitValues(
        new_BX, old_BX, entropy_BX, correction_BX, loss_BX, inputs, logprobs_BA, behaviour_BA
    )


def check_loss(loss: Any, units: jax.Array, what: str = "loss") -> jax.Array:
    """Checks that a user's loss has a number for each unit.

    Raises:
        BadInput: it has another shape, which would be broadcast, or holds no numbers.
    """
    try:
        loss = jnp.asarray(loss)
    except (TypeError, ValueError):
        raise BadInput(
            f"{what}: expected an array {list(units.shape)}, got {shown(loss)}"
        ) from None
    if loss.shape != units.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise BadInput(
            f"{what}: expected one number for each unit, floating {list(units.shape)}, got "
            f"{loss.dtype} {list(loss.shape)}; do not reduce it"
        )
    return loss
