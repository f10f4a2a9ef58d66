"""Compiled functions of a learner: those of a base's microbatch, and those of the team."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from marft_jax import random_keys
from marft_jax.config import Algo
from marft_jax.learning import reported
from marft_jax.learning.algorithms import Algorithm
from marft_jax.learning.moving import ROLES
from marft_jax.learning.settings import Clipped, LearnerSettings, Reinforce, TokenLevel
from marft_jax.learning.state import EMA, PolicyState, TrainState, Version
from marft_jax.models import lora
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.parallel import compilation
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.policy import critic as critic_lib
from marft_jax.policy import gradients, optimiser
from marft_jax.policy.logprobs import Graph
from marft_jax.policy.objective import Objective
from marft_jax.policy.values import CriticSpec, forward, score
from marft_jax.random_keys import Stream
from marft_jax.team.prompts import Team

Compiled: TypeAlias = Any
"""A jitted function, for which JAX has no public type with ``lower`` and ``eval_shape``."""


class BasePrograms(NamedTuple):
    """Compiled functions of one microbatch of a base's rows, and of its optimiser steps."""

    score: Compiled
    forward: Compiled
    no_sums: Compiled
    accumulate: Compiled
    optim_step: Compiled
    no_critic_sums: Compiled
    accumulate_values: Compiled
    critic_step: Compiled


class Programs(NamedTuple):
    """Compiled functions of a learner."""

    init: Compiled
    report: Compiled
    bases: dict[str, BasePrograms]


class Compiling(NamedTuple):
    """Makes functions that are compiled on a mesh when they are first called."""

    mesh: Mesh

    @property
    def places(self) -> int:
        """Places along the mesh's ``data`` axis: each has gradient sums of its own rows."""
        return self.mesh.shape["data"]

    def __call__(
        self, sharding: Any, function: Callable[..., Any], *fixed: Any, **how: Any
    ) -> Compiled:
        """The function of the arguments after ``fixed``; its results have this sharding."""
        run = functools.partial(mesh_lib.with_mesh(self.mesh, function), *fixed)
        return mesh_lib.serialised(self.mesh, jax.jit(run, out_shardings=sharding, **how))

    def policy(self, spec: gradients.PolicySpec) -> dict[str, Compiled]:
        """Functions of a base's adapters: ``forward``, ``no_sums``, ``accumulate``,
        ``optim_step``."""
        everywhere, split = mesh_lib.replicated(self.mesh), mesh_lib.rows(self.mesh)
        apart, options = self.apart, self.options
        donated = {"donate_argnames": "sums"}
        return {
            "forward": self(split, forward, spec.graphdef, **options),
            "no_sums": self(apart, gradients.no_sums, spec, self.places),
            "accumulate": self(
                (apart, split), gradients.accumulate, spec, self.places, **donated, **options
            ),
            "optim_step": self(everywhere, optimiser.optim_step, donate_argnames="policy"),
        }

    def critic(self, spec: CriticSpec) -> dict[str, Compiled]:
        """Functions of the critic over a base: ``score``, ``no_critic_sums``,
        ``accumulate_values``, ``critic_step``."""
        everywhere, split = mesh_lib.replicated(self.mesh), mesh_lib.rows(self.mesh)
        apart, options = self.apart, self.options
        return {
            "score": self(split, score, spec, **options),
            "no_critic_sums": self(apart, gradients.no_critic_sums, spec.agents, self.places),
            "accumulate_values": self(
                apart, gradients.accumulate_values, spec, self.places,
                donate_argnames="sums", **options,
            ),
            "critic_step": self(
                everywhere, optimiser.critic_step, donate_argnames=("critic", "critic_opt")
            ),
        }  # fmt: skip

    @property
    def apart(self) -> NamedSharding:
        """Sharding of sums of each place's own rows."""
        return NamedSharding(self.mesh, P("data"))

    @property
    def options(self) -> dict[str, Any]:
        """Options of what runs through a base."""
        return {"compiler_options": compilation.compiler_options(self.mesh)}


