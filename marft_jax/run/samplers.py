"""Opens the sampler that the settings name, for the team of a run, and what it is given."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from marft_jax.engine.compiled import Shape
from marft_jax.engine.engine import Engine
from marft_jax.errors import BadInput
from marft_jax.interop import peft
from marft_jax.models import lora
from marft_jax.models.weights.load import BaseModel, copy_base
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.parallel import processes
from marft_jax.policy import Datum, forward, pack
from marft_jax.policy.optimiser import PolicyState
from marft_jax.policy.policy import policy_of
from marft_jax.run.models import TeamModels
from marft_jax.sampling.bases import SamplerOfBases
from marft_jax.sampling.constraints import forms_of
from marft_jax.sampling.protocol import Sampler
from marft_jax.sampling.settings import (
    AdapterTools,
    Matrices,
    SampledBase,
    SamplerSetup,
    Scored,
    make_sampler,
)
from marft_jax.settings.config import Branching, Rollout
from marft_jax.types import MAIN


@contextlib.contextmanager
def open_sampler(
    models: TeamModels, at_once: int | None = None, folder: Path | None = None
) -> Iterator[Sampler]:
    """Opens the sampler: an engine for each base, or that of a user's own. When it is closed, it is
    released.

    Args:
        at_once: the most turns that are sampled together; more slots would stay idle. By default
            the episodes of a training step, with the branches of their turns.
        folder: the run directory, where the team trains.

    Raises:
        BadInput: the devices that play cannot be shared, or a user's sampler cannot be made.
    """
    config = models.config
    sampled = {name: _sampled(name, base, models) for name, base in models.bases.items()}
    if isinstance(config.rollout, Rollout):
        at_once = at_once or config.algo.episodes * max(1, config.algo.part(Branching).branches)
        slots = min(config.rollout.slots, processes.share(at_once, jax.process_count()))
        settings = dataclasses.replace(config.rollout, slots=slots)
        playing = models.devices.playing.local_mesh
        meshes = mesh_lib.parts(playing, config.mesh.bases, len(sampled))
        engines = {
            name: _open_engine(name, models, sampled[name], settings, mesh)
            for name, mesh in zip(sampled, meshes, strict=True)
        }
        sampler = SamplerOfBases(engines)
    else:
        process = f"{config.run.dir} {jax.process_index()}" if folder else ""
        seed, alpha = config.run.seed, config.lora.alpha
        setup = SamplerSetup(config.rollout, sampled, seed, alpha, folder, process)
        sampler = make_sampler(setup)
    try:
        yield sampler
    finally:
        sampler.release()


def engine_on(
    base: BaseModel,
    mesh: Mesh,
    shape: Shape,
    *,
    adapters: int,
    rank: int,
    targets: Sequence[str],
    seed: int = 0,
) -> Engine:
    """Opens an engine without a team, on a base that others may share, with a stack of adapters
    that change nothing until each is replaced (``Engine.replace``)."""
    engine = _engine(base, mesh, shape, seed, alpha=1.0)
    stack = lora.empty(base.config, adapters=adapters, rank=rank, targets=targets)
    engine.load({MAIN: jax.device_put(stack, mesh_lib.replicated(mesh))}, "")
    return engine


def _sampled(name: str, base: BaseModel, models: TeamModels) -> SampledBase:
    """What a sampler has to know of a base and of the agents on it."""
    team = models.team
    members = [agent for agent, base_of_agent in enumerate(team.bases) if base_of_agent == name]
    return SampledBase(
        source=base.source,
        adapters=team.adapter_names[name],
        eos_ids=tuple(base.tokenizer.eos_ids),
        decode=base.tokenizer.decode,
        context=max(team.contexts[i] for i in members),
        longest=max(team.sampling[i].max_new_tokens for i in members),
        vocabulary=base.config.vocab_size,
        tools=adapter_tools(models, name),
    )


def _open_engine(
    name: str, models: TeamModels, sampled: SampledBase, settings: Rollout, mesh: Mesh
) -> Engine:
    """Opens the engine of a base on a mesh, which gets a copy of the base where it only plays."""
    base, devices, config = models.bases[name], models.devices, models.config
    held = devices.learning.local_mesh if devices.are_apart else mesh
    params = mesh_lib.placed(base.params, held)
    if devices.are_apart:
        params = copy_base(params, mesh_lib.placer(mesh))
    shape = Shape(settings.slots, settings.chunk, sampled.context, sampled.longest)
    base, seed, alpha = base._replace(params=params), config.run.seed, config.lora.alpha
    return _engine(base, mesh, shape, seed, alpha, name, settings.reuse)


def _engine(
    base: BaseModel,
    mesh: Mesh,
    shape: Shape,
    seed: int,
    alpha: float,
    name: str = MAIN,
    reuse: bool = True,
) -> Engine:
    return Engine(
        base.config,
        base.graphdef,
        base.params,
        mesh,
        shape,
        eos_ids=base.tokenizer.eos_ids,
        seed=seed,
        alpha=alpha,
        decode=base.tokenizer.decode,
        name=name,
        reuse=reuse,
        forms=forms_of(base.tokenizer, base.config.vocab_size),
    )


def adapter_tools(models: TeamModels, name: str) -> AdapterTools:
    """Makes what draws, writes and scores the adapters of a base, for a sampler elsewhere."""
    config, base, count = models.config.lora, models.bases[name], models.team.adapters[name]
    mesh = models.devices.learning.local_mesh

    def draw() -> Matrices:
        key, rank = jax.random.key(0), config.rank
        drawn = lora.init(
            key, base.config, adapters=range(count), rank=rank, targets=config.targets
        )
        return jax.device_get(drawn)

    def write(folder: Path, matrices: Matrices, each_expert: bool) -> None:
        if unnamed := peft.unnamed(base.config.files, config.targets):
            raise BadInput(
                f"--lora.targets: the checkpoint of {base.source} has other matrices than "
                f"{', '.join(unnamed)}, so that an adapter of peft cannot name them; use "
                "--rollout.sampler engine, or other targets"
            )
        inside, spelling = peft.layers_in(base.source), dict(base.config.spelling)
        layers_with, source = base.config.layers_with, base.source
        peft.write(
            folder, matrices, config.alpha, source, inside, layers_with, spelling, each_expert
        )

    def score(stacks: Sequence[Matrices], actions: Sequence[Scored]) -> list[np.ndarray]:
        none = jax.tree.map(lambda x: np.zeros_like(x[:1]), stacks[0])
        whole = jax.tree.map(lambda *x: np.concatenate(x), *stacks, none)
        n, _ = lora.shape_of(whole)
        state = PolicyState(mesh_lib.put(whole, mesh_lib.replicated(mesh)), ())
        local_base = base._replace(params=mesh_lib.placed(base.params, mesh))
        policy = policy_of(local_base, mesh, state, config.alpha)
        data = [
            Datum.of(
                adapter % n,
                ids=np.concatenate([prompt, action[:-1]]),
                positions=np.arange(len(action)) + len(prompt) - 1,
                targets=action,
                temperature=temperature or 1.0,
            )
            for prompt, action, adapter, temperature in actions
        ]
        return forward(policy, pack(policy, data))

    return AdapterTools(draw, write, score)
