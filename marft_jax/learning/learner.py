"""Update of a team: values and advantages of a batch, then epochs of policy gradients.

Its compiled functions are of one microbatch (``score``, ``forward``, ``accumulate``) and of one
optimiser step (``optim_step``); between them is a loop in Python that a reader can follow.
``README.md`` lists where it differs from the papers and from the first MARFT release.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from marft_jax import random_keys
from marft_jax.config import Algo
from marft_jax.learning import batch as batch_lib
from marft_jax.learning.algorithms import Algorithm
from marft_jax.learning.estimates import Estimates, estimate
from marft_jax.learning.reported import Stepped
from marft_jax.learning.settings import LearnerSettings
from marft_jax.learning.state import TrainState
from marft_jax.learning.teaching import Teaching, pack_taught, teacher_advantage
from marft_jax.models import lora
from marft_jax.models.weights.load import BaseModel
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.policy.gradients import CriticSums, Sums, Valued
from marft_jax.policy.logprobs import dtype_of
from marft_jax.policy.objective import Inputs
from marft_jax.policy.optimiser import Adam, adam, rate_factor
from marft_jax.policy.programs import programs
from marft_jax.policy.rows import Level, Rows, means_by_agent
from marft_jax.policy.values import Scored, reads_base, reads_prompts
from marft_jax.random_keys import Stream
from marft_jax.sampling.constraints import Constraint, constraint_of, forms_of
from marft_jax.team.prompts import Team
from marft_jax.types import Episode, Turn


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
            "branches": {name: base.config.branches for name, base in bases.items()},
            "d_models": {name: base.config.d_model for name, base in bases.items()},
            "constraint": functools.partial(_constraint, team, bases),
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
        rows, scored = self._score(state, batch)
        estimates, lr_scale = self._estimate(state, batch, scored)
        data = self._data(batch, rows, scored, estimates)
        how = self._how(step, lr_scale)
        averages = estimates.baseline, estimates.values_scale
        baseline, scale = jax.device_put(averages, mesh_lib.replicated(self._mesh))
        past, state = state.past, state._replace(baseline=baseline, values_scale=scale, past=())
        stepped = list[Stepped]()
        for minibatch in self._order(step, rows, batch.blocks):
            sums = self._no_sums(state)
            for base, u in minibatch:
                check()
                sums[base] = self._forward_backward(state, base, data(base, u), sums[base])
            state, numbers = self._optim_step(state, sums, how)
            stepped.append(numbers)
        report = self._run.report(stepped)
        state = state._replace(step=state.step + 1, past=past)
        if (every := self._settings.algo.part(Algo).kl_moves) and (step + 1) % every == 0:
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
        logprobs = self._forward(adapters, self._microbatches(batch.rows))
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
        """Places the microbatches of each base, and computes what is known of them before the
        update: values, features and log-probs."""
        rows, scored = self._read_bases(state, batch)
        references = {b: p.reference for b, p in state.policies.items() if p.reference}
        corrects = self._settings.correction != "none"
        present = {b: state.adapters[b] for b in self._team.learning_bases if corrects}
        for name, adapters in (("reference_BA", references), ("present_BA", present)):
            for base, own in self._forward(adapters, rows).items():
                both = zip(scored[base], own, strict=True)
                scored[base] = [known._replace(**{name: x_BA}) for known, x_BA in both]
        return rows, scored

    def _read_bases(
        self, state: TrainState, batch: batch_lib.Batch
    ) -> tuple[dict[str, list[Rows[jax.Array]]], dict[str, list[Scored]]]:
        """Places the microbatches of each base, and reads the critic and the bases."""
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

    def _forward(
        self,
        adapters: Mapping[str, lora.Adapters | None],
        rows: Mapping[str, Sequence[Rows[jax.Array]]],
    ) -> dict[str, list[jax.Array]]:
        """Log-probs of the actions in each base's rows under these adapters."""
        found = dict[str, list[jax.Array]]()
        for base, own in rows.items():
            if base in adapters:
                run, how = self._run.bases[base].forward, self._policy(base, adapters[base])
                found[base] = [run(**how, r=micro) for micro in own]
        return found

    def _policy(self, base: str, adapters: lora.Adapters | None) -> dict[str, Any]:
        """A base with these adapters, as the compiled functions take it."""
        scale = lora.scale_of(adapters, self._settings.lora.alpha) if adapters else 1.0
        return {"base": self._params[base], "adapters": adapters, "scale": np.float32(scale)}

    def _estimate(
        self, state: TrainState, batch: batch_lib.Batch, scored: Mapping[str, Sequence[Scored]]
    ) -> tuple[Estimates, float]:
        """Computes advantages and returns, on the host; also fetches the scale of the rates."""

        def host(name: str) -> dict[str, np.ndarray] | None:
            parts = {base: [getattr(s, name) for s in own] for base, own in scored.items()}
            known = {base: own for base, own in parts.items() if own[0] is not None}
            return {b: np.stack(mesh_lib.fetch(own)) for b, own in known.items()} or None

        taught_EJ = self._teach(batch)
        averages = mesh_lib.fetch((state.baseline, state.values_scale, state.lr_scale))
        epsilon = max(float(jnp.finfo(dtype_of(self._params[base])).eps) for base in scored)
        estimates = estimate(
            self._settings.algo,
            self._algorithm,
            len(self._team.profiles),
            batch,
            host("values_BX"),
            host("reference_BA"),
            *averages[:2],
            rounding=max(1e-6, 2 * epsilon),
            taught_EJ=taught_EJ,
        )
        return estimates, averages[2]

    def _teach(self, batch: batch_lib.Batch) -> np.ndarray | None:
        """Computes the advantages from teachers; None without any."""
        if batch.taught is None or self._teaching is None:
            return None
        rows = self._microbatches(batch.taught.rows)
        scored = self._forward(self._teaching.adapters, rows)
        teacher = {base: np.stack(mesh_lib.fetch(own)) for base, own in scored.items()}
        return teacher_advantage(batch, teacher)

    def _data(
        self,
        batch: batch_lib.Batch,
        rows: Mapping[str, Sequence[Rows[jax.Array]]],
        scored: Mapping[str, Sequence[Scored]],
        estimates: Estimates,
    ) -> Callable[[str, int], _Data]:
        """Puts what the losses of a base's microbatch read on the mesh, when it is first asked
        for."""
        inputs = {name: batch.scatter(x_EJ) for name, x_EJ in estimates.inputs.items()}
        returns = batch.scatter(estimates.targets_EJ)

        @functools.cache  # they serve every epoch
        def of(base: str, u: int) -> _Data:
            known, valued = scored[base][u], None
            tokens = {"proximal": known.present_BA, "reference": known.reference_BA}
            if known.values_BX is not None:
                valued = Valued(known.values_BX, returns[base][u], known.features_BXD)
            data = Inputs(
                units={name: by_base[base][u] for name, by_base in inputs.items()},
                tokens={name: x_BA for name, x_BA in tokens.items() if x_BA is not None},
            )
            return _Data(rows[base][u], *self._place((data, valued)))

        return of

    def _how(self, step: int, lr_scale: float) -> tuple[dict[str, Adam], Adam | None]:
        """How the adapters of each base, and the critic, take the steps of a training step."""
        settings, algo = self._settings, self._settings.algo
        factor = np.float32(lr_scale) * np.float32(rate_factor(settings, step))
        clip = algo.max_grad_norm or math.inf
        policies = {
            base: adam(
                np.float32(settings.lr[base]) * factor,
                decay=algo.weight_decay,
                clip=clip,
                moves=moves_N,
                max_kl=algo.part(Algo).max_kl,
            )
            for base, moves_N in self.trainable(step).items()
        }
        critic = settings.critic and adam(np.float32(settings.critic.lr) * factor, clip=clip)
        return policies, critic

    def _no_sums(self, state: TrainState) -> dict[str, _BaseSums]:
        """Sums over nothing, of each base whose adapters or critic learn."""
        found = dict[str, _BaseSums]()
        for base in self._team.adapters:
            run, learns = self._run.bases[base], base in self._team.learning_bases
            policy = run.no_sums(state.adapters[base]) if learns else None
            critic = run.no_critic_sums(state.critic[base]) if self._settings.critic else None
            if policy or critic:
                found[base] = _BaseSums(policy, critic)
        return found

    def _forward_backward(
        self, state: TrainState, base: str, data: _Data, sums: _BaseSums
    ) -> _BaseSums:
        """Adds the gradient sums of a microbatch."""
        run, rows, (policy, critic) = self._run.bases[base], data.rows, sums
        if policy is not None:
            how = self._policy(base, state.adapters[base])
            policy, _ = run.accumulate(**how, rows=rows, inputs=data.inputs, sums=policy)
        if critic is not None:
            how = {"base": self._params[base], "critic": state.critic[base]}
            critic = run.accumulate_values(**how, rows=rows, valued=data.valued, sums=critic)
        return _BaseSums(policy, critic)

    def _optim_step(
        self,
        state: TrainState,
        sums: Mapping[str, _BaseSums],
        how: tuple[dict[str, Adam], Adam | None],
    ) -> tuple[TrainState, Stepped]:
        """Takes a step of each base's adapters, and of the critic over it."""
        policies, critics, opts = dict(state.policies), dict(state.critic), dict(state.critic_opt)
        numbers = Stepped({}, {}, {})
        for base, (policy, critic) in sums.items():
            run = self._run.bases[base]
            if policy is not None:
                policies[base], norm_N = run.optim_step(
                    policy=policies[base], sums=policy, how=how[0][base]
                )
                numbers.by_label[base], numbers.norm_N[base] = policy.by_label, norm_N
            if critic is not None:
                critics[base], opts[base], norm_M = run.critic_step(
                    critic=critics[base], critic_opt=opts[base], sums=critic, how=how[1]
                )
                numbers.critic[base] = (*critic[1:], norm_M)
        return state._replace(policies=policies, critic=critics, critic_opt=opts), numbers

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
        if self._settings.critic is None:  # nothing else learns
            rows = {base: own for base, own in rows.items() if base in self._team.learning_bases}
        rng = random_keys.generator(self._settings.seed, Stream.MINIBATCHES, step)
        algo = self._settings.algo
        of_block = {base: np.arange(len(own)).reshape(blocks, -1) for base, own in rows.items()}
        epochs = [rng.permutation(blocks) for _ in range(algo.epochs)]
        parts = [part for order in epochs for part in np.split(order, algo.minibatches)]
        return [
            [(base, u) for base, own in of_block.items() for u in own[part].ravel().tolist()]
            for part in parts
        ]


def _constraint(team: Team, bases: Mapping[str, BaseModel], turn: Turn) -> Constraint | None:
    """What a turn was sampled under."""
    base = bases[team.bases[turn.agent]]
    size = base.config.vocab_size
    return constraint_of(turn.choices, turn.form, size, forms_of(base.tokenizer, size))


class _Data(NamedTuple):
    """What the losses of a microbatch read, on the mesh."""

    rows: Rows[jax.Array]
    inputs: Inputs
    valued: Valued | None


class _BaseSums(NamedTuple):
    """Sums of a minibatch on one base; None where nothing learns."""

    policy: Sums | None
    critic: CriticSums | None


def _turns_of(prompts: batch_lib.Prompts, scored: Sequence[Scored]) -> list[Scored]:
    """Brings what was scored in the rows of the prompts to the turns of the batch's rows."""
    flat: list[Any] = [
        np.concatenate([x.reshape(-1, *x.shape[2:]) for x in mesh_lib.fetch(parts)])
        for parts in ([s.values_BX for s in scored], [s.features_BXD for s in scored])
    ]
    return [Scored(*(x[flat_BK] for x in flat)) for flat_BK in prompts.flat_UBK]
