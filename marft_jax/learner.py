"""The update: values and advantages of a batch, then epochs of clipped policy gradients.

Two jitted functions of (base, state, batch). ``prepare`` runs the frozen trunk once and turns
rewards into advantages; ``update`` holds epochs, minibatches and gradient accumulation as scans.
Adapters are optimised per adapter: Adam and clipping are mapped over the leading axis, so that no
agent's gradient touches another's step. Differences from the first MARFT release:

- advantages are normalised over the batch, not over each minibatch;
- the policy loss is averaged over each adapter's own decisions, so that an agent's step does not
  shrink when its team grows;
- the KL guard skips the agents that exceed it, not the whole team.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from marft_jax import batch as batch_lib
from marft_jax import config as config_lib
from marft_jax import critic as critic_lib
from marft_jax import lora
from marft_jax import mesh as mesh_lib
from marft_jax.algorithms import Algorithm, losses
from marft_jax.algorithms.advantages import normalize
from marft_jax.models import decoder
from marft_jax.models.load import BaseModel
from marft_jax.team.context import Team

_LOGITS_IN_FLIGHT = 2**24  # vocabulary logits that exist at once, per microbatch


class TrainState(NamedTuple):
    """All that training changes.

    Attributes:
        step: training steps done.
        adapters: leading axis N.
        adapters_opt: Adam's state for each adapter, leading axis N.
        critic, critic_opt: the value head and its Adam state.
    """

    step: jax.Array
    adapters: lora.Adapters
    adapters_opt: Any
    critic: critic_lib.Critic
    critic_opt: Any


class Prepared(NamedTuple):
    """What ``update`` needs besides the rows; X is K at the action level, A at the token level."""

    features_UBXD: jax.Array
    values_UBX: jax.Array
    advantages_UBX: jax.Array
    returns_UBX: jax.Array


class Learner:
    """Owns the compiled programs; the state travels through them.

    Args:
        config: settings; the sections run, lora, critic and algo are read.
        base: the frozen base, on the mesh.
        team: who owns which adapter.
        algorithm: which losses, at which level.
        mesh: rows are split over it, state is replicated.
    """

    def __init__(
        self,
        config: config_lib.Config,
        base: BaseModel,
        team: Team,
        algorithm: Algorithm,
        mesh: Mesh,
    ):
        self._config, self._mesh, self._adapters = config, mesh, team.adapters
        self._may_learn = np.asarray(team.trainable)
        self._decoder_config, self._base = base.config, base.params
        static = dict(
            graphdef=base.graphdef, config=config, algorithm=algorithm, agents=len(team.profiles)
        )
        self._prepare = jax.jit(functools.partial(prepare, **static))
        self._update = jax.jit(
            functools.partial(update, **static),
            donate_argnames="state",
            out_shardings=mesh_lib.replicated(mesh),
        )

    def init(self) -> TrainState:
        """A fresh state: adapters that change nothing, values near zero."""
        c = self._config

        def make() -> TrainState:
            key = jax.random.key(c.run.seed)
            adapters = lora.init(
                jax.random.fold_in(key, 1),
                self._decoder_config,
                adapters=self._adapters,
                rank=c.lora.rank,
                targets=c.lora.targets,
            )
            head = critic_lib.init(
                jax.random.fold_in(key, 2), self._decoder_config.d_model, c.critic.hidden
            )
            optimizer = make_optimizer(c.algo)
            return TrainState(
                jnp.int32(0),
                adapters,
                jax.vmap(optimizer.init)(adapters),
                head,
                optimizer.init(head),
            )

        return jax.jit(make, out_shardings=mesh_lib.replicated(self._mesh))()

    def trainable(self, step: int) -> np.ndarray:
        """Which adapters learn in this step.

        None in the critic's warm-up; else all that are not frozen, or one of these in turn.
        """
        interval, n = self._config.algo.agent_interval, self._adapters
        if step < self._config.critic.warmup_steps:
            return np.zeros(n, bool)
        if interval == 0:
            return self._may_learn
        learning = np.flatnonzero(self._may_learn)
        return np.arange(n) == learning[(step // interval) % len(learning)]

    def learn(
        self, state: TrainState, batch: batch_lib.Batch, step: int
    ) -> tuple[TrainState, Prepared, dict[str, jax.Array]]:
        """One training step. The old state is donated; the metrics are still on the device."""
        rows = jax.device_put(batch.rows, mesh_lib.rows(self._mesh, axis=1))
        chain = jax.device_put(batch.chain, mesh_lib.replicated(self._mesh))
        prepared, report = self._prepare(
            base=self._base, critic=state.critic, rows=rows, chain=chain
        )
        state, learned = self._update(
            base=self._base,
            state=state,
            rows=rows,
            prepared=prepared,
            trainable_N=jnp.asarray(self.trainable(step)),
            shuffle=jnp.asarray(self._shuffle(step, batch)),
        )
        return state, prepared, report | learned

    def _shuffle(self, step: int, batch: batch_lib.Batch) -> np.ndarray:
        """The order of microbatches in each epoch, ``[epochs, minibatches, accumulation]``.

        Those with rows are dealt out evenly; the empty ones stand at the end of each minibatch.
        """
        epochs, minibatches = self._config.algo.epochs, self._config.algo.minibatches
        rng = np.random.default_rng([self._config.run.seed, step, 1])
        every = batch.rows.mask_UBA.shape[0]
        orders = np.stack([rng.permutation(batch.micros) for _ in range(epochs)])
        filled = orders.reshape(epochs, minibatches, -1)
        empty = np.tile(np.arange(batch.micros, every).reshape(minibatches, -1), (epochs, 1, 1))
        return np.concatenate([filled, empty], axis=-1).astype(np.int32)


def make_optimizer(config: config_lib.Algo) -> optax.GradientTransformation:
    """Clipping by global norm, then Adam's direction (eps 1e-5); the learning rate comes later."""
    clip = config.max_grad_norm
    return optax.chain(
        optax.clip_by_global_norm(clip) if clip > 0 else optax.identity(),
        optax.scale_by_adam(eps=1e-5),
    )


