"""Update of a team: values and advantages of a batch, then epochs of policy gradients.

Everything that reads or changes a base goes through the verbs of ``policy/``; this module alone
holds the mapping from bases to policies. ``README.md`` lists where the update differs from the
papers and from the first MARFT release.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from marft_jax.learning import step_metrics
from marft_jax.learning.algorithms import Algorithm
from marft_jax.learning.batch import Batch, OfBase, build
from marft_jax.learning.chain import TurnKey
from marft_jax.learning.estimates import Estimates, estimate
from marft_jax.learning.minibatches import order
from marft_jax.learning.objectives import critic_of, objective_of
from marft_jax.learning.settings import LearnerSettings
from marft_jax.learning.state import TrainState, fresh_state
from marft_jax.learning.step_metrics import Stepped
from marft_jax.learning.teaching import Teaching, pack_taught, teacher_advantage
from marft_jax.models import lora
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.models.weights.load import BaseModel
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.policy import policy as verbs
from marft_jax.policy import programs
from marft_jax.policy.logprobs import dtype_of
from marft_jax.policy.objective import Objective
from marft_jax.policy.optimiser import Adam, PolicyState, adam
from marft_jax.policy.policy import Packed, Policy
from marft_jax.sampling.constraints import Constraint, constraint_of, forms_of
from marft_jax.settings.config import Algo
from marft_jax.team.prompts import Team
from marft_jax.types import Episode, Level, Turn


class Learner:
    """Trains a team; the state travels through it.

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
        self._teaching, self._agents = teaching, len(team.profiles)
        self._bases = bases = {**bases, **teaching.bases} if teaching else dict(bases)
        self._packing = {
            "shards": mesh_lib.row_shards(mesh),
            "share": settings.algo.reuse,
            "configs": {name: base.config for name, base in bases.items()},
            "constraint": self._constraint,
        }
        self._objective = objective_of(settings, algorithm)
        self._critics = {
            base: critic_of(settings, algorithm, bases[base].graphdef, self._agents)
            for base in team.adapters
            if settings.critic is not None
        }
        configs = {name: bases[name].config for name in team.adapters}
        self._init, self._report = compiled(settings, configs, team, self._objective, mesh)

    def init(self) -> TrainState:
        """A fresh state: adapters that change nothing, values near zero."""
        return self._init()

    def pack(
        self,
        episodes: Sequence[Episode],
        rewards: Sequence[np.ndarray],
        seed: Sequence[int] = (0,),
        level: Level | None = None,
    ) -> Batch:
        """Packs episodes for this learner; arguments as of ``batch.build``.

        Args:
            level: what a decision is; by default that of the algorithm.
        """
        settings, team, level = self._settings, self._team, level or self._algorithm.level
        options = {**self._packing, "seed": seed}
        batch = build(
            episodes, rewards, team.owners, settings.algo, level, bases=team.bases,
            prompts=settings.reads_prompts(level), **options,
        )  # fmt: skip
        if self._teaching is None:
            return batch
        taught = pack_taught(episodes, team, self._teaching, settings.algo, **options)
        return batch._replace(taught=taught)

    def learn(
        self,
        state: TrainState,
        batch: Batch,
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
        known = {base: self._read(state, base, part) for base, part in batch.parts.items()}
        estimates, lr_scale = self._estimate(state, batch, known)
        inputs = {**estimates.inputs, "returns": estimates.targets_EJ}
        of_turns = {name: batch.chain.by_turn(x_EJ) for name, x_EJ in inputs.items()}
        for base, part in batch.parts.items():
            units = {name: part.data.by_datum(x) for name, x in of_turns.items()}
            known[base] = known[base].carry(batch.level, units, self._objective)
        rules, critic_rule = self._update_rules(step, lr_scale)
        averages = estimates.baseline, estimates.values_scale
        baseline, scale = jax.device_put(averages, mesh_lib.replicated(self._mesh))
        past, state = state.past, state._replace(baseline=baseline, values_scale=scale, past=())
        nothing, stepped = _Known(Packed(self._mesh, ()), Packed(self._mesh, ())), list[Stepped]()
        for blocks in order(self._settings.algo, self._settings.seed, step, batch.blocks):
            numbers, options = Stepped([], {}, []), {"blocks": blocks, "check": check}
            for base in self._team.learning_bases:
                policy = self._policy(base, state.policies[base])
                packed = known.get(base, nothing).packed
                sums, _ = verbs.forward_backward(
                    policy, packed, self._objective, labels=self._agents, **options
                )
                policy, norm_N = verbs.optim_step(policy, sums, rules[base], donate=True)
                state = state._replace(policies={**state.policies, base: policy.state})
                numbers.by_label.append(sums.by_label)
                numbers.norm_N[base] = norm_N
            for base, spec in self._critics.items():
                over = self._policy(base, state.policies[base]), spec
                critic, packed = state.critic[base], known.get(base, nothing).of_critic
                critic, opt, sums, norm_M = verbs.critic_step(
                    *over, critic, state.critic_opt[base], packed, critic_rule, **options
                )
                state = state._replace(
                    critic={**state.critic, base: critic},
                    critic_opt={**state.critic_opt, base: opt},
                )
                numbers.critic.append((*sums[1:], norm_M))
            stepped.append(numbers)
        report = self._report(stepped)
        state = state._replace(step=state.step + 1, past=past)
        if (every := self._settings.algo.part(Algo).kl_reference_every) and (step + 1) % every == 0:
            state = state.refer_to_present()
        return state, estimates, estimates.report | report

    def loss(self, state: TrainState, batch: Batch) -> np.ndarray:
        """Cross-entropy per token of each agent's actions, ``[agents]``; nothing is learned."""
        return -batch.chain.agent_means(self.logprobs(state.adapters, batch), self._agents)

    def logprobs(self, adapters: Mapping[str, lora.Adapters], batch: Batch) -> list[np.ndarray]:
        """Log-probs of the action tokens of each turn under these adapters, in acting order;
        nothing is learned."""
        return batch.chain.in_order(self._forward(adapters, batch.parts))

    def trainable(self, step: int) -> dict[str, np.ndarray]:
        """Flags of the adapters of each base that learn in this step.

        None in the critic's warm-up; else all that are not frozen, or one of these in turn.
        """
        settings, may_learn = self._settings, self._team.trainable
        warms_up = settings.critic is not None and step < settings.critic.warmup_steps
        learning = [(b, n) for b, mask_N in may_learn.items() for n in np.flatnonzero(mask_N)]
        if (interval := settings.algo.agent_interval) > 0:
            learning = [learning[(step // interval) % len(learning)]]
        return {
            base: np.array([(base, n) in learning and not warms_up for n in range(len(mask_N))])
            for base, mask_N in may_learn.items()
        }

    def _policy(self, base: str, state: PolicyState) -> Policy:
        return verbs.policy_of(self._bases[base], self._mesh, state, self._settings.lora.alpha)

    def _read(self, state: TrainState, base: str, part: OfBase) -> _Known:
        """Places the data of a base, and reads what is known of them before the update."""
        settings, policy = self._settings, self._policy(base, state.policies[base])
        packed = verbs.place(self._mesh, part.rows)
        known = _Known(packed, packed)
        if spec := self._critics.get(base):
            read = packed if part.prompts is None else verbs.place(self._mesh, part.prompts)
            known = _Known(packed, *verbs.read_critic(policy, spec, state.critic[base], read))
        if settings.reference != "none" and known.reference is None:
            adapters = policy.state.reference or {}
            reference = verbs.forward(self._policy(base, PolicyState(adapters, ())), packed)
            known = known._replace(reference=reference)
        if settings.correction != "none" and base in self._team.learning_bases:
            known = known._replace(present=verbs.forward(policy, packed))
        return known

    def _forward(
        self, adapters: Mapping[str, lora.Adapters | None], parts: Mapping[str, OfBase]
    ) -> dict[TurnKey, np.ndarray]:
        """Log-probs of the action tokens of each turn; None: under the base alone."""
        of_turns = dict[TurnKey, np.ndarray]()
        for base, part in parts.items():
            policy = self._policy(base, PolicyState(adapters[base] or {}, ()))
            logprobs = verbs.forward(policy, verbs.place(self._mesh, part.rows))
            of_turns |= part.data.by_turn(logprobs, "token")
        return of_turns

    def _estimate(
        self, state: TrainState, batch: Batch, known: Mapping[str, _Known]
    ) -> tuple[Estimates, float]:
        """Computes advantages and returns, on the host; also fetches the scale of the rates."""
        taught_EJ, chain = None, batch.chain
        if batch.taught is not None and self._teaching is not None:
            scored = self._forward(self._teaching.adapters, batch.taught)
            taught_EJ = teacher_advantage(batch, scored)
        values, reference = dict[TurnKey, np.ndarray](), dict[TurnKey, np.ndarray]()
        for base, part in batch.parts.items():
            if (x := known[base].values) is not None:
                values |= part.data.by_turn(x, batch.level)
            if (x := known[base].reference) is not None:
                reference |= part.data.by_turn(x, "token")
        averages = mesh_lib.fetch((state.baseline, state.values_scale, state.lr_scale))
        dtypes = [dtype_of(self._bases[base].params) for base in known]
        epsilon = max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0)
        estimates = estimate(
            self._settings.algo,
            self._algorithm,
            self._agents,
            batch,
            *averages[:2],
            values_EJ=chain.lay(chain.in_order(values)) if values else None,
            reference=chain.in_order(reference) if reference else None,
            taught_EJ=taught_EJ,
            rounding=max(1e-6, 2 * epsilon),
        )
        return estimates, averages[2]

    def _update_rules(self, step: int, lr_scale: float) -> tuple[dict[str, Adam], Adam]:
        """Update rules of a training step: of the adapters of each base, and of the critic."""
        settings, algo = self._settings, self._settings.algo
        factor = np.float32(lr_scale) * np.float32(settings.rate_factor(step))
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
        rate = np.float32(settings.critic.lr if settings.critic else 0) * factor
        return policies, adam(rate, clip=clip)

    def _constraint(self, turn: Turn) -> Constraint | None:
        """What a turn was sampled under."""
        base = self._bases[self._team.bases[turn.agent]]
        size = base.config.vocab_size
        return constraint_of(turn.choices, turn.form, size, forms_of(base.tokenizer, size))


class _Known(NamedTuple):
    """Data of one base on the mesh, and what is known of them before the update.

    Attributes:
        of_critic: those that the critic learns from, with its features.
        values: the critic's value of each decision.
        reference, present: log-probs of action tokens under the KL's reference, and under the
            adapters before the update.
    """

    packed: Packed
    of_critic: Packed
    values: list[np.ndarray] | None = None
    reference: list[np.ndarray] | None = None
    present: list[np.ndarray] | None = None

    def carry(
        self, level: Level, units: dict[str, list[np.ndarray]], objective: Objective
    ) -> _Known:
        """Lets the data carry what the losses of the policy and of the critic read."""
        returns = units.pop("returns")
        tokens = {"proximal": self.present} if self.present is not None else {}
        if objective.kl is not None and self.reference is not None:
            tokens["reference"] = self.reference
        known = self._replace(packed=self.packed.carry(level, units, tokens))
        if self.values is None:
            return known
        numbers = {"values": self.values, "returns": returns}
        return known._replace(of_critic=self.of_critic.carry(level, numbers, {}))


def compiled(
    settings: LearnerSettings,
    configs: Mapping[str, DecoderConfig],
    team: Team,
    objective: Objective,
    mesh: Mesh,
) -> tuple[Any, Any]:
    """Compiles, when they are first called, what is of the whole team: its first state, and the
    metrics of a step."""
    everywhere, owners = mesh_lib.replicated(mesh), zip(team.bases, team.owners, strict=True)
    return (
        programs.compiled(mesh, everywhere, fresh_state, settings, configs, team),
        programs.compiled(mesh, everywhere, step_metrics.report, objective, tuple(owners)),
    )
