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


def compiled(
    mesh: Mesh,
    sharding: Any,
    function: Callable[..., Any],
    *fixed: Any,
    reads_base: bool = False,
    **options: Any,
) -> Compiled:
    """Makes a function that is compiled on a mesh when it is first called.

    Args:
        sharding: of its results.
        fixed: its first arguments, constants of the program.
        reads_base: it runs through a base.
        options: further options of ``jax.jit``.
    """
    if reads_base:
        options["compiler_options"] = compilation.compiler_options(mesh)
    run = functools.partial(mesh_lib.with_mesh(mesh, function), *fixed)
    return mesh_lib.serialised(mesh, jax.jit(run, out_shardings=sharding, **options))


@functools.lru_cache(maxsize=64)
def forward(mesh: Mesh, graphdef: logprobs.Graph) -> Compiled:
    return compiled(mesh, mesh_lib.rows(mesh), logprobs.forward, graphdef, reads_base=True)


@functools.lru_cache(maxsize=16)
def top(mesh: Mesh, graphdef: logprobs.Graph, k: int) -> Compiled:
    return compiled(mesh, mesh_lib.rows(mesh), logprobs.top_tokens, graphdef, k, reads_base=True)


@functools.lru_cache(maxsize=64)
def of_gradients(mesh: Mesh, spec: GradientSpec) -> GradientPrograms:
    by_place, places = _by_place(mesh)
    return GradientPrograms(
        no_sums=compiled(mesh, by_place, gradients.no_sums, spec, places),
        accumulate=compiled(
            mesh, (by_place, mesh_lib.rows(mesh)), gradients.accumulate, spec, places,
            reads_base=True, donate_argnames="sums",
        ),
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def optim_step(mesh: Mesh) -> Compiled:
    everywhere = mesh_lib.replicated(mesh)
    return compiled(mesh, everywhere, optimiser.optim_step, donate_argnames="policy")


@functools.lru_cache(maxsize=64)
def of_critic(mesh: Mesh, spec: CriticSpec) -> CriticPrograms:
    by_place, places = _by_place(mesh)
    return CriticPrograms(
        read=compiled(mesh, mesh_lib.rows(mesh), critic.read, spec, reads_base=True),
        no_sums=compiled(mesh, by_place, gradients.no_critic_sums, spec, places),
        accumulate=compiled(
            mesh, by_place, gradients.accumulate_values, spec, places,
            reads_base=True, donate_argnames="sums",
        ),
        step=compiled(
            mesh, mesh_lib.replicated(mesh), optimiser.critic_step,
            donate_argnames=("critic", "critic_opt"),
        ),
    )  # fmt: skip


def _by_place(mesh: Mesh) -> tuple[NamedSharding, int]:
    """Sharding of sums of each place's rows, and number of places along the ``data`` axis."""
    return NamedSharding(mesh, P("data")), mesh.shape["data"]
