"""The update: values and advantages of a batch, then epochs of policy gradients.

Two jitted functions of (base, state, batch). ``prepare`` runs the frozen base once and turns
rewards into advantages; ``update`` holds epochs, minibatches and gradient accumulation as scans.
Adapters, value heads and the critic's adapters are stacked, and Adam and clipping mapped over
their leading axis, so that no agent's gradient touches another's step. Differences from the first
MARFT release:

- advantages are normalised over the batch, not over each minibatch, and every turn weighs one in
  their statistics, however many tokens it has;
- the policy loss is averaged over each adapter's own decisions, so that an agent's step does not
  shrink when its team grows;
- the KL guard skips the agents that exceed it, not the whole team;
- an adapter without any advantage takes no step: entropy bonus and KL shape steps, and make none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from marft_jax import config as config_lib
from marft_jax.learning import batch as batch_lib
from marft_jax.learning import critic as critic_lib
from marft_jax.learning import logprobs, objective
from marft_jax.learning.algorithms import Algorithm, settle
from marft_jax.learning.prepare import Moving, Prepared, prepare, reads_prompts
from marft_jax.models import lora
from marft_jax.models.decoder import DecoderConfig
from marft_jax.models.ops import attention as attention_lib
from marft_jax.models.weights.load import BaseModel
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.team.prompts import Team
from marft_jax.types import Episode


class TrainState(NamedTuple):
    """All that training changes.

    Attributes:
        step: training steps done.
        adapters: leading axis N.
        adapters_opt: Adam's state for each adapter, leading axis N.
        critic, critic_opt: the value heads and adapters of the critic, and their Adam states.
        baseline: the moving average of each agent's returns, where ``algo.baseline`` wants one.
        progress: the curriculum's level, and the moving mean of the rewards there.
        lr_scale: multiplies the learning rates; lowered by rollbacks.
        sizes: ``batch.Sizes`` of the largest batches so far, which the next ones are padded to.
    """

    step: jax.Array
    adapters: lora.Adapters
    adapters_opt: Any
    critic: critic_lib.Critic
    critic_opt: critic_lib.Critic
    baseline: Moving
    lr_scale: jax.Array
    progress: jax.Array
    sizes: jax.Array


class Learner:
    """Owns the compiled programs; the state travels through them.

    Args:
        config: settings; the sections run, lora, critic and algo are read.
        base: the frozen base, on the mesh.
        team: who owns which adapter.
        algorithm: which losses, at which level.
        mesh: rows are split over it, state is replicated.

    Attributes:
        pack: ``batch.build`` for this learner: of episodes, rewards, seed and least sizes.
    """

    def __init__(
        self,
        config: config_lib.Config,
        base: BaseModel,
        team: Team,
        algorithm: Algorithm,
        mesh: Mesh,
    ):
        self._config = config = settle(config)
        self._mesh, self._adapters = mesh, team.adapters
        self._may_learn = np.asarray(team.trainable)
        self._base = base.params
        self.pack = functools.partial(
            batch_lib.build,
            owners=team.owners,
            config=config.algo,
            level=algorithm.level,
            shards=mesh_lib.row_shards(mesh),
            join=config.algo.reuse and attention_lib.joins(mesh.devices.flat[0].platform),
            d_model=base.config.d_model,
            prompts=reads_prompts(config, algorithm.level),
        )
        run = programs(config, base.config, base.graphdef, team, algorithm, mesh)
        self._init, self._prepare, self._update = run
        self._sizes = batch_lib.NO_SIZES
        self._known: set[Any] = set()  # shapes of batches that programs are compiled for

    def init(self) -> TrainState:
        """A fresh state: adapters that change nothing, values near zero."""
        return self._init()

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
    ) -> tuple[TrainState, Prepared, dict[str, Any]]:
        """One training step. The old state is donated; the metrics are still on the device."""
        self._make_room(batch.sizes)
        self._known.add(_shapes(batch))
        preparing = self._preparing(state, batch)
        prepared, baseline, report = self._prepare(**preparing)
        state = state._replace(baseline=baseline)
        updating = self._updating(state, batch, preparing["rows"], prepared, step)
        state, learned = self._update(**updating)
        return state, prepared, report | learned

    def room_for(self, coming: Sequence[Sequence[Episode]]) -> batch_lib.Sizes:
        """What the batches of steps that play such episodes are to be padded to."""
        sizes = batch_lib.NO_SIZES
        for episodes in coming:
            sizes = self.pack(episodes, _unpaid(episodes), least=sizes).sizes
        return sizes

    def compile_ahead(
        self, state: TrainState, coming: Sequence[Sequence[Episode]], least: batch_lib.Sizes
    ) -> None:
        """Compiles what steps that play such episodes will run, where it is not compiled yet: of
        small batches, not all have equally many rows in a microbatch."""
        split = mesh_lib.rows(self._mesh, axis=1)

        def shape(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split)

        for episodes in coming:
            batch = self.pack(episodes, _unpaid(episodes), least=least)
            if batch.sizes != least or _shapes(batch) in self._known:
                continue
            self._known.add(_shapes(batch))
            preparing = self._preparing(state, batch)
            prepare = self._prepare.lower(**preparing)
            prepared = jax.tree.map(shape, prepare.out_info[0])
            updating = self._updating(state, batch, preparing["rows"], prepared, 0)
            for program in (prepare, self._update.lower(**updating)):
                program.compile()

    def _preparing(self, state: TrainState, batch: batch_lib.Batch) -> dict[str, Any]:
        """The arguments of ``prepare``."""
        split, everywhere = mesh_lib.rows(self._mesh, axis=1), mesh_lib.replicated(self._mesh)
        return dict(
            base=self._base,
            critic=state.critic,
            adapters=state.adapters,
            baseline=state.baseline,
            rows=mesh_lib.put(batch.rows, split),
            chain=mesh_lib.put(batch.chain, everywhere),
            prompts=mesh_lib.put(batch.prompts, split),
        )

    def _updating(
        self, state: TrainState, batch: batch_lib.Batch, rows: Any, prepared: Any, step: int
    ) -> dict[str, Any]:
        """The arguments of ``update``."""
        return dict(
            base=self._base,
            state=state._replace(sizes=np.asarray(batch.sizes, np.int32)),
            rows=rows,
            prepared=prepared,
            trainable_N=self.trainable(step),
            shuffle=self._shuffle(step, batch),
        )

    def _make_room(self, sizes: batch_lib.Sizes) -> None:
        """Drops the programs for smaller batches: those to come are padded to the largest so far,
        and on a CPU each program holds hundreds of megabytes."""
        largest = self._sizes.holding(sizes)
        if largest != self._sizes:
            self._prepare.clear_cache()
            self._update.clear_cache()
            self._known.clear()
        self._sizes = largest

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


def _shapes(batch: batch_lib.Batch) -> Any:
    """What batches with the same programs have in common."""
    return tuple(x.shape for x in jax.tree.leaves((batch.rows, batch.chain, batch.prompts)))


def _unpaid(episodes: Sequence[Episode]) -> list[np.ndarray]:
    return [np.zeros(len(episode.turns), np.float32) for episode in episodes]


class Programs(NamedTuple):
    """The compiled functions of a learner."""

    init: Any
    prepare: Any
    update: Any


def programs(
    config: config_lib.Config,
    decoder_config: DecoderConfig,
    graphdef,
    team: Team,
    algorithm: Algorithm,
    mesh: Mesh,
) -> Programs:
    """``prepare`` and ``update`` for one base and mesh; ``init`` makes a fresh state.

    ``config`` is settled.
    """
    agents = len(team.profiles)
    everywhere, split = mesh_lib.replicated(mesh), mesh_lib.rows(mesh, axis=1)
    static = dict(graphdef=graphdef, config=config, algorithm=algorithm, agents=agents)
    options = mesh_lib.compiler_options(mesh)
    start = functools.partial(fresh, config, decoder_config, team.adapters, agents)
    return Programs(
        jax.jit(start, out_shardings=everywhere),
        jax.jit(
            functools.partial(mesh_lib.within(mesh, prepare), **static),
            out_shardings=(split, everywhere, everywhere),
            compiler_options=options,
        ),
        jax.jit(
            functools.partial(mesh_lib.within(mesh, update), mesh=mesh, **static),
            donate_argnames="state",
            out_shardings=everywhere,
            compiler_options=options,
        ),
    )


def fresh(
    config: config_lib.Config, decoder_config: DecoderConfig, adapters: int, agents: int
) -> TrainState:
    """A state before the first step."""
    key = jax.random.key(config.run.seed)
    stacked = lora.init(
        jax.random.fold_in(key, 1),
        decoder_config,
        adapters=adapters,
        rank=config.lora.rank,
        targets=config.lora.targets,
    )
    critic = critic_lib.init(jax.random.fold_in(key, 2), config, decoder_config, agents)
    optimizer, none = make_optimizer(config.algo), jnp.zeros(agents)
    return TrainState(
        jnp.int32(0),
        stacked,
        _opt_init(optimizer, stacked),
        critic,
        critic_lib.Critic(*(_opt_init(optimizer, part) for part in critic)),
        Moving(none, none),
        jnp.float32(1),
        jnp.zeros(2),
        jnp.zeros(len(batch_lib.Sizes._fields), jnp.int32),
    )


def make_optimizer(config: config_lib.Algo) -> optax.GradientTransformation:
    """Clipping by global norm, then Adam's direction (eps 1e-5); the learning rate comes later."""
    clip = config.max_grad_norm
    return optax.chain(
        optax.clip_by_global_norm(clip) if clip > 0 else optax.identity(),
        optax.scale_by_adam(eps=1e-5),
    )