def prepare(
    *, graphdef, config, algorithm: Algorithm, agents: int, base, critic, rows, chain
) -> tuple[Prepared, dict[str, jax.Array]]:
    """Frozen features, values, advantages and returns of every decision."""
    level = algorithm.level
    index_UBX = rows.first_UBK if level == "action" else rows.index_UBA

    def features(micro):
        r, index_BX = micro

        def run():
            hidden_BTD, _ = decoder.forward(
                graphdef, base, r.tokens_UBT, r.positions_UBT, r.segments_UBT
            )
            return jnp.take_along_axis(hidden_BTD, index_BX[..., None], axis=1)

        return unless_empty(r, run)

    with jax.named_scope("critic_features"):
        features_UBXD = jax.lax.map(features, (rows, index_UBX))
    values_UBX = critic_lib.values(critic, features_UBXD)
    values_EJ = values_UBX.reshape(-1)[chain.unit_EJ] * chain.mask_EJ
    next_EJ = jnp.pad(values_EJ[:, 1:], ((0, 0), (0, 1)))
    advantages_EJ, returns_EJ = algorithm.advantages(
        config.algo, chain.rewards_EJ, values_EJ, next_EJ, chain.continues_EJ
    )
    mask_UBX, agent_UBX, _ = unit_labels(rows, level)
    advantages_UBX = advantages_EJ.reshape(-1)[chain.link_UBX] * mask_UBX
    returns_UBX = returns_EJ.reshape(-1)[chain.link_UBX] * mask_UBX
    if config.algo.normalize == "agent":
        advantages_UBX = normalize(advantages_UBX, mask_UBX, agent_UBX, agents) * mask_UBX
    elif config.algo.normalize == "batch":
        advantages_UBX = normalize(advantages_UBX, mask_UBX) * mask_UBX
    report = {"critic/explained_variance": _explained(values_UBX, returns_UBX, mask_UBX)}
    return Prepared(features_UBXD, values_UBX, advantages_UBX, returns_UBX), report


