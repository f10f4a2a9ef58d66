"""Optimiser steps, one for each adapter, each value head and each of the critic's adapters.

They are stacked, and Adam and clipping mapped over their leading axis, so that no adapter's
gradient touches another's step. Rates and the like are arrays over this axis: none is compiled.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from marft_jax.models import lora
from marft_jax.policy import critic as critic_lib
from marft_jax.policy.gradients import CriticSums, GradientSums

Numbers = jax.Array | np.ndarray | float


class Adam(NamedTuple):
    """Update rule of a step (Kingma and Ba 2014, algorithm 1): one number for all members, or an
    array ``[M]``.

    Attributes:
        rate: learning rate.
        b1, b2: decays of the moments.
        one_minus_b1, one_minus_b2: 1 − b1, 1 − b2, rounded once.
        eps: added to the root of the second moment.
        decay: of the parameters, per unit of the rate, beside Adam's step (Loshchilov and Hutter
            2019).
        clip: norm to which a member's gradient is cut; infinite: none.
        moves: members that may change; the others keep their optimiser state too.
        always: members that move although none of their units has an advantage: Adam's momentum
            goes on.
        max_kl: mean approximate KL above which a member does not move; None: no bound.
    """

    rate: Numbers
    b1: Numbers
    b2: Numbers
    one_minus_b1: Numbers
    one_minus_b2: Numbers
    eps: Numbers
    decay: Numbers
    clip: Numbers
    moves: Any
    always: Any
    max_kl: Numbers | None = None


def adam(
    rate: Any,
    *,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-5,
    decay: Any = 0.0,
    clip: Any = math.inf,
    moves: Any = True,
    always: Any = False,
    max_kl: Any = None,
) -> Adam:
    """Makes an update rule, with the defaults of a team's; arguments as of ``Adam``."""
    one_minus_b1, one_minus_b2 = 1 - np.asarray(b1, np.float64), 1 - np.asarray(b2, np.float64)
    numbers = rate, b1, b2, one_minus_b1, one_minus_b2, eps, decay, clip, moves, always
    kinds = [np.float32] * (len(numbers) - 2) + [np.bool_, np.bool_]
    arrays = map(np.asarray, numbers, kinds)
    return Adam(*arrays, max_kl=None if max_kl is None else np.asarray(max_kl, np.float32))


def init(params: optax.Params) -> optax.OptState:
    """Makes the optimiser state of stacked members; empty where there are none."""
    # of a chain of clipping and Adam: checkpoints have this form
    make = optax.chain(optax.identity(), optax.scale_by_adam()).init
    return jax.vmap(make)(params) if jax.tree.leaves(params) else ()


class PolicyState(NamedTuple):
    """What training changes of the adapters on one base."""

    adapters: lora.Adapters  # leading axis N
    adapters_opt: optax.OptState  # Adam's state for each adapter, leading axis N
    # the adapters that a KL in the loss or reward is taken to, where there is one
    reference: lora.Adapters | tuple[()] = ()


def optim_step(
    policy: PolicyState, sums: GradientSums, rule: Adam
) -> tuple[PolicyState, jax.Array]:
    """Takes a step of the adapters of one base; also returns their gradient norms, ``[N]``.

    An adapter takes no step where the gradient of one of its tokens, or the sum of them, is not
    finite; its norm is NaN then. Nor does an adapter none of whose units has an advantage, unless
    it moves always: Adam would take a full step for the entropy bonus or the KL alone.

    Args:
        sums: for each place along the mesh's ``data`` axis.
    """
    sums = jax.tree.map(lambda x: x.sum(0), sums)
    by_adapter = sums.by_adapter
    moves_N = rule.moves & (rule.always | (by_adapter["moving"] > 0))
    if rule.max_kl is not None:
        moves_N &= by_adapter["kl"] / jnp.maximum(by_adapter["units"], 1) <= rule.max_kl
    adapters, adapters_opt, norm_N = _step(
        rule._replace(moves=moves_N),
        (policy.adapters, policy.adapters_opt, sums.gradient),
        by_adapter["count"],
        by_adapter["nonfinite"],
    )
    return policy._replace(adapters=adapters, adapters_opt=adapters_opt), norm_N


