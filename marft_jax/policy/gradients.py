"""Gradient sums of one microbatch, and the totals that they and the metrics need."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marft_jax.models import lora
from marft_jax.models.decoder import Base
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.policy import critic as critic_lib
from marft_jax.policy import logprobs, losses
from marft_jax.policy.objective import (
    Inputs,
    Objective,
    UnitValues,
    advantages,
    measures,
    objective_of_units,
)
from marft_jax.policy.rows import Rows


class GradientSpec(NamedTuple):
    """Constants of a forward and backward pass through the adapters of a base.

    Attributes:
        labels: number of labels, such as agents, for which sums are taken.
    """

    graphdef: logprobs.Graph
    objective: Objective
    labels: int


class GradientSums(NamedTuple):
    """Sums over the units of one base in a minibatch, to be divided late.

    Attributes:
        gradient: of each adapter.
        by_adapter: ``[N]``: units; ``count``, by which the gradient is divided; KL of the update;
            units that move it; tokens whose gradient is not finite.
        by_label: ``[P]``: units, tokens, and the numbers of ``measures``.
    """

    gradient: lora.Adapters
    by_adapter: dict[str, jax.Array]
    by_label: dict[str, jax.Array]


class CriticSums(NamedTuple):
    """Sums over the units that a critic reads, to be divided late.

    Attributes:
        gradient: of each part of the critic.
        loss: of all units.
        units_P: of each label.
        nonfinite_P: values whose gradient is not finite.
    """

    gradient: critic_lib.Critic
    loss: jax.Array
    units_P: jax.Array
    nonfinite_P: jax.Array


_BY_ADAPTER = ("units", "count", "kl", "moving", "nonfinite")


def no_sums(spec: GradientSpec, places: int, adapters: lora.Adapters) -> GradientSums:
    """Sums over no unit, for each place along the mesh's ``data`` axis."""
    names = "units", "tokens", *measures(spec.objective)
    none_N, none_P = jnp.zeros(lora.shape_of(adapters)[0]), jnp.zeros(spec.labels)
    by_adapter = {name: none_N for name in _BY_ADAPTER}
    return _nothing(places, GradientSums(adapters, by_adapter, {name: none_P for name in names}))


def no_critic_sums(
    spec: critic_lib.CriticSpec, places: int, critic: critic_lib.Critic
) -> CriticSums:
    """Sums over no unit, for each place along the mesh's ``data`` axis."""
    none_P = jnp.zeros(spec.labels)
    return _nothing(places, CriticSums(critic, jnp.zeros(()), none_P, none_P))


def _nothing(places: int, tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros((places, *x.shape), x.dtype), tree)


def accumulate(
    spec: GradientSpec,
    places: int,
    *,
    base: Base,
    adapters: lora.Adapters,
    scale: jax.Array | float,
    rows: Rows[jax.Array],
    inputs: Inputs,
    sums: GradientSums,
) -> tuple[GradientSums, tuple[jax.Array, jax.Array]]:
    """Adds a microbatch's gradient sums; returns them, with the log-probs of its learned tokens and
    the losses of its units.

    Each place along the mesh's ``data`` axis, and so each process, sums up the gradients of its own
    rows, on a leading axis that is split over the places; they meet once for each step of the
    optimiser.
    """
    run = functools.partial(gradients, spec, base, adapters, scale)
    more, seen = _at_each_place(run, places, rows, inputs)
    of_data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (seen.logprobs_BA, seen.loss_BX))
    return jax.tree.map(jnp.add, sums, more), of_data


def accumulate_values(
    spec: critic_lib.CriticSpec,
    places: int,
    *,
    base: Base,
    critic: critic_lib.Critic,
    rows: Rows[jax.Array],
    inputs: Inputs,
    features_BXD: jax.Array | None,
    sums: CriticSums,
) -> CriticSums:
    """Adds a microbatch's gradient sums of the critic; see ``accumulate``."""
    run = functools.partial(value_gradients, spec, base, critic)
    more = _at_each_place(run, places, rows, inputs, features_BXD)
    return jax.tree.map(jnp.add, sums, more)


def _at_each_place(run: Callable[..., Any], places: int, *of_rows: Any) -> Any:
    split = jax.tree.map(lambda x: x.reshape(places, -1, *x.shape[1:]), of_rows)
    return jax.vmap(run, axis_name=mesh_lib.PLACES, spmd_axis_name="data")(*split)


