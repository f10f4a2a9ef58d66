"""The programs of a run, compiled for hardware that is not there, from shapes alone."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from marft_jax.config import BadInput, Config
from marft_jax.engine import compiled as engine
from marft_jax.engine import kv_cache as cache_lib
from marft_jax.learning import batch as batch_lib
from marft_jax.learning import learner
from marft_jax.learning.algorithms import Algorithm, settle
from marft_jax.learning.gradients import Targets
from marft_jax.learning.state import TrainState
from marft_jax.learning.values import reads_base
from marft_jax.models.decoder import DecoderConfig
from marft_jax.models.ops.attention import attention_on
from marft_jax.models.weights.load import abstract_decoder, fill, shapes_of
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.parallel import processes
from marft_jax.planning import hlo
from marft_jax.planning.topology import Topology
from marft_jax.planning.work import Work, longest_batch
from marft_jax.team.prompts import Team

Tell = Callable[[str], None]


class Compiled(NamedTuple):
    """One program for one chip.

    Attributes:
        seconds: that compiling took.
        arguments, results, kept, scratch, code: bytes; ``kept`` of the results lie where
            arguments lay.
        overflow: bytes that it needs at least, where the compiler found no room; else 0.
        traffic: its collectives.
    """

    seconds: float
    arguments: float = 0
    results: float = 0
    kept: float = 0
    scratch: float = 0
    code: float = 0
    overflow: float = 0
    traffic: hlo.Traffic = hlo.Traffic()

    @property
    def peak(self) -> float:
        """The most that it needs while it runs."""
        needed = self.arguments + self.results - self.kept + self.scratch + self.code
        return max(needed, self.overflow)


class Run(NamedTuple):
    """A configuration on a topology, as shapes with places.

    Attributes:
        mesh, here: all devices, and those of one process.
        base, state, slots, batch: abstract; ``batch`` holds host arrays.
        base_here: the base as a process's own programs see it.
    """

    config: Config
    team: Team
    algorithm: Algorithm
    model: DecoderConfig
    work: Work
    hosts: tuple[int, ...]
    mesh: Mesh
    here: Mesh
    shape: engine.Shape
    graphdef: Any
    base: Any
    base_here: Any
    state: TrainState
    slots: cache_lib.Slots
    batch: batch_lib.Batch
    engine: engine.Programs
    learner: learner.Programs


def describe(
    config: Config,
    team: Team,
    algorithm: Algorithm,
    model: DecoderConfig,
    work: Work,
    topology: Topology,
) -> Run:
    """Everything that a run would put on the devices, without doing so.

    Raises:
        BadInput: a mesh that the topology cannot have.
    """
    config, per_host = settle(config, model), topology.per_host
    mesh = mesh_lib.make_mesh(config.mesh, topology.devices, per_host)
    copies = mesh.shape["data"] // topology.hosts
    here = Mesh(np.asarray(topology.host).reshape(copies, *mesh.devices.shape[1:]), mesh_lib.AXES)
    dtype = jnp.dtype(config.model.dtype)
    graphdef, base = _base(config, model, mesh)
    slots = min(config.rollout.slots, processes.share(config.algo.episodes, topology.hosts))
    shape = engine.Shape(slots, config.rollout.chunk, work.context, work.action).on(here)
    alpha = config.lora.alpha
    played = engine.programs(model, graphdef, here, shape, dtype, eos_ids=(0,), alpha=alpha)
    learned = learner.programs(config, model, graphdef, team, algorithm, mesh)
    return Run(
        config, team, algorithm, model, work,
        tuple(i // per_host for i in range(len(topology.devices))),
        mesh, here, shape, graphdef, base, _base(config, model, here)[1],
        state=placed(learned.init.eval_shape(), mesh_lib.replicated(mesh)),
        slots=played.slots,
        batch=longest_batch(
            config, team, algorithm.level, work, mesh_lib.row_shards(mesh), model.d_model
        ),
        engine=played,
        learner=learned,
    )  # fmt: skip


def lowered(run: Run) -> dict[str, tuple[Any, Sequence[int]]]:
    """The programs of a step, ready for the compiler, and their devices' hosts."""
    here, everywhere = run.hosts[: run.here.size], run.hosts
    programs: dict[str, tuple[Any, Sequence[int]]] = {
        "gradients": (run.learner.accumulate.lower(**_gradients(run)), everywhere),
        "prefill": (run.engine.prefill.lower(**_prefill(run)), here),
        "decode": (run.engine.decode.lower(**_decode(run)), here),
        "optimiser": (run.learner.apply.lower(**_optimiser(run)), everywhere),
    }
    if reads_base(run.config):
        programs["values"] = (run.learner.score.lower(**_values(run)), everywhere)
    return programs