def critic_step(
    critic: critic_lib.Critic, critic_opt: critic_lib.Critic, sums: CriticSums, rule: Adam
) -> tuple[critic_lib.Critic, critic_lib.Critic, jax.Array]:
    """Takes a step of the critic over one base; also returns the gradient norms of its parts.

    Args:
        sums: as of ``optim_step``.
    """
    sums = jax.tree.map(lambda x: x.sum(0), sums)
    numbers = (critic_lib.units_of_parts(critic, x) for x in (sums.units_P, sums.nonfinite_P))
    parts = zip(critic, critic_opt, sums.gradient, *numbers, strict=True)
    stepped = [_step(rule._replace(moves=n > 0), (x, o, g), n, bad) for x, o, g, n, bad in parts]
    critic, critic_opt, norms = (critic_lib.Critic(*part) for part in zip(*stepped, strict=True))
    return critic, critic_opt, jnp.concatenate(norms)


def _step(
    rule: Adam,
    part: tuple[optax.Params, optax.OptState, optax.Updates],
    count_M: jax.Array,
    nonfinite_M: jax.Array,
) -> tuple[optax.Params, optax.OptState, jax.Array]:
    """A step of stacked members, each with a clipping and Adam state.

    Args:
        part: parameters, optimiser state and gradient sums, leading axis M; or empty trees.
        count_M: what each member's gradient sum is divided by, if it is above 1.
        nonfinite_M: entries that were left out of each gradient sum, as they were not finite.

    Returns:
        (parameters, optimiser state, gradient norms).
    """
    params, opt, gradient = part
    if not jax.tree.leaves(params):
        return params, opt, jnp.zeros(0)
    members = len(count_M)

    def per_member(x_M: Any, leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x_M, members).reshape((-1,) + (1,) * (leaf.ndim - 1))

    def choose(new: optax.Params, old: optax.Params) -> optax.Params:
        # Adam moves a parameter whose gradient is zero, so what stays is chosen, not computed
        return jax.tree.map(lambda n, o: jnp.where(per_member(moves_M, n), n, o), new, old)

    gradient = jax.tree.map(lambda g: g / per_member(jnp.maximum(count_M, 1), g), gradient)
    norm_M = jax.vmap(optax.tree.norm)(gradient)
    is_sound_M = jnp.isfinite(norm_M) & (nonfinite_M == 0)
    moves_M = rule.moves & is_sound_M
    updates, new_opt = _adam(rule, gradient, norm_M, opt, per_member)

    def moved(x: jax.Array, update: jax.Array) -> jax.Array:
        return x - per_member(rule.rate, x) * (update + per_member(rule.decay, x) * x)

    new = jax.tree.map(moved, params, updates)
    return choose(new, params), choose(new_opt, opt), jnp.where(is_sound_M, norm_M, jnp.nan)


def _adam(
    rule: Adam, gradient: Any, norm_M: jax.Array, opt: Any, per_member: Any
) -> tuple[Any, optax.OptState]:
    """Clips by the norm of each member, then takes Adam's direction; the rate comes later."""
    empty, state = opt
    count_M = optax.safe_increment(state.count)

    def clipped(g: jax.Array) -> jax.Array:
        cut = g / per_member(norm_M, g) * per_member(rule.clip, g)
        return jnp.where(per_member(norm_M < rule.clip, g), g, cut)

    def mean(rest: Any, x: jax.Array, b: Any, moment: jax.Array) -> jax.Array:
        return per_member(rest, x) * x + per_member(b, x) * moment

    def unbiased(moment: jax.Array, b: Any) -> jax.Array:
        return moment / per_member(1 - b**count_M, moment)

    gradient = jax.tree.map(clipped, gradient)
    mu = jax.tree.map(lambda g, m: mean(rule.one_minus_b1, g, rule.b1, m), gradient, state.mu)
    nu = jax.tree.map(lambda g, v: mean(rule.one_minus_b2, g * g, rule.b2, v), gradient, state.nu)

    def direction(m: jax.Array, v: jax.Array) -> jax.Array:
        return unbiased(m, rule.b1) / (jnp.sqrt(unbiased(v, rule.b2)) + per_member(rule.eps, m))

    updates = jax.tree.map(direction, mu, nu)
    return updates, (empty, state._replace(count=count_M, mu=mu, nu=nu))