def programs(
    settings: LearnerSettings,
    decoders: Mapping[str, tuple[DecoderConfig, Graph]],
    team: Team,
    algorithm: Algorithm,
    mesh: Mesh,
) -> Programs:
    """Compiles the functions of a learner on a mesh, when they are first called.

    Args:
        decoders: shape and graph of each base.
    """
    agents, everywhere = len(team.profiles), mesh_lib.replicated(mesh)
    compiled, objective = Compiling(mesh), objective_of(settings, algorithm)
    configs = {base: decoders[base][0] for base in team.adapters}
    owners = tuple(zip(team.bases, team.owners, strict=True))
    adapters = team.numbers, team.learning_bases
    return Programs(
        init=compiled(everywhere, fresh, settings, configs, *adapters, agents),
        report=compiled(everywhere, reported.report, objective, owners),
        bases={
            base: BasePrograms(
                **compiled.policy(gradients.PolicySpec(graphdef, objective, agents)),
                **compiled.critic(CriticSpec(graphdef, settings, algorithm, agents)),
            )
            for base, (_, graphdef) in decoders.items()
        },
    )


def objective_of(settings: LearnerSettings, algorithm: Algorithm) -> Objective:
    """What a team's algorithm minimises."""
    algo = settings.algo
    own, how = algo.part(Algo), settings.correction
    has_kl = own.kl_in == "loss" and settings.reference != "none"

    def loss(logprobs: jax.Array, inputs: Mapping[str, jax.Array]) -> jax.Array:
        return algorithm.policy_loss(algo, logprobs, inputs["old"], inputs["advantages"])

    return Objective(
        algorithm.level,
        loss,
        clip=(algo.clip, algo.clip_high) if isinstance(algo, Clipped) else None,
        correction=None if how == "none" else (how, own.correction_cap, own.correction_floor),
        corrects_turns=algo.part(TokenLevel).correction_of == "sequence",
        kl=(own.kl_coef, own.estimator) if has_kl else None,
    )


def fresh(
    settings: LearnerSettings,
    configs: Mapping[str, DecoderConfig],
    adapters: Mapping[str, Sequence[int]],
    learning: Collection[str],
    agents: int,
) -> TrainState:
    """Makes the state before the first step.

    Args:
        configs: of each base.
        adapters: the numbers of those of each base in the team.
        learning: bases with an adapter that learns; the others have no optimiser.
    """
    adapters_key, critic_key = (
        jax.random.wrap_key_data(jnp.asarray(random_keys.key_2(settings.seed, stream)))
        for stream in (Stream.ADAPTERS, Stream.CRITIC)
    )
    policies, critics, critic_opts = {}, {}, {}
    for base, decoder_config in configs.items():
        stacked = lora.init(
            adapters_key,
            decoder_config,
            adapters=adapters[base],
            rank=settings.lora.rank,
            targets=settings.lora.targets,
        )
        reference = stacked if settings.reference == "start" else ()
        opt = optimiser.init(stacked if base in learning else {})
        policies[base] = PolicyState(stacked, opt, reference)
        critics[base] = critic = critic_lib.init(critic_key, settings, decoder_config, agents)
        critic_opts[base] = critic_lib.Critic(*map(optimiser.init, critic))
    means = agents * ROLES if settings.algo.part(Reinforce).baseline == "role" else agents
    none, progress = jnp.zeros(means), jnp.zeros(2)
    state = TrainState(
        step=jnp.int32(0),
        policies=policies,
        critic=critics,
        critic_opt=critic_opts,
        baseline=EMA(none, none),
        values_scale=EMA(jnp.zeros(()), jnp.zeros(())),
        lr_scale=jnp.float32(1),
        progress=progress,
        parts={},
    )
    return state._replace(past=(Version(state.adapters, progress),) * settings.lag)
