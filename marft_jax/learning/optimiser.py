"""Optimiser steps, one for each adapter, each value head and each of the critic's adapters.

They are stacked, and Adam and clipping mapped over their leading axis, so that no agent's gradient
touches another's step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from marft_jax.config import Algo
from marft_jax.learning import critic as critic_lib
from marft_jax.learning.gradients import Stepped, Totals
from marft_jax.learning.settings import LearnerSettings
from marft_jax.learning.state import TrainState
from marft_jax.models import lora


def make_optimizer(config: Algo) -> optax.GradientTransformation:
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


def init(config: Algo, params: optax.Params) -> optax.OptState:
    """Makes the optimiser state of stacked members; empty where there are none."""
    return jax.vmap(make_optimizer(config).init)(params) if jax.tree.leaves(params) else ()


def apply(
    settings: LearnerSettings, *, state: TrainState, total: Totals, trainable_N: jax.Array
) -> tuple[TrainState, Stepped]:
    """Takes a step of the optimiser.

    Whoever has a gradient that is not finite takes no step, nor does an adapter none of whose
    decisions has an advantage: Adam would take a full step for the entropy bonus or the KL alone.

    Args:
        total: of a minibatch, for each place along the mesh's ``data`` axis.
        trainable_N: which adapters may change; of the others, neither parameters nor optimiser
            state does.
    """
    grad_policy, grad_critic, sums = jax.tree.map(lambda x: x.sum(0), total)
    broken = _not_finite(grad_policy, grad_critic)
    owned_N = jnp.maximum(sums.owned_N, 1)
    moves_N = trainable_N & (sums.taught_N > 0)
    if settings.algo.max_kl is not None:
        moves_N &= sums.kl_N / owned_N <= settings.algo.max_kl
    optimizer = make_optimizer(settings.algo)
    scale = state.lr_scale * rate_factor(settings, state.step)
    critic_lr = 0.0 if settings.critic is None else settings.critic.lr * scale
    adapters, adapters_opt, norm_N = _step(
        optimizer,
        settings.lr * scale,
        (state.adapters, state.adapters_opt, grad_policy),
        sums.count_N,
        moves_N,
        settings.algo.weight_decay,
    )
    parts = zip(
        *(state.critic, state.critic_opt, grad_critic),
        critic_lib.decisions(state.critic, sums.per_agent["decisions"]),
        strict=True,
    )
    stepped = [_step(optimizer, critic_lr, (x, o, g), n, n > 0) for x, o, g, n in parts]
    critic, critic_opt, norms = (critic_lib.Critic(*part) for part in zip(*stepped, strict=True))
    state = state._replace(
        adapters=adapters, adapters_opt=adapters_opt, critic=critic, critic_opt=critic_opt
    )
    return state, (sums, broken, (norm_N, jnp.concatenate(norms)))


def _not_finite(grad_policy: lora.Adapters, grad_critic: critic_lib.Critic) -> dict[str, jax.Array]:
    """1 where an update cannot be taken: per adapter and factor, and for the critic as a whole."""

    def any_in(gradient: jax.Array) -> jax.Array:
        flat = gradient.reshape(gradient.shape[0], -1)
        return jnp.any(~jnp.isfinite(flat), axis=1).astype(jnp.float32)

    broken = {
        f"gradient of {target}.{factor}": any_in(gradient)
        for target, factors in grad_policy.items()
        for factor, gradient in factors.items()
    }
    critic = [any_in(gradient).max() for gradient in jax.tree.leaves(grad_critic)]
    return broken | ({"critic gradient": jnp.max(jnp.stack(critic))} if critic else {})


def _step(
    optimizer: optax.GradientTransformation,
    lr: jax.Array | float,
    part: tuple[optax.Params, optax.OptState, optax.Updates],
    count_M: jax.Array,
    moves_M: jax.Array,
    decay: float = 0.0,
) -> tuple[optax.Params, optax.OptState, jax.Array]:
    """A step of stacked members, each with its own clipping and Adam state.

    Args:
        part: parameters, optimiser state and gradient sums, leading axis M; or empty trees.
        count_M: decisions behind each member's gradient sum.
        moves_M: which members change; the others keep their optimiser state too.
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
    moves_M &= jnp.isfinite(norm_M)
    updates, new_opt = jax.vmap(optimizer.update)(gradient, opt)
    new = jax.tree.map(lambda x, u: x - lr * (u + decay * x if decay else u), params, updates)
    return choose(new, params), choose(new_opt, opt), norm_M
