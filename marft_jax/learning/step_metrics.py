"""Metrics of a training step, from what its optimiser steps left."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from marft_jax.policy.objective import Objective, measures


class Stepped(NamedTuple):
    """Numbers of one optimiser step.

    Attributes:
        by_label: of each base on which an adapter learns, as of ``gradients.GradientSums``: for
            each place along the mesh's ``data`` axis.
        norm_N: of the gradient of each of these adapters, by base; NaN where it was not finite.
        critic: of each base, as of ``gradients.CriticSums``: (loss, units_P, nonfinite_P) of
            each place, and the gradient norms of the critic's parts.
    """

    by_label: list[dict[str, jax.Array]]
    norm_N: dict[str, jax.Array]
    critic: list[tuple[jax.Array, jax.Array, jax.Array, jax.Array]]


def report(
    objective: Objective, owners: Sequence[tuple[str, int]], stepped: Sequence[Stepped]
) -> dict[str, Any]:
    """Metrics per agent, as ``measures`` says.

    ``decisions`` and ``decisions_min`` are the mean and the smallest number of decisions behind an
    optimiser step. Agents that share an adapter report the same ``grad_norm``.

    Args:
        owners: the base of each agent, and the number of its adapter there.
        stepped: the numbers of each minibatch.
    """
    steps: Stepped = jax.tree.map(lambda *x: jnp.stack(x), *stepped)
    sums = _added(jax.tree.map(lambda x: x.sum(1), steps.by_label))
    still = jnp.zeros(len(stepped))
    norms = jnp.stack(
        [steps.norm_N[base][:, n] if base in steps.norm_N else still for base, n in owners], axis=1
    )
    units_P = jnp.maximum(sums["units"].sum(0), 1)
    nonfinite = {"gradient": (~jnp.isfinite(norms)).sum(0)}
    numbers: dict[str, Any] = {
        "decisions": sums["units"].mean(0),
        "decisions_min": sums["units"].min(0),
        "grad_norm": norms.mean(0),
        "nonfinite": nonfinite,
    }
    for name, measure in measures(objective).items():
        if measure.reduction == "nonfinite":
            nonfinite[name] = sums[name].sum(0)
        elif measure.reduction == "mean":
            numbers[name] = sums[name].sum(0) / units_P
        else:
            numbers[name] = sums[name][0] / jnp.maximum(sums["tokens"][0], 1)
    return numbers | _of_critic(steps.critic, nonfinite)


def _of_critic(
    critic: Sequence[tuple[jax.Array, ...]], nonfinite: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Metrics of the critic, if there is one; also adds what was not finite."""
    if not critic:
        return {}
    loss, decisions, values = _added(
        [tuple(x.sum(1) for x in of_places) for *of_places, _ in critic]
    )
    norm = jnp.concatenate([norm_M for *_, norm_M in critic], axis=1)
    nonfinite["values"] = values.sum(0)
    nonfinite["critic gradient"] = (~jnp.isfinite(norm).all(1)).sum(0)
    count = jnp.maximum(decisions.sum(0).sum(), 1)
    return {"critic/loss": loss.sum(0) / count, "critic/grad_norm": norm.mean()}


def _added(of_bases: Sequence[Any]) -> Any:
    """Sums over the bases."""
    return functools.reduce(functools.partial(jax.tree.map, jnp.add), of_bases)
