"""Update of a team: values and advantages of a batch, then epochs of policy gradients.

Its compiled functions are of one microbatch (``score``, ``accumulate``) and of one optimiser step
(``apply``); between them is a loop in Python that a reader can follow. ``README.md`` lists where it
differs from the papers and from the first MARFT release.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from marft_jax import random_keys
from marft_jax.learning import batch as batch_lib
from marft_jax.learning.algorithms import Algorithm
from marft_jax.learning.cells import ROUNDING
from marft_jax.learning.estimates import Estimates, LossWeights, estimate
from marft_jax.learning.gradients import Targets
from marft_jax.learning.logprobs import dtype_of
from marft_jax.learning.programs import programs
from marft_jax.learning.rows import Level, Rows, means_by_agent
from marft_jax.learning.settings import LearnerSettings
from marft_jax.learning.state import TrainState
from marft_jax.learning.teaching import Teaching, pack_taught, teacher_advantage
from marft_jax.learning.values import Scored, reads_base, reads_prompts, updated_bases
from marft_jax.models import lora
from marft_jax.models.weights.load import BaseModel
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.random_keys import Stream
from marft_jax.team.prompts import Team
from marft_jax.types import Episode


class Learner:
    """Owns the compiled functions; the state travels through them.

    Args:
        settings: as ``settings.resolve`` makes them.
        bases: the frozen bases by name, on the mesh.
        team: who owns which adapter.
        algorithm: which losses, at which level.
        mesh: rows are split over it, state is replicated.
        teaching: the teachers, with an algorithm that learns from them.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        bases: Mapping[str, BaseModel],
        team: Team,
        algorithm: Algorithm,
        mesh: Mesh,
        teaching: Teaching | None = None,
    ):
        self._settings = settings
        self._algorithm, self._mesh, self._team = algorithm, mesh, team
        self._teaching = teaching
        bases = {**bases, **teaching.bases} if teaching else bases
        self._params = {name: base.params for name, base in bases.items()}
        self._packing = {
            "shards": mesh_lib.row_shards(mesh),
            "share": settings.algo.reuse,
            "recurrent": [name for name, base in bases.items() if base.config.recurrent],
            "d_models": {name: base.config.d_model for name, base in bases.items()},
        }
        decoders = {name: (base.config, base.graphdef) for name, base in bases.items()}
        self._run = programs(settings, decoders, team, algorithm, mesh)

    def init(self) -> TrainState:
        """A fresh state: adapters that change nothing, values near zero."""
        return self._run.init()

    def pack(
        self,
        episodes: Sequence[Episode],
        rewards: Sequence[np.ndarray],
        seed: Sequence[int] = (0,),
        level: Level | None = None,
    ) -> batch_lib.Batch:
        """Packs episodes for this learner; arguments as of ``batch.build``.

        Args:
            level: what a decision is; by default that of the algorithm.
        """
        algo, team, level = self._settings.algo, self._team, level or self._algorithm.level
        how = {**self._packing, "seed": seed}
        prompts = reads_prompts(self._settings, level)
        batch = batch_lib.build(
            episodes, rewards, team.owners, algo, level, bases=team.bases, prompts=prompts, **how
        )
        if self._teaching is None:
            return batch
        taught = pack_taught(batch.chain, episodes, team, self._teaching, algo, **how)
        return batch._replace(taught=taught)

    def learn(
        self,
        state: TrainState,
        batch: batch_lib.Batch,
        step: int,
        check: Callable[[], object] = lambda: None,
    ) -> tuple[TrainState, Estimates, dict[str, Any]]:
        """Takes a training step.

        Args:
            state: is donated, but for its past, which may be sampled with meanwhile.
            check: is called before every microbatch; what it raises ends the step.

        Returns:
            (state, estimates, metrics); the metrics are still on the device.
        """
        taught_EJ = self._teach(batch)
        rows, scored = self._score(state, batch)
        references = {b: p.reference for b, p in state.policies.items() if p.reference}
        for base, own in self._logprobs(references, rows).items():
            both = zip(scored[base], own, strict=True)
            scored[base] = [s._replace(reference_BA=reference_BA) for s, reference_BA in both]
        corrects = self._settings.correction != "none"
        learning = {base: state.adapters[base] for base in self._team.learning_bases}
        present = self._logprobs(learning if corrects else {}, rows)
        estimates = self._estimate(state, batch, scored, taught_EJ)
        targets = self._targets(batch, scored, present, estimates)
        averages = estimates.baseline, estimates.values_scale
        baseline, scale = jax.device_put(averages, mesh_lib.replicated(self._mesh))
        past, state = state.past, state._replace(baseline=baseline, values_scale=scale, past=())
        trainable, stepped = self.trainable(step), []
        updated = updated_bases(self._settings, self._team)
        learned = {base: own for base, own in rows.items() if base in updated}
        for minibatch in self._order(step, learned, batch.blocks):
            total = self._run.zeros(state.adapters, state.critic)
            for base, u in minibatch:
                check()
                total[base] = self._run.bases[base].accumulate(
                    base=self._params[base],
                    adapters=state.policies[base].adapters,
                    critic=state.critic[base],
                    rows=rows[base][u],
                    targets=targets(base, u),
                    total=total[base],
                )
            state, numbers = self._run.apply(state=state, total=total, trainable=trainable)
            stepped.append(numbers)
        report = self._run.report(stepped)
        state = state._replace(step=state.step + 1, past=past)
        if (every := self._settings.algo.kl_moves) and (step + 1) % every == 0:
            state = state.refer_to_present()
        return state, estimates, estimates.report | report

    def loss(self, state: TrainState, batch: batch_lib.Batch) -> np.ndarray:
        """Cross-entropy per token of each agent's actions, ``[agents]``; nothing is learned."""
        logprobs = self.logprobs(state.adapters, batch)
        return -means_by_agent(logprobs, batch.rows, len(self._team.profiles))

    def logprobs(
        self, adapters: Mapping[str, lora.Adapters], batch: batch_lib.Batch
    ) -> dict[str, np.ndarray]:
        """Log-probs of the actions in each base's rows under these adapters, ``[U, B, A]`` on the
        host; nothing is learned."""
        logprobs = self._logprobs(adapters, self._microbatches(batch.rows))
        return {base: np.stack(mesh_lib.fetch(own)) for base, own in logprobs.items()}

    def trainable(self, step: int) -> dict[str, np.ndarray]:
        """Flags of the adapters of each base that learn in this step.

        None in the critic's warm-up; else all that are not frozen, or one of these in turn.
        """
        settings, may_learn = self._settings, self._team.trainable
        warms_up = settings.critic is not None and step < settings.critic.warmup_steps
        learning = [(b, n) for b, own in may_learn.items() for n in np.flatnonzero(own).tolist()]
        if (interval := settings.algo.agent_interval) > 0:
            learning = [learning[(step // interval) % len(learning)]]
        return {
            base: np.array([(base, n) in learning and not warms_up for n in range(len(own))])
            for base, own in may_learn.items()
        }

    def _score(
        self, state: TrainState, batch: batch_lib.Batch
    ) -> tuple[dict[str, list[Rows[jax.Array]]], dict[str, list[Scored]]]:
        """Places the microbatches of each base, and computes values, features and reference
        log-probs."""
        prompts = batch.prompts
        read = batch.rows if prompts is None else {base: own.rows for base, own in prompts.items()}
        rows = self._microbatches(read)
        if not reads_base(self._settings):
            return rows, {base: [Scored()] * len(own) for base, own in rows.items()}
        scored = {
            base: [
                self._run.bases[base].score(
                    base=self._params[base], critic=state.critic[base], r=micro
                )
                for micro in own
            ]
            for base, own in rows.items()
        }
        if prompts is None:
            return rows, scored
        rows = self._microbatches(batch.rows)  # in the meantime
        return rows, {base: _turns_of(own, scored[base]) for base, own in prompts.items()}

    def _logprobs(
        self,
        adapters: Mapping[str, lora.Adapters | None],
        rows: Mapping[str, Sequence[Rows[jax.Array]]],
    ) -> dict[str, list[jax.Array]]:
        """Log-probs of the actions in each base's rows under these adapters, before the update:
        under the present ones, where stale samples are corrected, or under a KL's reference."""
        return {
            base: [
                self._run.bases[base].proximal(
                    base=self._params[base], adapters=adapters[base], r=micro
                )
                for micro in own
            ]
            for base, own in rows.items()
            if base in adapters
        }

    def _teach(self, batch: batch_lib.Batch) -> np.ndarray | None:
        """Computes the advantages from teachers; None without any."""
        if batch.taught is None or self._teaching is None:
            return None
        rows = self._microbatches(batch.taught.rows)
        scored = self._logprobs(self._teaching.adapters, rows)
        teacher = {base: np.stack(mesh_lib.fetch(own)) for base, own in scored.items()}
        return teacher_advantage(batch, teacher)

    def _estimate(
        self,
        state: TrainState,
        batch: batch_lib.Batch,
        scored: Mapping[str, Sequence[Scored]],
        taught_EJ: np.ndarray | None,
    ) -> Estimates:
        """Computes advantages and returns, on the host."""

        def host(name: str) -> dict[str, np.ndarray] | None:
            parts = {base: [getattr(s, name) for s in own] for base, own in scored.items()}
            known = {base: own for base, own in parts.items() if own[0] is not None}
            return {b: np.stack(mesh_lib.fetch(own)) for b, own in known.items()} or None

        epsilon = max(float(jnp.finfo(dtype_of(self._params[base])).eps) for base in scored)
        return estimate(
            self._settings.algo,
            self._algorithm,
            len(self._team.profiles),
            batch,
            host("values_BX"),
            host("reference_BA"),
            *mesh_lib.fetch((state.baseline, state.values_scale)),
            rounding=max(ROUNDING, 2 * epsilon),
            taught_EJ=taught_EJ,
        )

    def _targets(
        self,
        batch: batch_lib.Batch,
        scored: Mapping[str, Sequence[Scored]],
        present: Mapping[str, Sequence[jax.Array]],
        estimates: Estimates,
    ) -> Callable[[str, int], Targets]:
        """Makes the targets of a base's microbatch when they are first asked for."""
        scatter = batch.scatter
        advantages, returns = map(scatter, (estimates.advantages_EJ, estimates.targets_EJ))
        weights = [scatter(x_EJ) for x_EJ in estimates.weights]

        @functools.cache  # they serve every epoch
        def of(base: str, u: int) -> Targets:
            targets = Targets(
                advantages[base][u],
                scored[base][u],
                returns[base][u],
                LossWeights(*(x[base][u] for x in weights)),
                proximal_BA=present[base][u] if base in present else None,
            )
            return self._place(targets)

        return of

    def _microbatches(
        self, rows: Mapping[str, Rows[np.ndarray]]
    ) -> dict[str, list[Rows[jax.Array]]]:
        """Splits the rows of each base into microbatches on the mesh."""
        return {
            base: [self._place(micro) for micro in batch_lib.microbatches(own)]
            for base, own in rows.items()
        }

    def _place(self, tree: Any) -> Any:
        """Puts arrays of rows on the mesh; what is there stays."""
        split = mesh_lib.rows(self._mesh)
        return jax.tree.map(
            lambda x: x if isinstance(x, jax.Array) else mesh_lib.put(x, split), tree
        )

    def _order(
        self, step: int, rows: Mapping[str, Sequence[Any]], blocks: int
    ) -> list[list[tuple[str, int]]]:
        """Deals blocks of microbatches (base, number) out to the minibatches of each epoch."""
        rng = random_keys.generator(self._settings.seed, Stream.MINIBATCHES, step)
        algo = self._settings.algo
        of_block = {base: np.arange(len(own)).reshape(blocks, -1) for base, own in rows.items()}
        epochs = [rng.permutation(blocks) for _ in range(algo.epochs)]
        parts = [part for order in epochs for part in np.split(order, algo.minibatches)]
        return [
            [(base, u) for base, own in of_block.items() for u in own[part].ravel().tolist()]
            for part in parts
        ]


def _turns_of(prompts: batch_lib.Prompts, scored: Sequence[Scored]) -> list[Scored]:
    """Brings what was scored in the rows of the prompts to the turns of the batch's rows."""
    flat: list[Any] = [
        np.concatenate([x.reshape(-1, *x.shape[2:]) for x in mesh_lib.fetch(parts)])
        for parts in ([s.values_BX for s in scored], [s.features_BXD for s in scored])
    ]
    return [Scored(*(x[flat_BK] for x in flat)) for flat_BK in prompts.flat_UBK]
