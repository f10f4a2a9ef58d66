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
from marft_jax.learning import critic as critic_lib
from marft_jax.learning import gradients, optimiser
from marft_jax.learning.algorithms import Algorithm
from marft_jax.learning.logprobs import Graph
from marft_jax.learning.moving import ROLES
from marft_jax.learning.settings import LearnerSettings
from marft_jax.learning.state import EMA, PolicyState, TrainState, Version
from marft_jax.learning.values import LearnerSpec, proximal, score
from marft_jax.models import lora
from marft_jax.models.decoder import DecoderConfig
from marft_jax.parallel import compilation
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.random_keys import Stream
from marft_jax.team.prompts import Team

Compiled: TypeAlias = Any
"""A jitted function, for which JAX has no public type with ``lower`` and ``eval_shape``."""


class BasePrograms(NamedTuple):
    """Compiled functions of one microbatch of a base's rows."""

    score: Compiled
    proximal: Compiled
    accumulate: Compiled


class Programs(NamedTuple):
    """Compiled functions of a learner."""

    init: Compiled
    zeros: Compiled
    apply: Compiled
    report: Compiled
    bases: dict[str, BasePrograms]


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
    agents, places = len(team.profiles), mesh.shape["data"]
    everywhere, split = mesh_lib.replicated(mesh), mesh_lib.rows(mesh)
    apart = NamedSharding(mesh, P("data"))  # sums of each place's own rows
    options = {"compiler_options": compilation.compiler_options(mesh)}
    summed = {"donate_argnames": "total"}

    def compiled(
        sharding: NamedSharding, function: Callable[..., Any], *fixed: Any, **how: Any
    ) -> Compiled:
        run = mesh_lib.with_mesh(mesh, functools.partial(function, *fixed))
        return mesh_lib.serialised(mesh, jax.jit(run, out_shardings=sharding, **how))

    def of_base(base: str, graphdef: Graph) -> BasePrograms:
        learns = base in team.learning_bases
        spec = LearnerSpec(graphdef, settings, algorithm, agents, learns)
        return BasePrograms(
            score=compiled(split, score, spec, **options),
            proximal=compiled(split, proximal, spec, **options),
            accumulate=compiled(apart, gradients.accumulate, spec, places, **summed, **options),
        )

    configs = {base: decoders[base][0] for base in team.adapters}
    owners = tuple(zip(team.bases, team.owners, strict=True))
    return Programs(
        init=compiled(
            everywhere, fresh, settings, configs, team.numbers, team.learning_bases, agents
        ),
        zeros=compiled(apart, gradients.zeros, places, agents),
        apply=compiled(everywhere, optimiser.apply, settings, donate_argnames="state"),
        report=compiled(everywhere, gradients.report, settings, owners),
        bases={base: of_base(base, graphdef) for base, (_, graphdef) in decoders.items()},
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
        opt = optimiser.init(settings.algo, stacked if base in learning else {})
        policies[base] = PolicyState(stacked, opt, reference)
        critics[base] = critic = critic_lib.init(critic_key, settings, decoder_config, agents)
        critic_opts[base] = critic_lib.Critic(
            *(optimiser.init(settings.algo, part) for part in critic)
        )
    means = agents * ROLES if settings.algo.baseline == "role" else agents
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