def compiled(run: Run, tell: Tell) -> dict[str, Compiled]:
    """Compiles all of these, one after another; each is told when it is done.

    libtpu takes all cores for one program, and can crash where two are compiled at once.
    """
    found = {}
    for name, (program, hosts) in lowered(run).items():
        found[name] = compile_one(program, hosts)
        layers, seconds = run.model.n_layers, found[name].seconds
        tell(f"{name} with {layers} layers: compiled in {seconds:.0f} s")
    return found


def extended(few: dict[str, Compiled], more: dict[str, Compiled], depths: Sequence[int]):
    """What programs of ``depths[2]`` layers need, from those of ``depths[0]`` and ``depths[1]``.

    All layers are alike, so everything grows linearly with their number; the seconds are the sum.
    """
    step = (depths[2] - depths[0]) / (depths[1] - depths[0])

    def line(a: Any, b: Any) -> Any:
        return tuple(max(0.0, x + (y - x) * step) for x, y in zip(a, b, strict=True))

    found = {}
    for name, a in few.items():
        b, none = more[name], hlo.Moved()
        kinds = {*a.traffic.kinds, *b.traffic.kinds}
        kinds = {
            k: hlo.Moved(*line(a.traffic.kinds.get(k, none), b.traffic.kinds.get(k, none)))
            for k in kinds
        }
        sizes = line(a[1:-1], b[1:-1]) if not (a.overflow or b.overflow) else b[1:-1]
        traffic = hlo.Traffic(kinds, b.traffic.endless)
        sizes = dict(zip(Compiled._fields[1:-1], sizes, strict=True))
        found[name] = Compiled(a.seconds + b.seconds, **sizes, traffic=traffic)
    return found


def placed(tree: Any, sharding: NamedSharding) -> Any:
    """Shapes with one place for all of them."""
    return jax.tree.map(lambda x: _at(x, sharding), tree)


def per_chip(tree: Any) -> int:
    """Bytes of arrays or shapes that lie on one chip."""
    return sum(
        int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def prompt_rows(run: Run) -> tuple[int, int]:
    """Rows and width of the largest prefill."""
    width = run.shape.width(run.work.context - run.work.action)
    return run.shape.prefill_rows(width, run.here)[-1], width


def _at(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _base(config: Config, model: DecoderConfig, mesh: Mesh) -> tuple[Any, Any]:
    dtype = jnp.dtype(config.model.dtype)
    attention = attention_on(mesh.devices.flat[0].platform)
    graphdef, abstract = abstract_decoder(
        model, dtype, attention=attention, remat=config.model.remat
    )
    shapes: Any = [
        (path, jax.ShapeDtypeStruct(s, dtype)) for path, s in shapes_of(abstract).items()
    ]

    def place(path: str, x: Any) -> Any:
        return _at(x, mesh_lib.base_sharding(mesh, path, x.shape))

    return graphdef, fill(abstract, shapes, place, "plan")


def _decode(run: Run) -> dict[str, Any]:
    return dict(
        base=run.base_here,
        adapters=_fused(run),
        slots=run.slots,
        leave_at=jax.ShapeDtypeStruct((), jnp.int32),
        chunk=run.shape.chunk,
        read=run.shape.context,
    )


def _fused(run: Run) -> Any:
    """The adapters, as the engine's programs take them."""
    fused = run.engine.fuse.eval_shape(run.state.adapters)
    return placed(fused, mesh_lib.replicated(run.here))


def _prefill(run: Run) -> dict[str, Any]:
    rows, width = prompt_rows(run)
    everywhere, split = mesh_lib.replicated(run.here), mesh_lib.rows(run.here)

    def column(dtype: Any, *more: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *more), dtype, sharding=split)

    return dict(
        base=run.base_here,
        adapters=_fused(run),
        slots=run.slots,
        key_2=jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=everywhere),
        tokens_BT=column(jnp.int32, width),
        lengths_B=column(jnp.int32),
        owners_B=column(jnp.int32),
        folds_B3=column(jnp.uint32, 3),
        settings=jax.tree.map(lambda x: column(x.dtype), run.slots.settings),
        slots_B=column(jnp.int32),
        starts_B=column(jnp.int32),
        sources_B=column(jnp.int32),
        read=0,
    )