def update(
    *,
    graphdef,
    config,
    algorithm: Algorithm,
    agents: int,
    mesh: Mesh,
    base,
    state: TrainState,
    rows,
    prepared: Prepared,
    trainable_N,
    shuffle,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Epochs × minibatches × accumulation over one batch.

    Each place along the mesh's ``data`` axis, and so each process, sums up the gradients of its own
    rows; they meet once for each step of the optimiser, whatever the base and the batch.

    Args:
        trainable_N: which adapters may change; of the others, neither parameters nor optimiser
            state does.
        shuffle: microbatch numbers ``[epochs, minibatches, accumulation]``.
    """
    gradients = functools.partial(
        objective.gradients,
        graphdef=graphdef,
        config=config,
        algorithm=algorithm,
        agents=agents,
    )
    sums = _over_data(mesh, gradients, agents)

    def minibatch(state: TrainState, micros):
        total = sums(base, state.adapters, state.critic, rows, prepared, micros)
        return _apply(state, total, trainable_N, config)

    def epoch(state, order):
        return jax.lax.scan(minibatch, state, order)

    state, (sums, norms, broken) = jax.lax.scan(epoch, state, shuffle)
    numbers = objective.report(sums, config) | {"grad_norm": norms[0].mean((0, 1))}
    numbers["nonfinite"] = jax.tree.map(lambda x: x.sum((0, 1)), sums.nonfinite | broken)
    if config.critic.mode != "none":
        numbers["critic/grad_norm"] = norms[1].mean()
    return state._replace(step=state.step + 1), numbers


def _over_data(mesh: Mesh, gradients: Any, agents: int) -> Any:
    """Gradient sums and totals over some microbatches; those without rows cost nothing.

    Each place along ``data`` keeps sums of its own rows, on a leading axis that is split over the
    places, until they meet in one reduction at the end.
    """
    places, apart = mesh.shape["data"], NamedSharding(mesh, P("data"))

    def sums(base, adapters, critic, rows, prepared, micros):
        def one(r, p):
            return gradients(adapters, critic, r, p, base=base)

        everywhere = jax.vmap(one, axis_name=mesh_lib.PLACES, spmd_axis_name="data")

        def accumulate(total, u):
            r, p = jax.tree.map(lambda x: x[u].reshape(places, -1, *x.shape[2:]), (rows, prepared))
            added = logprobs.unless_empty(r, lambda: everywhere(r, p), zeros)
            total = jax.tree.map(jnp.add, total, added)
            return jax.lax.with_sharding_constraint(total, apart), None

        zeros = jax.tree.map(
            lambda x: jnp.zeros((places, *x.shape), x.dtype),
            objective.zeros(adapters, critic, agents),
        )
        total, _ = jax.lax.scan(accumulate, zeros, micros)
        return jax.tree.map(lambda x: x.sum(0), total)

    return sums


def _apply(state: TrainState, total, trainable_N, config):
    """One optimiser step for each adapter, each value head and each of the critic's adapters.

    Whoever has a gradient that is not finite takes none, nor does an adapter none of whose
    decisions has an advantage: Adam would take a full step for the entropy bonus or the KL alone.
    """
    grad_policy, grad_critic, sums = total
    broken = _not_finite(grad_policy, grad_critic)
    owned_N = jnp.maximum(sums.owned_N, 1)
    moves_N = trainable_N & (sums.taught_N > 0)
    if config.algo.max_kl is not None:
        moves_N &= sums.kl_N / owned_N <= config.algo.max_kl
    optimizer, critic_lr = make_optimizer(config.algo), config.critic.lr * state.lr_scale
    adapters, adapters_opt, norm_N = _step(
        optimizer,
        config.algo.lr * state.lr_scale,
        (state.adapters, state.adapters_opt, grad_policy),
        sums.owned_N,
        moves_N,
    )
    parts = zip(
        *(state.critic, state.critic_opt, grad_critic),
        critic_lib.decisions(state.critic, sums.decisions_X),
        strict=True,
    )
    stepped = [_step(optimizer, critic_lr, part, count, count > 0) for *part, count in parts]
    critic, critic_opt, norms = (critic_lib.Critic(*part) for part in zip(*stepped, strict=True))
    state = state._replace(
        adapters=adapters, adapters_opt=adapters_opt, critic=critic, critic_opt=critic_opt
    )
    return state, (sums, (norm_N, jnp.concatenate(norms)), broken)


def _not_finite(grad_policy, grad_critic) -> dict[str, jax.Array]:
    """1 where an update cannot be taken: per adapter and factor, and for the critic as a whole."""

    def any_in(gradient):
        flat = gradient.reshape(gradient.shape[0], -1)
        return jnp.any(~jnp.isfinite(flat), axis=1).astype(jnp.float32)

    broken = {
        f"gradient of {target}.{factor}": any_in(gradient)
        for target, factors in grad_policy.items()
        for factor, gradient in factors.items()
    }
    critic = [any_in(gradient).max() for gradient in jax.tree.leaves(grad_critic)]
    return broken | ({"critic gradient": jnp.max(jnp.stack(critic))} if critic else {})


def _step(optimizer, lr, part, count_M, moves_M):
    """One step of stacked members, each with its own clipping and Adam state.

    Args:
        part: parameters, optimiser state and gradient sums, leading axis M; or empty trees.
        count_M: decisions behind each member's gradient sum.
        moves_M: which members change; the others keep their optimiser state too.

    Returns:
        (parameters, optimiser state, gradient norms).
    """
    params, opt, gradient = part
    if not jax.tree.leaves(params):
        return params, opt, jnp.zeros(0)

    def per_member(x_M, leaf):
        return x_M.reshape((-1,) + (1,) * (leaf.ndim - 1))

    def where(new, old):
        """Adam moves a parameter whose gradient is zero, so what stays is chosen, not computed."""
        return jax.tree.map(lambda n, o: jnp.where(per_member(moves_M, n), n, o), new, old)

    count_M = jnp.maximum(count_M, 1)
    gradient = jax.tree.map(lambda g: g / per_member(count_M, g), gradient)
    norm_M = jax.vmap(optax.tree.norm)(gradient)
    moves_M &= jnp.isfinite(norm_M)
    updates, new_opt = jax.vmap(optimizer.update)(gradient, opt)
    new = jax.tree.map(lambda x, u: x - lr * u, params, updates)
    return where(new, params), where(new_opt, opt), norm_M


def _opt_init(optimizer, params):
    """Optimiser state of stacked members."""
    return jax.vmap(optimizer.init)(params) if jax.tree.leaves(params) else ()
