"""Compiles the programs of a run for hardware that is not present, from shapes alone."""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from marft_jax.engine import compiled as engine
from marft_jax.engine import kv_cache as cache_lib
from marft_jax.extras.planning.topology import Topology
from marft_jax.extras.planning.work import Work, longest_batch
from marft_jax.learning import learner as learner_lib
from marft_jax.learning.algorithms import Algorithm
from marft_jax.learning.batch import OfBase
from marft_jax.learning.objectives import critic_of, objective_of
from marft_jax.learning.settings import LearnerSettings, resolve
from marft_jax.learning.state import TrainState
from marft_jax.models import lora
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.models.weights.load import decoder_on
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.parallel import processes
from marft_jax.policy import optimiser, programs
from marft_jax.policy.gradients import GradientSpec
from marft_jax.policy.objective import Inputs
from marft_jax.policy.optimiser import adam
from marft_jax.policy.packing import PackedRows
from marft_jax.policy.rows import microbatches
from marft_jax.settings.config import Algo, Config, Rollout
from marft_jax.team.prompts import Team
from marft_jax.types import MAIN, Level


class Compiled(NamedTuple):
    """A compiled program, on one chip.

    Attributes:
        seconds: time to compile.
        arguments, results, scratch, code: bytes.
        kept: bytes of results that reuse the memory of arguments.
        overflow: bytes that the program needs at least, if the compiler found no room; else 0.
    """

    seconds: float
    arguments: float = 0
    results: float = 0
    kept: float = 0
    scratch: float = 0
    code: float = 0
    overflow: float = 0

    @property
    def peak(self) -> float:
        """Bytes that the program needs while it runs."""
        needed = self.arguments + self.results - self.kept + self.scratch + self.code
        return max(needed, self.overflow)


class PlannedRun(NamedTuple):
    """A configuration on a topology, as shapes with shardings.

    Attributes:
        mesh: all devices that learn.
        here: the devices of one process that play.
        hosts: number of hosts; each has one process.
        base, state, slots: abstract arrays; ``batch`` has host arrays, of decisions at
            the ``level``.
        base_here: the base on ``here``.
        forward, gradients, critic: programs that learn.
        taught: what teachers on the base read; None without teachers.
        teachers: their adapters; None where they have none.
    """

    config: Config
    learning: LearnerSettings
    team: Team
    model: DecoderConfig
    work: Work
    mesh: Mesh
    here: Mesh
    hosts: int
    shape: engine.Shape
    base: Any
    base_here: Any
    state: TrainState
    slots: cache_lib.Slots
    batch: OfBase
    level: Level
    engine: engine.EnginePrograms
    forward: programs.Compiled
    gradients: programs.GradientPrograms
    critic: programs.CriticPrograms | None
    taught: PackedRows | None = None
    teachers: Any = None

    @property
    def plays(self) -> bool:
        """True where our engine runs agents on the base; False where the base only teaches, or
        where another sampler runs the agents."""
        return bool(self.team.adapters) and isinstance(self.config.rollout, Rollout)