def _values(run: Run) -> dict[str, Any]:
    read = run.batch.rows if run.batch.prompts is None else run.batch.prompts.rows
    return dict(base=run.base, critic=run.state.critic, r=_microbatch(run, read))


def _gradients(run: Run) -> dict[str, Any]:
    rows, state, algo = _microbatch(run, run.batch.rows), run.state, run.config.algo
    scored = run.learner.score.eval_shape(base=run.base, critic=state.critic, r=rows)
    tokens = jax.ShapeDtypeStruct(rows.mask_UBA.shape, jnp.float32)
    decisions = jax.ShapeDtypeStruct(run.batch.chain.shape_UBX[1:], jnp.float32)
    targets = Targets(
        decisions,
        decisions,
        scored.values_BX,
        scored.features_BXD,
        scored.reference_BA if algo.kl_in == "loss" else None,
        tokens if algo.correction != "none" else None,
    )
    return dict(
        base=run.base,
        adapters=state.adapters,
        critic=state.critic,
        rows=rows,
        targets=placed(targets, mesh_lib.rows(run.mesh)),
        total=_total(run),
    )


def _optimiser(run: Run) -> dict[str, Any]:
    trainable_N = jax.ShapeDtypeStruct((run.team.adapters,), bool)
    return dict(state=run.state, total=_total(run), trainable_N=trainable_N)


def _microbatch(run: Run, rows: batch_lib.Rows) -> Any:
    return placed(batch_lib.microbatches(rows)[0], mesh_lib.rows(run.mesh))


def _total(run: Run) -> Any:
    total = run.learner.zeros.eval_shape(run.state.adapters, run.state.critic)
    return placed(total, NamedSharding(run.mesh, P("data")))


def compile_one(program: Any, hosts: Sequence[int]) -> Compiled:
    """One lowered program, compiled and measured; ``hosts`` of its devices, in their order."""
    began = time.monotonic()
    try:
        program = program.compile()
    except jax.errors.JaxRuntimeError as error:
        needs = re.search(r"Used ([\d.]+)([KMGT]) of|\(([\d.]+)([KMGT])\) exceeds", str(error))
        if not needs:
            raise
        needs = [part for part in needs.groups() if part]
        size = float(needs[0]) * 2 ** (10 * (1 + "KMGT".index(needs[1])))
        return Compiled(time.monotonic() - began, overflow=size)
    seconds, memory = time.monotonic() - began, program.memory_analysis()
    return Compiled(
        seconds,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        traffic=hlo.traffic(_text(program), hosts),
    )


def _text(program: Any) -> str:
    try:
        return program.as_text()
    except jax.errors.JaxRuntimeError as error:
        raise BadInput(
            '--topology: this libtpu does not fit this jax; pip install -U "jax[tpu]" takes two '
            "that do"
        ) from error