def update(
    *,
    graphdef,
    config,
    algorithm: Algorithm,
    agents: int,
    base,
    state: TrainState,
    rows,
    prepared: Prepared,
    trainable_N,
    shuffle,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Epochs × minibatches × accumulation over one batch.

    Args:
        trainable_N: which adapters may change; of the others, neither parameters nor optimiser
            state does.
        shuffle: microbatch numbers ``[epochs, minibatches, accumulation]``.
    """
    gradients = functools.partial(
        _gradients, graphdef=graphdef, config=config, algorithm=algorithm, agents=agents, base=base
    )

    def minibatch(state: TrainState, micros):
        def accumulate(total, u):
            r, p = jax.tree.map(lambda x: x[u], (rows, prepared))
            added = unless_empty(r, lambda: gradients(state, r, p))
            return jax.tree.map(jnp.add, total, added), None

        one = jax.tree.map(lambda x: x[0], (rows, prepared))
        zeros = _zeros(jax.eval_shape(gradients, state, *one))
        total, _ = jax.lax.scan(accumulate, zeros, micros)
        return _apply(state, total, trainable_N, config)

    def epoch(state, order):
        return jax.lax.scan(minibatch, state, order)

    state, (sums, norms) = jax.lax.scan(epoch, state, shuffle)
    return state._replace(step=state.step + 1), _report(sums, norms)


def unless_empty(r, run):
    """``run()``, or at no cost its zeros, where a microbatch has no row."""
    shapes = jax.eval_shape(run)
    return jax.lax.cond(jnp.any(r.segments_UBT > 0), run, lambda: _zeros(shapes))


def _zeros(shapes):
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


class _Sums(NamedTuple):
    """Totals over a minibatch, to be divided late.

    Per agent (metrics): decisions, entropy, approx_kl, clip_fraction, logprob_gap. Per adapter:
    denominators and KL of the update. Of the critic: squared or Huber error, and decisions.
    """

    decisions_X: jax.Array
    entropy_X: jax.Array
    approx_kl_X: jax.Array
    clip_fraction_X: jax.Array
    tokens_X: jax.Array
    logprob_gap_X: jax.Array
    owned_N: jax.Array
    kl_N: jax.Array
    critic_loss: jax.Array
    critic_count: jax.Array


def _gradients(state: TrainState, r, p, *, graphdef, config, algorithm, agents, base):
    """(adapter gradient sums, critic gradient sums, totals) of one microbatch."""
    algo = config.algo
    mask_BX, agent_BX, owner_BX = unit_labels(r, algorithm.level)
    n = lora.shape_of(state.adapters)[0]

    def policy(adapters):
        logprobs_BA, entropy_BA = action_logprobs(graphdef, base, adapters, config.lora.alpha, r)
        new_BX, old_BX, entropy_BX = (
            per_unit(x, r, algorithm.level, divisor)
            for x, divisor in (
                (logprobs_BA, r.divisor_UBK),
                (r.behaviour_UBA, r.divisor_UBK),
                (entropy_BA, r.tokens_UBK),
            )
        )
        loss_BX = algorithm.policy_loss(algo, new_BX, old_BX, p.advantages_UBX)
        loss_BX = loss_BX - algo.entropy_coef * entropy_BX
        return jnp.sum(loss_BX * mask_BX), (logprobs_BA, new_BX, old_BX, entropy_BX)

    def value(critic):
        error_BX = losses.value_loss(
            critic_lib.values(critic, p.features_UBXD),
            p.values_UBX,
            p.returns_UBX,
            algo.value_clip,
            algo.huber_delta,
        )
        return algo.value_coef * jnp.sum(error_BX * mask_BX)

    with jax.named_scope("policy"):
        grad_policy, (logprobs_BA, new_BX, old_BX, entropy_BX) = jax.grad(policy, has_aux=True)(
            state.adapters
        )
    with jax.named_scope("critic"):
        critic_loss, grad_critic = jax.value_and_grad(value)(state.critic)
    kl_BX = losses.approx_kl(new_BX, old_BX)

    def by(labels, x, mask, size):
        return jnp.einsum("bxn,bx->n", jax.nn.one_hot(labels, size), x * mask)

    agent_BA = jnp.take_along_axis(r.agent_UBK, r.turn_UBA, axis=1)
    gap_BA = jnp.abs(logprobs_BA - r.behaviour_UBA)
    sums = _Sums(
        decisions_X=by(agent_BX, jnp.ones_like(mask_BX), mask_BX, agents),
        entropy_X=by(agent_BX, entropy_BX, mask_BX, agents),
        approx_kl_X=by(agent_BX, kl_BX, mask_BX, agents),
        clip_fraction_X=by(
            agent_BX, losses.clip_fraction(new_BX, old_BX, algo.clip), mask_BX, agents
        ),
        tokens_X=by(agent_BA, jnp.ones_like(r.mask_UBA), r.mask_UBA, agents),
        logprob_gap_X=by(agent_BA, gap_BA, r.mask_UBA, agents),
        owned_N=by(owner_BX, jnp.ones_like(mask_BX), mask_BX, n),
        kl_N=by(owner_BX, kl_BX, mask_BX, n),
        critic_loss=critic_loss,
        critic_count=jnp.sum(mask_BX),
    )
    return grad_policy, grad_critic, sums


def _apply(state: TrainState, total, trainable_N, config):
    """One optimiser step per adapter and one for the critic."""
    grad_policy, grad_critic, sums = total
    optimizer = make_optimizer(config.algo)
    owned_N = jnp.maximum(sums.owned_N, 1)
    moves_N = trainable_N & (sums.owned_N > 0)
    if config.algo.max_kl is not None:
        moves_N &= sums.kl_N / owned_N <= config.algo.max_kl

    def per_adapter(x_N, leaf):
        return x_N.reshape((-1,) + (1,) * (leaf.ndim - 1))

    grad_policy = jax.tree.map(lambda g: g / per_adapter(owned_N, g), grad_policy)
    updates, adapters_opt = jax.vmap(optimizer.update)(grad_policy, state.adapters_opt)
    adapters = jax.tree.map(lambda a, u: a - config.algo.lr * u, state.adapters, updates)

    count = jnp.maximum(sums.critic_count, 1)
    grad_critic = jax.tree.map(lambda g: g / count, grad_critic)
    updates, critic_opt = optimizer.update(grad_critic, state.critic_opt)
    critic = jax.tree.map(lambda c, u: c - config.critic.lr * u, state.critic, updates)
    norms = jax.vmap(optax.tree.norm)(grad_policy), optax.tree.norm(grad_critic)

    def where(moves, new, old):
        """Adam moves a parameter whose gradient is zero, so what stays is chosen, not computed."""
        return jax.tree.map(lambda n, o: jnp.where(moves(n), n, o), new, old)

    def mover(leaf):
        return per_adapter(moves_N, leaf)

    def fed(leaf):
        return sums.critic_count > 0

    state = state._replace(
        adapters=where(mover, adapters, state.adapters),
        adapters_opt=where(mover, adapters_opt, state.adapters_opt),
        critic=where(fed, critic, state.critic),
        critic_opt=where(fed, critic_opt, state.critic_opt),
    )
    return state, (sums, norms)


def unit_labels(rows, level: batch_lib.Level):
    """(mask, agent, owner) of each decision, from one microbatch or from all of them."""
    if level == "action":
        return rows.turn_mask_UBK, rows.agent_UBK, rows.owner_UBK
    agent, owner = (
        jnp.take_along_axis(x, rows.turn_UBA, axis=-1) for x in (rows.agent_UBK, rows.owner_UBK)
    )
    return rows.mask_UBA, agent, owner


def per_unit(x_BA, r, level: batch_lib.Level, divisor_BK):
    """Per-token numbers to per-decision numbers: sums over each turn's tokens, divided."""
    if level == "token":
        return x_BA
    turn_BAK = jax.nn.one_hot(r.turn_UBA, divisor_BK.shape[1]) * r.mask_UBA[..., None]
    return jnp.einsum("ba,bak->bk", x_BA, turn_BAK) / divisor_BK


def action_logprobs(graphdef, base, adapters, alpha: float, r):
    """Log-prob at the sampling temperature, and entropy, of every action token of a microbatch.

    The vocabulary projection sees action positions only, a chunk at a time; the logits of a chunk
    are computed again in the backward pass, so that ``[rows, tokens, vocabulary]`` never exists.

    Returns:
        (logprobs_BA, entropy_BA), zero where the mask is.
    """
    dtype = jax.tree.leaves(base)[0].dtype
    owners = lora.owner_mask(r.owners_UBT, adapters, alpha, dtype)
    hidden_BTD, _ = decoder.forward(
        graphdef,
        base,
        r.tokens_UBT,
        r.positions_UBT,
        r.segments_UBT,
        lora.fuse(adapters, dtype),
        owners,
    )
    hidden_BAD = jnp.take_along_axis(hidden_BTD, r.index_UBA[..., None], axis=1)
    b, a, _ = hidden_BAD.shape
    project = functools.partial(decoder.project, graphdef, base)
    vocabulary = jax.eval_shape(project, hidden_BAD).shape[-1]
    chunk = min(a, max(1, _LOGITS_IN_FLIGHT // (b * vocabulary)))

    @jax.checkpoint
    def score(_, chunked):
        hidden, targets, temperature = chunked
        logits = project(hidden) / temperature[..., None]
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
        return None, (jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0], entropy)

    def split(x):
        fill = [(0, 0), (0, -a % chunk)] + [(0, 0)] * (x.ndim - 2)
        padded = jnp.pad(x, fill, constant_values=1)
        return jnp.moveaxis(padded.reshape(b, -1, chunk, *x.shape[2:]), 1, 0)

    _, scored = jax.lax.scan(
        score, None, (split(hidden_BAD), split(r.targets_UBA), split(r.temperature_UBA))
    )
    return tuple(jnp.moveaxis(x, 0, 1).reshape(b, -1)[:, :a] * r.mask_UBA for x in scored)


def _explained(values, returns, mask):
    """1 − Var(returns − values) / Var(returns) over the masked entries."""
    count = jnp.maximum(mask.sum(), 1)

    def variance(x):
        mean = jnp.sum(x * mask) / count
        return jnp.sum(jnp.square(x - mean) * mask) / count

    return 1 - variance(returns - values) / jnp.maximum(variance(returns), 1e-8)


def _report(sums: _Sums, norms) -> dict[str, jax.Array]:
    """Means over all minibatches, per agent or adapter; the gap is that of the first one."""
    total = jax.tree.map(lambda x: x.sum((0, 1)), sums)
    decisions_X = jnp.maximum(total.decisions_X, 1)
    return {
        "entropy": total.entropy_X / decisions_X,
        "approx_kl": total.approx_kl_X / decisions_X,
        "clip_fraction": total.clip_fraction_X / decisions_X,
        "logprob_gap": sums.logprob_gap_X[0, 0] / jnp.maximum(sums.tokens_X[0, 0], 1),
        "grad_norm": norms[0].mean((0, 1)),
        "critic/loss": total.critic_loss / jnp.maximum(total.critic_count, 1),
        "critic/grad_norm": norms[1].mean(),
    }