def describe(
    config: Config,
    team: Team,
    algorithm: Algorithm,
    model: DecoderConfig,
    work: Work,
    topology: Topology,
    taught: tuple[Team, Work] | None = None,
    place: tuple[int, int] = (0, 1),
) -> PlannedRun:
    """Describes all that a run puts on the devices, as shapes.

    Args:
        taught: the agents with teachers on the base, and their work, as ``work.on_base`` gives it.
        place: number of the base among those that play, and their number.

    Raises:
        BadInput: the mesh does not fit the topology.
    """
    hosts, devices = topology.hosts, topology.devices
    mesh, playing = mesh_lib.make_meshes(config.mesh, devices, topology.per_host)
    for each in (mesh, playing):
        mesh_lib.check_heads(each, model.heads)
    first = np.asarray(topology.host)[-playing.size // hosts :]
    here = Mesh(first.reshape(-1, *playing.devices.shape[1:]), mesh_lib.AXES)
    here = mesh_lib.parts(here, config.mesh.bases, place[1])[place[0]]
    dtype, alpha = jnp.dtype(config.model.dtype), config.lora.alpha
    model, graphdef, base = _base(config, model, mesh)
    rollout = config.rollout if isinstance(config.rollout, Rollout) else Rollout()  # nothing plays
    slots = min(rollout.slots, processes.share(config.algo.episodes, hosts))
    shape = engine.Shape(slots, rollout.chunk, work.context, work.action).on(here)
    played = engine.programs(
        model, graphdef, here, shape, dtype, eos_ids=(0,), alpha=alpha, reuse=rollout.reuse
    )
    settings = resolve(config, {MAIN: (config.model.base, model)})
    objective, agents = objective_of(settings, algorithm), len(team.profiles)
    configs = dict.fromkeys(team.adapters, model)
    init, _ = learner_lib.compiled(settings, configs, team, objective, mesh)
    critic = None
    if settings.critic is not None:
        critic = programs.of_critic(mesh, critic_of(settings, algorithm, graphdef, agents))
    gradients = programs.of_gradients(mesh, GradientSpec(graphdef, objective, agents))
    shards = mesh_lib.row_shards(mesh)
    batch = longest_batch(settings, team, algorithm.level, work, shards, model)
    run = PlannedRun(
        config, settings, team, model, work, mesh, here, hosts, shape, base,
        _base(config, model, here)[2], init.eval_shape(), played.slots, batch, algorithm.level,
        played, programs.forward(mesh, graphdef), gradients, critic,
    )  # fmt: skip
    if taught is None:
        return run
    read = longest_batch(settings, taught[0], "token", taught[1], shards, model)
    return run._replace(taught=read.rows, teachers=_teachers(run, taught[0]))


def lowered(run: PlannedRun) -> dict[str, Any]:
    """Lowers the programs of a step."""
    programs = _learning(run)
    if run.plays:
        programs["prefill"] = run.engine.prefill.lower(**_prefill(run))
        programs["decode"] = run.engine.decode.lower(
            **_played(run),
            stop_at=jax.ShapeDtypeStruct((), jnp.int32),
            chunk=run.shape.chunk,
            read=run.shape.context,
        )
    if run.taught is not None:
        taught = dict(base=run.base, adapters=run.teachers, scale=np.float32(1))
        programs["teacher"] = run.forward.lower(**taught, r=_microbatch(run, run.taught))
    return programs


def compiled(run: PlannedRun, log: Callable[[str], None]) -> dict[str, Compiled]:
    """Compiles the programs of a step, one after another, and logs each.

    Not at the same time: libtpu uses all cores for one program and may crash with two.
    """
    programs = {}
    for name, program in lowered(run).items():
        programs[name] = _compile(program)
        log(f"{name}: compiled in {programs[name].seconds:.0f} s")
    return programs


def placed(tree: Any, sharding: Any) -> Any:
    """Gives all shapes of a tree one sharding, or one with an order in memory."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def per_chip(tree: Any) -> int:
    """Returns the bytes of arrays or shapes on one chip."""
    leaves = jax.tree.leaves(tree)
    return sum(_bytes(math.prod(x.sharding.shard_shape(x.shape)), x.dtype) for x in leaves)


def _bytes(values: int, dtype: Any) -> int:
    four_bits = jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits == 4
    return values // 2 if four_bits else values * dtype.itemsize


def prompt_rows(run: PlannedRun) -> tuple[int, int]:
    """Returns rows and width of the largest prefill."""
    width = run.shape.width(run.work.context - run.work.action)
    return run.shape.prefill_rows(width, run.here)[-1], width


def _base(config: Config, model: DecoderConfig, mesh: Mesh) -> tuple[DecoderConfig, Any, Any]:
    platform = mesh.devices.flat[0].platform
    model, graphdef, base = decoder_on(platform, model, config.model)

    def place(_: Any, leaf: Any) -> Any:
        formats = functools.partial(mesh_lib.base_format, mesh, leaf.axes)
        return jax.tree.map(lambda x: placed(x, formats(x.shape)), leaf)

    return model, graphdef, nnx.map_state(place, base)


def _played(run: PlannedRun) -> dict[str, Any]:
    """Returns what all programs of the engine read."""
    fused = run.engine.fuse.eval_shape(run.state.adapters[MAIN])
    adapters = placed(fused, mesh_lib.replicated(run.here))
    return dict(base=run.base_here, adapters=adapters, slots=run.slots)


def _prefill(run: PlannedRun) -> dict[str, Any]:
    prompts = placed(engine.empty_prompts(*prompt_rows(run)), mesh_lib.rows(run.here))
    return _played(run) | dict(prompts=prompts, read=0)


def _learning(run: PlannedRun) -> dict[str, Any]:
    """Lowers the learner's programs for one microbatch."""
    if not run.team.adapters or not (run.team.learning_bases or run.learning.critic):
        return {}
    batch, critic, policy = run.batch, run.state.critic[MAIN], run.state.policies[MAIN]
    frozen = dict(base=run.base, critic=critic)
    scale = np.ones(lora.shape_of(policy.adapters)[0], np.float32)
    on_policy = dict(base=run.base, adapters=policy.adapters, scale=scale)
    rows, split = _microbatch(run, batch.rows), mesh_lib.rows(run.mesh)

    def numbers(packed: PackedRows) -> Any:
        shape_BX = packed.rows.decision_mask(run.level).shape[1:]
        return jax.ShapeDtypeStruct(shape_BX, jnp.float32, sharding=split)

    lowered, changed, read = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    if run.team.learning_bases:
        logprobs_BA = run.forward.eval_shape(**on_policy, r=rows)
        algo = run.learning.algo.part(Algo)
        tokens = {
            "proximal": run.learning.correction != "none",
            "reference": run.learning.reference != "none" and algo.kl_in == "loss",
        }
        units = ["advantages", "weights", "counts", *["entropy"] * bool(algo.entropy_coef)]
        inputs = Inputs(
            {name: numbers(batch.rows) for name in units},
            {name: logprobs_BA for name, is_read in tokens.items() if is_read},
        )
        sums = run.gradients.no_sums.eval_shape(policy.adapters)
        lowered["gradients"] = run.gradients.accumulate.lower(
            **on_policy, rows=rows, inputs=inputs, sums=sums
        )
        changed["policy"], read["policy"] = (policy,), (sums, adam(1.0, max_kl=algo.max_kl))
    if run.critic is not None:
        prompts = batch.rows if batch.prompts is None else batch.prompts
        asked = _microbatch(run, prompts)
        features_BXD = run.critic.read.eval_shape(**frozen, r=asked).features_BXD
        sums, opt = run.critic.no_sums.eval_shape(critic), run.state.critic_opt[MAIN]
        units = ("values", "returns", "weights", "counts")
        lowered["critic"] = run.critic.accumulate.lower(
            **frozen, rows=asked, inputs=Inputs(dict.fromkeys(units, numbers(prompts)), {}),
            features_BXD=features_BXD, sums=sums,
        )  # fmt: skip
        lowered["values"] = run.critic.read.lower(**frozen, r=asked)
        changed["critic"], read["critic"] = (critic, opt), (sums, adam(1.0))
    everywhere = mesh_lib.replicated(run.mesh)
    step = jax.jit(_steps, donate_argnums=0, out_shardings=everywhere)
    lowered["optimiser"] = step.lower(changed, read)
    if run.learning.reference == "base" and not run.learning.has_frozen_critic:
        alone = dict(base=run.base, adapters=None, scale=np.zeros(0, np.float32))
        lowered.setdefault("values", run.forward.lower(**alone, r=rows))
    return lowered


def _steps(changed: dict[str, Any], read: dict[str, Any]) -> dict[str, Any]:
    """All optimiser steps behind a minibatch in one program, where a run has one for each."""
    taken = {"policy": optimiser.optim_step, "critic": optimiser.critic_step}
    return {name: taken[name](*states, *read[name]) for name, states in changed.items()}


def _microbatch(run: PlannedRun, packed: PackedRows) -> Any:
    return placed(microbatches(packed.rows)[0], mesh_lib.rows(run.mesh))


def _teachers(run: PlannedRun, team: Team) -> Any:
    """Returns the adapters of a base's teachers as shapes; None where they have none."""
    pairs = zip(team.teachers, team.bases, strict=True)
    inits = {teacher.init for teacher, base in pairs if teacher and base == MAIN}
    if not any(inits):
        return None
    settings, adapters = run.config.lora, range(len(inits))
    fresh = functools.partial(
        lora.init, config=run.model, adapters=adapters, rank=settings.rank, targets=settings.targets
    )
    return placed(jax.eval_shape(fresh, jax.random.key(0)), mesh_lib.replicated(run.mesh))


def _compile(program: Any) -> Compiled:
    """Compiles a lowered program and measures it."""
    began = time.monotonic()
    try:
        program = program.compile()
    except jax.errors.JaxRuntimeError as error:
        needs = re.search(r"(?:Used |\()([\d.]+)([KMGT])(?: of|\) exceeds)", str(error))
        if not needs:
            raise
        size = float(needs[1]) * 2 ** (10 * (1 + "KMGT".index(needs[2])))
        return Compiled(time.monotonic() - began, overflow=size)
    memory = program.memory_analysis()
    return Compiled(
        time.monotonic() - began,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
    )
