"""The update: values and advantages of a batch, then epochs of policy gradients.

Its compiled functions are of one microbatch (``score``, ``accumulate``) and of one optimiser step
(``apply``); what goes on between them is a loop in Python that a reader can follow. Differences
from the first MARFT release:

- advantages are normalised over the batch, not over each minibatch, and every turn weighs one in
  their statistics, however many tokens it has;
- the policy loss is averaged over each adapter's own decisions, so that an agent's step does not
  shrink when its team grows;
- the KL guard skips the agents that exceed it, not the whole team;
- an adapter without any advantage takes no step: entropy bonus and KL shape steps, and make none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from marft_jax import random_keys
from marft_jax.learning import batch as batch_lib
from marft_jax.learning import critic as critic_lib
from marft_jax.learning import gradients, logprobs, optimiser
from marft_jax.learning.algorithms import Algorithm
from marft_jax.learning.batch import Rows
from marft_jax.learning.estimates import Estimates, by_agent, estimate, to_rows
from marft_jax.learning.gradients import Targets
from marft_jax.learning.settings import LearnerSettings
from marft_jax.learning.state import Moving, TrainState, Version
from marft_jax.learning.values import Scored, Static, reads_base, reads_prompts, score
from marft_jax.models import lora
from marft_jax.models.decoder import DecoderConfig
from marft_jax.models.ops import attention as attention_lib
from marft_jax.models.weights.load import BaseModel
from marft_jax.parallel import compilation
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.random_keys import Stream
from marft_jax.team.prompts import Team

_T = TypeVar("_T")


class Learner:
    """Owns the compiled functions; the state travels through them.

    Args:
        settings: as ``settings.resolve`` makes them.
        base: the frozen base, on the mesh.
        team: who owns which adapter.
        algorithm: which losses, at which level.
        mesh: rows are split over it, state is replicated.

    Attributes:
        pack: ``batch.build`` for this learner: of episodes, rewards and seed.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        base: BaseModel,
        team: Team,
        algorithm: Algorithm,
        mesh: Mesh,
    ):
        self._settings = settings
        self._algorithm, self._mesh, self._team = algorithm, mesh, team
        self._base = base.params
        self.pack = functools.partial(
            batch_lib.build,
            owners=team.owners,
            config=settings.algo,
            level=algorithm.level,
            shards=mesh_lib.row_shards(mesh),
            share=settings.algo.reuse
            and attention_lib.shares_prefixes(mesh.devices.flat[0].platform),
            d_model=base.config.d_model,
            prompts=reads_prompts(settings, algorithm.level),
        )
        self._run = programs(settings, base.config, base.graphdef, team, algorithm, mesh)

    def init(self) -> TrainState:
        """A fresh state: adapters that change nothing, values near zero."""
        return self._run.init()

    def learn(
        self,
        state: TrainState,
        batch: batch_lib.Batch,
        step: int,
        check: Callable[[], object] = lambda: None,
    ) -> tuple[TrainState, Estimates, dict[str, Any]]:
        """Takes a training step. The old state is donated, but for its past, which may be sampled
        with meanwhile; the metrics are still on the device.

        Args:
            check: is called before every microbatch; what it raises ends the step.
        """
        rows, scored = self._score(state, batch)
        if self._settings.reference == "start":
            scored = [
                s._replace(reference_BA=r)
                for s, r in zip(scored, self._logprobs(state.reference, rows), strict=True)
            ]
        corrects = self._settings.correction != "none"
        proximal = self._logprobs(state.adapters, rows) if corrects else [None] * len(rows)
        estimates = self._estimate(state, batch, scored)
        targets = self._targets(batch, scored, proximal, estimates)
        averages = estimates.baseline, estimates.values_scale
        baseline, scale = jax.device_put(averages, mesh_lib.replicated(self._mesh))
        past, state = state.past, state._replace(baseline=baseline, values_scale=scale, past=())
        trainable_N, seen = self.trainable(step), []
        for minibatch in self._order(step, len(rows), batch.blocks):
            total = self._run.zeros(state.adapters, state.critic)
            for u in minibatch:
                check()
                total = self._run.accumulate(
                    base=self._base,
                    adapters=state.adapters,
                    critic=state.critic,
                    rows=rows[u],
                    targets=targets(u),
                    total=total,
                )
            state, numbers = self._run.apply(state=state, total=total, trainable_N=trainable_N)
            seen.append(numbers)
        report = self._run.report(seen)
        state = state._replace(step=state.step + 1, past=past)
        return state, estimates, estimates.report | report

    def loss(self, state: TrainState, batch: batch_lib.Batch) -> np.ndarray:
        """Cross-entropy per token of each agent's actions, ``[agents]``; nothing is learned."""
        rows = [self._place(r) for r in batch_lib.microbatches(batch.rows)]
        logprobs = [self._run.proximal(base=self._base, adapters=state.adapters, r=r) for r in rows]
        logprobs_UBA = np.stack(mesh_lib.fetch(logprobs))
        return -by_agent(logprobs_UBA, batch.rows, len(self._team.profiles))

    def trainable(self, step: int) -> np.ndarray:
        """The adapters that learn in this step, as flags.

        None in the critic's warm-up; else all that are not frozen, or one of these in turn.
        """
        settings, n = self._settings, self._team.adapters
        if settings.critic is not None and step < settings.critic.warmup_steps:
            return np.zeros(n, bool)
        may_learn = np.asarray(self._team.trainable)
        interval = settings.algo.agent_interval
        if interval == 0:
            return may_learn
        learning = np.flatnonzero(may_learn)
        return np.arange(n) == learning[(step // interval) % len(learning)]

    def _score(self, state: TrainState, batch: batch_lib.Batch) -> tuple[list[Rows], list[Scored]]:
        """The microbatches on the mesh, and values, features and reference log-probs of each."""
        read = batch.rows if batch.prompts is None else batch.prompts.rows
        rows = [self._place(r) for r in batch_lib.microbatches(read)]
        if not reads_base(self._settings):
            return rows, [Scored()] * len(rows)
        scored = [self._run.score(base=self._base, critic=state.critic, r=r) for r in rows]
        if batch.prompts is None:
            return rows, scored
        rows = [self._place(r) for r in batch_lib.microbatches(batch.rows)]  # in the meantime
        flat = [
            np.concatenate([x.reshape(-1, *x.shape[2:]) for x in mesh_lib.fetch(parts)])
            for parts in ([s.values_BX for s in scored], [s.features_BXD for s in scored])
        ]
        return rows, [Scored(*(x[unit_BK] for x in flat)) for unit_BK in batch.prompts.unit_UBK]

    def _logprobs(self, adapters: lora.Adapters, rows: Sequence[Rows]) -> list[Any]:
        """Log-probs of a policy before the update: of the present one, where stale samples are
        corrected, and of the start, where it is the reference of a KL."""
        return [self._run.proximal(base=self._base, adapters=adapters, r=r) for r in rows]

    def _estimate(
        self, state: TrainState, batch: batch_lib.Batch, scored: Sequence[Scored]
    ) -> Estimates:
        """Advantages and returns."""

        def host(parts: Sequence[Any]) -> np.ndarray | None:
            return None if parts[0] is None else np.stack(mesh_lib.fetch(list(parts)))

        return estimate(
            self._settings.algo,
            self._algorithm,
            len(self._team.profiles),
            batch,
            host([s.values_BX for s in scored]),
            host([s.reference_BA for s in scored]),
            *mesh_lib.fetch((state.baseline, state.values_scale)),
        )

    def _targets(
        self,
        batch: batch_lib.Batch,
        scored: Sequence[Scored],
        proximal: Sequence[Any],
        estimates: Estimates,
    ) -> Callable[[int], Targets]:
        """The targets of a microbatch, by its number; built when first asked for."""
        advantages_UBX = to_rows(estimates.advantages_EJ, batch.chain)
        returns_UBX = to_rows(estimates.targets_EJ, batch.chain)
        in_loss = self._settings.algo.kl_in == "loss"

        @functools.cache  # they serve every epoch
        def of(u: int) -> Targets:
            values_BX, features_BXD, reference_BA = scored[u]
            return self._place(
                Targets(
                    advantages_UBX[u],
                    returns_UBX[u],
                    values_BX,
                    features_BXD,
                    reference_BA if in_loss else None,
                    proximal[u],
                )
            )

        return of

    def _place(self, tree: _T) -> _T:
        """A microbatch on the mesh; what is there stays."""
        split = mesh_lib.rows(self._mesh)
        return jax.tree.map(
            lambda x: x if isinstance(x, jax.Array) else mesh_lib.put(x, split), tree
        )

    def _order(self, step: int, micros: int, blocks: int) -> list[np.ndarray]:
        """The microbatches of each minibatch of each epoch: those of blocks, dealt out evenly."""
        rng = random_keys.generator(self._settings.seed, Stream.MINIBATCHES, step)
        algo, of_block = self._settings.algo, np.arange(micros).reshape(blocks, -1)
        epochs = [rng.permutation(blocks) for _ in range(algo.epochs)]
        parts = [part for order in epochs for part in np.split(order, algo.minibatches)]
        return [of_block[part].ravel() for part in parts]


class Programs(NamedTuple):
    """The compiled functions of a learner."""

    init: Any
    score: Any
    proximal: Any
    zeros: Any
    accumulate: Any
    apply: Any
    report: Any


def programs(
    settings: LearnerSettings,
    decoder_config: DecoderConfig,
    graphdef: Any,
    team: Team,
    algorithm: Algorithm,
    mesh: Mesh,
) -> Programs:
    """The compiled functions for one base and mesh."""
    agents, places = len(team.profiles), mesh.shape["data"]
    everywhere, split = mesh_lib.replicated(mesh), mesh_lib.rows(mesh)
    apart = NamedSharding(mesh, P("data"))  # sums of each place's own rows
    options = {"compiler_options": compilation.compiler_options(mesh)}
    static = Static(graphdef, settings, algorithm, agents)

    def compiled(sharding: NamedSharding, function: Any, *fixed: Any, **how: Any) -> Any:
        run = mesh_lib.within(mesh, functools.partial(function, *fixed))
        return mesh_lib.in_turn(mesh, jax.jit(run, out_shardings=sharding, **how))

    return Programs(
        init=compiled(everywhere, fresh, settings, decoder_config, team.adapters, agents),
        score=compiled(split, score, static, **options),
        proximal=compiled(split, proximal, static, **options),
        zeros=compiled(apart, zeros, places, agents),
        accumulate=compiled(apart, accumulate, static, places, donate_argnames="total", **options),
        apply=compiled(everywhere, apply, settings, donate_argnames="state"),
        report=compiled(everywhere, report, settings),
    )


def fresh(
    settings: LearnerSettings, decoder_config: DecoderConfig, adapters: int, agents: int
) -> TrainState:
    """A state before the first step."""
    adapters_key, critic_key = (
        jax.random.wrap_key_data(jnp.asarray(random_keys.key_2(settings.seed, stream)))
        for stream in (Stream.ADAPTERS, Stream.CRITIC)
    )
    stacked = lora.init(
        adapters_key,
        decoder_config,
        adapters=adapters,
        rank=settings.lora.rank,
        targets=settings.lora.targets,
    )
    critic = critic_lib.init(critic_key, settings, decoder_config, agents)
    none, progress = jnp.zeros(agents), jnp.zeros(2)
    return TrainState(
        jnp.int32(0),
        stacked,
        optimiser.init(settings.algo, stacked),
        critic,
        critic_lib.Critic(*(optimiser.init(settings.algo, part) for part in critic)),
        Moving(none, none),
        Moving(jnp.zeros(()), jnp.zeros(())),
        jnp.float32(1),
        progress,
        stacked if settings.reference == "start" else (),
        (Version(stacked, progress),) * settings.lag,
    )


def proximal(static: Static, *, base: Any, adapters: Any, r: Rows) -> jax.Array:
    """Log-probs of actions under a policy that stays as it is."""
    with jax.named_scope("proximal"):
        alpha = static.settings.lora.alpha
        return logprobs.action_logprobs(static.graphdef, base, adapters, alpha, r)[0]


def zeros(places: int, agents: int, adapters: Any, critic: Any) -> Any:
    """Gradient sums and totals of nothing, for each place along ``data``."""
    nothing = gradients.zeros(adapters, critic, agents)
    return jax.tree.map(lambda x: jnp.zeros((places, *x.shape), x.dtype), nothing)


def accumulate(
    static: Static,
    places: int,
    *,
    base: Any,
    adapters: Any,
    critic: Any,
    rows: Rows,
    targets: Targets,
    total: Any,
) -> Any:
    """Adds a microbatch's gradient sums and totals.

    Each place along the mesh's ``data`` axis, and so each process, sums up the gradients of its own
    rows, on a leading axis that is split over the places; they meet once for each step of the
    optimiser.
    """
    r, t = jax.tree.map(lambda x: x.reshape(places, -1, *x.shape[1:]), (rows, targets))
    everywhere = jax.vmap(
        lambda r, t: gradients.gradients(static, base, adapters, critic, r, t),
        axis_name=mesh_lib.PLACES,
        spmd_axis_name="data",
    )
    return jax.tree.map(jnp.add, total, everywhere(r, t))


def apply(
    settings: LearnerSettings, *, state: TrainState, total: Any, trainable_N: jax.Array
) -> tuple[TrainState, Any]:
    """Takes a step of the optimiser, from the sums of all places."""
    return optimiser.apply(settings, state, jax.tree.map(lambda x: x.sum(0), total), trainable_N)


def report(settings: LearnerSettings, seen: Sequence[Any]) -> dict[str, Any]:
    """Metrics of a training step, from what ``apply`` gave for each minibatch."""
    sums, broken, norms = jax.tree.map(lambda *x: jnp.stack(x), *seen)
    numbers = gradients.report(sums, settings) | {"grad_norm": norms[0].mean(0)}
    numbers["nonfinite"] = jax.tree.map(lambda x: x.sum(0), sums.nonfinite | broken)
    if settings.critic is not None:
        numbers["critic/grad_norm"] = norms[1].mean()
    return numbers
