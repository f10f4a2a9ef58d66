"""Compiled functions of a base's microbatches and of its optimiser steps, on a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from marft_jax.parallel import compilation
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.policy import critic, gradients, logprobs, optimiser
from marft_jax.policy.critic import CriticSpec
from marft_jax.policy.gradients import GradientSpec

Compiled: TypeAlias = Any
"""A jitted function, for which JAX has no public type with ``lower`` and ``eval_shape``."""


class GradientPrograms(NamedTuple):
    """Gradient sums of a base's adapters: none, and those with a microbatch more."""

    no_sums: Compiled
    accumulate: Compiled


class CriticPrograms(NamedTuple):
    """Functions of a critic over a base."""

    read: Compiled
    no_sums: Compiled
    accumulate: Compiled
    step: Compiled


class Compiling(NamedTuple):
    """Makes functions that are compiled on a mesh when they are first called."""

    mesh: Mesh

    @property
    def places(self) -> int:
        """Places along the mesh's ``data`` axis: each has gradient sums of its own rows."""
        return self.mesh.shape["data"]

    def __call__(
        self, sharding: Any, function: Callable[..., Any], *fixed: Any, **options: Any
    ) -> Compiled:
        """The function of the arguments after ``fixed``; its results have this sharding."""
        run = functools.partial(mesh_lib.with_mesh(self.mesh, function), *fixed)
        return mesh_lib.serialised(self.mesh, jax.jit(run, out_shardings=sharding, **options))

    @property
    def everywhere(self) -> NamedSharding:
        return mesh_lib.replicated(self.mesh)

    @property
    def by_rows(self) -> NamedSharding:
        return mesh_lib.rows(self.mesh)

    @property
    def by_place(self) -> NamedSharding:
        """Sharding of sums of each place's own rows."""
        return NamedSharding(self.mesh, P("data"))

    @property
    def options(self) -> dict[str, Any]:
        """Options of what runs through a base."""
        return {"compiler_options": compilation.compiler_options(self.mesh)}


@functools.lru_cache(maxsize=64)
def forward(mesh: Mesh, graphdef: logprobs.Graph) -> Compiled:
    compiling = Compiling(mesh)
    return compiling(compiling.by_rows, logprobs.forward, graphdef, **compiling.options)


@functools.lru_cache(maxsize=16)
def top(mesh: Mesh, graphdef: logprobs.Graph, k: int) -> Compiled:
    compiling = Compiling(mesh)
    return compiling(compiling.by_rows, logprobs.top_tokens, graphdef, k, **compiling.options)


@functools.lru_cache(maxsize=64)
def of_gradients(mesh: Mesh, spec: GradientSpec) -> GradientPrograms:
    compiling = Compiling(mesh)
    apart, places = compiling.by_place, compiling.places
    return GradientPrograms(
        no_sums=compiling(apart, gradients.no_sums, spec, places),
        accumulate=compiling(
            (apart, compiling.by_rows), gradients.accumulate, spec, places,
            donate_argnames="sums", **compiling.options,
        ),
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def optim_step(mesh: Mesh) -> Compiled:
    compiling = Compiling(mesh)
    return compiling(compiling.everywhere, optimiser.optim_step, donate_argnames="policy")


@functools.lru_cache(maxsize=64)
def of_critic(mesh: Mesh, spec: CriticSpec) -> CriticPrograms:
    compiling = Compiling(mesh)
    apart, places = compiling.by_place, compiling.places
    return CriticPrograms(
        read=compiling(compiling.by_rows, critic.read, spec, **compiling.options),
        no_sums=compiling(apart, gradients.no_critic_sums, spec, places),
        accumulate=compiling(
            apart, gradients.accumulate_values, spec, places,
            donate_argnames="sums", **compiling.options,
        ),
        step=compiling(
            compiling.everywhere, optimiser.critic_step, donate_argnames=("critic", "critic_opt")
        ),
    )  # fmt: skip
