"""Optimiser steps, one for each adapter, each value head and each of the critic's adapters.

They are stacked, and Adam and clipping mapped over their leading axis, so that no agent's gradient
touches another's step.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from marft_jax.config import Update
from marft_jax.learning import critic as critic_lib
from marft_jax.learning.gradients import Stepped, Totals
from marft_jax.learning.settings import LearnerSettings
from marft_jax.learning.state import PolicyState, TrainState


def make_optimizer(config: Update) -> optax.GradientTransformation:
    """Clips by global norm, then takes Adam's direction (eps 1e-5); the rate comes later."""
    clip = config.max_grad_norm
    return optax.chain(
        optax.clip_by_global_norm(clip) if clip > 0 else optax.identity(),
        optax.scale_by_adam(eps=1e-5),
    )


def rate_factor(settings: LearnerSettings, step: jax.Array | int) -> jax.Array:
    """What the learning rates are multiplied with in the training step after ``step``.

    From 1 / (W + 1) to 1 in the W steps of the warm-up; then 1, or 1 - x, or (1 + cos(pi x)) / 2
    where x is the part of the remaining steps that is done.
    """
    algo = settings.algo
    rest = max(settings.steps - algo.lr_warmup, 1)
    decay = {
        "constant": optax.constant_schedule(1.0),
        "linear": optax.linear_schedule(1.0, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(1.0, rest),
    }[algo.lr_schedule]
    if not algo.lr_warmup:
        return jnp.asarray(decay(step))
    rise = optax.linear_schedule(1 / (algo.lr_warmup + 1), 1.0, algo.lr_warmup)
    return jnp.asarray(optax.join_schedules([rise, decay], [algo.lr_warmup])(step))


def init(config: Update, params: optax.Params) -> optax.OptState:
    """Makes the optimiser state of stacked members; empty where there are none."""
    return jax.vmap(make_optimizer(config).init)(params) if jax.tree.leaves(params) else ()


def apply(
    settings: LearnerSettings,
    *,
    state: TrainState,
    total: Mapping[str, Totals],
    trainable: Mapping[str, jax.Array],
) -> tuple[TrainState, dict[str, Stepped]]:
    """Takes a step of the optimiser.

    An adapter or a part of the critic takes no step where a decision's gradient, or the sum of
    them, is not finite; the norm that is reported is NaN then. Nor does an adapter none of whose
    decisions has an advantage: Adam would take a full step for the entropy bonus or the KL alone.

    Args:
        total: of a minibatch: per base, for each place along the mesh's ``data`` axis.
        trainable: per base ``[N]``, true for the adapters that may change; of the others, neither
            parameters nor optimiser state changes.
    """
    scale = state.lr_scale * rate_factor(settings, state.step)
    policies, critics, critic_opts, stepped = {}, {}, {}, {}
    for base, policy in state.policies.items():
        own: Totals = jax.tree.map(lambda x: x.sum(0), total[base])
        policies[base], norm_N = _policy_step(
            settings, settings.lr[base] * scale, policy, own, trainable[base]
        )
        critics[base], critic_opts[base], critic_norm_M = _critic_step(
            settings, scale, state.critic[base], state.critic_opt[base], own
        )
        stepped[base] = Stepped(own.by_agent, own.critic_loss, norm_N, critic_norm_M)
    return state._replace(policies=policies, critic=critics, critic_opt=critic_opts), stepped


def _policy_step(
    settings: LearnerSettings,
    lr: jax.Array,
    policy: PolicyState,
    total: Totals,
    trainable_N: jax.Array,
) -> tuple[PolicyState, jax.Array]:
    """Takes a step of the adapters of one base; also returns their gradient norms, ``[N]``."""
    own = total.by_adapter
    if not jax.tree.leaves(policy.adapters_opt):  # none of them learns
        return policy, jnp.zeros_like(own["count"])
    moves_N = trainable_N & (own["nonzero_advantages"] > 0)
    if settings.algo.max_kl is not None:
        moves_N &= own["kl"] / jnp.maximum(own["decisions"], 1) <= settings.algo.max_kl
    adapters, adapters_opt, norm_N = _step(
        make_optimizer(settings.algo),
        lr,
        (policy.adapters, policy.adapters_opt, total.gradient),
        own["count"],
        moves_N,
        own["nonfinite"],
        settings.algo.weight_decay,
    )
    return policy._replace(adapters=adapters, adapters_opt=adapters_opt), norm_N


def _critic_step(
    settings: LearnerSettings,
    scale: jax.Array,
    critic: critic_lib.Critic,
    critic_opt: critic_lib.Critic,
    total: Totals,
) -> tuple[critic_lib.Critic, critic_lib.Critic, jax.Array]:
    """Takes a step of the critic over one base; also returns the gradient norms of its parts."""
    lr = 0.0 if settings.critic is None else settings.critic.lr * scale
    parts = zip(
        *(critic, critic_opt, total.critic_gradient),
        *(critic_lib.decisions(critic, total.by_agent[name]) for name in ("decisions", "values")),
        strict=True,
    )
    optimizer = make_optimizer(settings.algo)
    stepped = [_step(optimizer, lr, (x, o, g), n, n > 0, bad) for x, o, g, n, bad in parts]
    critic, critic_opt, norms = (critic_lib.Critic(*part) for part in zip(*stepped, strict=True))
    return critic, critic_opt, jnp.concatenate(norms)


def _step(
    optimizer: optax.GradientTransformation,
    lr: jax.Array | float,
    part: tuple[optax.Params, optax.OptState, optax.Updates],
    count_M: jax.Array,
    moves_M: jax.Array,
    nonfinite_M: jax.Array,
    decay: float = 0.0,
) -> tuple[optax.Params, optax.OptState, jax.Array]:
    """A step of stacked members, each with its own clipping and Adam state.

    Args:
        part: parameters, optimiser state and gradient sums, leading axis M; or empty trees.
        count_M: decisions behind each member's gradient sum.
        moves_M: which members change; the others keep their optimiser state too.
        nonfinite_M: entries that were left out of each gradient sum, as they were not finite.
        decay: of the parameters, per unit of the rate, beside Adam's step (Loshchilov and Hutter
            2019); no state, so that a run may change it when it continues.

    Returns:
        (parameters, optimiser state, gradient norms).
    """
    params, opt, gradient = part
    if not jax.tree.leaves(params):
        return params, opt, jnp.zeros(0)

    def per_member(x_M: jax.Array, leaf: jax.Array) -> jax.Array:
        return x_M.reshape((-1,) + (1,) * (leaf.ndim - 1))

    def choose(new: optax.Params, old: optax.Params) -> optax.Params:
        # Adam moves a parameter whose gradient is zero, so what stays is chosen, not computed
        return jax.tree.map(lambda n, o: jnp.where(per_member(moves_M, n), n, o), new, old)

    count_M = jnp.maximum(count_M, 1)
    gradient = jax.tree.map(lambda g: g / per_member(count_M, g), gradient)
    norm_M = jax.vmap(optax.tree.norm)(gradient)
    is_sound_M = jnp.isfinite(norm_M) & (nonfinite_M == 0)
    norm_M = jnp.where(is_sound_M, norm_M, jnp.nan)
    moves_M &= is_sound_M
    updates, new_opt = jax.vmap(optimizer.update)(gradient, opt)
    new = jax.tree.map(lambda x, u: x - lr * (u + decay * x if decay else u), params, updates)
    return choose(new, params), choose(new_opt, opt), norm_M