def gradients(
    spec: GradientSpec,
    base: Base,
    adapters: lora.Adapters,
    scale: jax.Array | float,
    r: Rows[jax.Array],
    inputs: Inputs,
) -> tuple[GradientSums, UnitValues]:
    """Computes the sums of one microbatch."""

    def states(adapters: lora.Adapters) -> tuple[jax.Array, lora.Adapters]:
        at, owners_BT = r.actions.index_BA, r.tokens.owners_BT
        hidden_BAD = logprobs.hidden_states(spec.graphdef, base, r, at, adapters, owners_BT, scale)
        return hidden_BAD, {name: x for name, x in adapters.items() if name == lora.UNEMBED}

    def loss(hidden_BAD: jax.Array, unembed: lora.Adapters) -> tuple[jax.Array, UnitValues]:
        fused = logprobs.on_vocabulary(unembed, scale, logprobs.dtype_of(base))
        scored = logprobs.score_actions(
            spec.graphdef, base, hidden_BAD, r, "entropy" in inputs.units, fused
        )
        seen = objective_of_units(spec.objective, r, inputs, *scored)
        mask_BX = r.decision_mask(spec.objective.level)
        return jnp.sum(seen.loss_BX * inputs.units["weights"] * mask_BX), seen

    with jax.named_scope("policy"):
        gradient, left_BA, (_, seen) = _isolated(states, loss, adapters)
    by_adapter = _sums_by_adapter(spec, seen, left_BA, r, lora.shape_of(adapters)[0])
    return GradientSums(gradient, by_adapter, _sums_by_label(spec, seen, r)), seen


def value_gradients(
    spec: critic_lib.CriticSpec,
    base: Base,
    critic: critic_lib.Critic,
    r: Rows[jax.Array],
    inputs: Inputs,
    features_BXD: jax.Array | None,
) -> CriticSums:
    """Computes the sums of one microbatch of the critic's error."""
    mask_BX, label_BX, _ = logprobs.decision_labels(r, spec.level)

    def loss(values_BX: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sum(spec.loss(values_BX, inputs.units) * mask_BX), None

    value = functools.partial(critic_lib.values, spec, base, r=r, features_BXD=features_BXD)
    gradient, left_BX, (error, _) = _isolated(lambda x: (value(x), None), loss, critic)
    by_label = _sums_by(label_BX, mask_BX, spec.labels)
    return CriticSums(gradient, error, by_label(jnp.ones_like(mask_BX)), by_label(left_BX))


def _isolated(
    forward: Callable[[Any], tuple[jax.Array, Any]],
    loss: Callable[[jax.Array, Any], tuple[jax.Array, Any]],
    x: Any,
) -> tuple[Any, jax.Array, tuple[jax.Array, Any]]:
    """Gradient of a loss behind ``forward``, without the entries ``[B, ...]`` of its first result
    where that is not finite.

    All adapters share one matrix product, in which 0 * NaN of one would be NaN of all.

    Returns:
        (gradient, which entries were left out, what the loss returned).
    """
    (y, more), pull = jax.vjp(forward, x)
    of_loss, (d_y, d_more) = jax.value_and_grad(loss, (0, 1), has_aux=True)(y, more)
    broken = ~jnp.isfinite(d_y)
    if y.ndim == 3:  # all channels of a token
        broken = broken.any(-1, keepdims=True)
    [gradient] = pull((jnp.where(broken, 0, d_y), d_more))
    return gradient, broken.reshape(y.shape[:2]), of_loss


def _sums_by(labels: jax.Array, mask: jax.Array, size: int) -> Callable[[jax.Array], jax.Array]:
    """Sums up the numbers of each label; a NaN is in no other label's sum."""
    of_label = jax.nn.one_hot(labels, size, dtype=bool) & (mask[..., None] > 0)
    return lambda x: jnp.where(of_label, x[..., None], 0).sum((0, 1), dtype=jnp.float32)


def _sums_by_adapter(
    spec: GradientSpec, seen: UnitValues, left_BA: jax.Array, r: Rows[jax.Array], adapters: int
) -> dict[str, jax.Array]:
    """Sums up the numbers of a microbatch's units by adapter."""
    mask_BX, _, owner_BX = logprobs.decision_labels(r, spec.objective.level)
    by_owner, units = _sums_by(owner_BX, mask_BX, adapters), seen.inputs.units
    by_token = _sums_by(logprobs.of_turn(r.turns.owner_BK, r), r.actions.mask_BA, adapters)
    moving_BX = advantages(seen.inputs) * units["weights"] * seen.correction_BX
    return {
        "units": by_owner(jnp.ones_like(mask_BX)),
        "count": by_owner(units["counts"]),
        "kl": by_owner(losses.approx_kl(seen.new_BX, seen.old_BX)),
        "moving": by_owner(moving_BX != 0),
        "nonfinite": by_token(left_BA),
    }


def _sums_by_label(
    spec: GradientSpec, seen: UnitValues, r: Rows[jax.Array]
) -> dict[str, jax.Array]:
    """Sums up the numbers of a microbatch's units and tokens by label."""
    mask_BX, label_BX, _ = logprobs.decision_labels(r, spec.objective.level)
    by_unit = _sums_by(label_BX, mask_BX, spec.labels)
    by_token = _sums_by(logprobs.of_turn(r.turns.agent_BK, r), r.actions.mask_BA, spec.labels)
    return {
        "units": by_unit(jnp.ones_like(mask_BX)),
        "tokens": by_token(jnp.ones_like(r.actions.mask_BA)),
        **{
            name: (by_token if measure.tokens else by_unit)(measure.of(seen))
            for name, measure in measures(spec.objective).items()
        },
    }
