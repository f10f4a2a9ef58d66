"""Programs compiled for GPUs and TPUs that are not there: what they move, copy, keep and exchange.

    bash scripts/check_compiled.sh      # makes an environment of its own; prints the table

Of Qwen2.5-1.5B with few layers where they are unrolled, with all where they are scanned. Nothing
is run: what a device makes of it is another question.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import hlo
import jax
import pytest
from loops import Loop, arrays, loops

from marft_jax import cli
from marft_jax.extras.planning import cost
from marft_jax.extras.planning.chips import GPUS
from marft_jax.extras.planning.compile import PlannedRun, _prefill, describe, lowered, per_chip
from marft_jax.extras.planning.topology import find_topology
from marft_jax.extras.planning.work import step_work
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer
from marft_jax.models.weights.sources import decoder_config
from marft_jax.team.assemble import make_team, workflow_of
from marft_jax.team.team_files import load_team
from marft_jax.types import MAIN

REPOSITORY = Path(__file__).resolve().parents[3]
FOUND: dict[str, dict[str, object]] = {}


def needs(*modules: str, extra: str):
    """Skips where none of these is installed, or programs are compiled for tests."""
    there = any(map(importlib.util.find_spec, modules)) and os.environ.get("MARFT_OPTIMISED") == "1"
    why = f'bash scripts/check_compiled.sh runs it, with pip install -e ".[{extra}]"'
    return pytest.mark.skipif(not there, reason=why)


GPU = needs("jax_cuda12_plugin", "jax_cuda13_plugin", extra="gpu-plans")
TPU = needs("libtpu", extra="tpu")
H100 = pytest.param("h100:1", 8, ("--mesh.tensor", "1"), marks=GPU, id="h100")
V5E = pytest.param("v5e:2x2", 28, (), marks=TPU, id="v5e")


def of_model(name: str, *targets: str) -> tuple[str, ...]:
    """Flags of another model, with adapters on these matrices."""
    base = REPOSITORY / "configs" / "models" / name
    return ("--model.base", str(base), "--lora.targets", *targets)


MIXTURE = of_model("qwen3-30b-a3b", "q", "k", "v", "o")
HYBRID = of_model("qwen3.5-9b", "q", "in_proj_qkv", "out_proj")
READERS = of_model("gemma-4-e4b", "q", "v")
V5E_READERS = pytest.param("v5e:2x2", 42, READERS, marks=TPU, id="v5e, Gemma 4 E4B")
V5E_HYBRID = pytest.param("v5e:2x2", 32, HYBRID, marks=TPU, id="v5e, Qwen3.5")


@pytest.fixture(scope="module", autouse=True)
def findings() -> Iterator[None]:
    """Written where MARFT_FINDINGS names a file."""
    yield
    if FOUND and (file := os.environ.get("MARFT_FINDINGS")):
        Path(file).write_text(json.dumps(FOUND, indent=1) + "\n")


@functools.cache
def run_of(topology: str, layers: int, flags: tuple[str, ...]) -> PlannedRun:
    plan = REPOSITORY / "configs" / "plans" / "qwen2.5-1.5b.yaml"
    base = REPOSITORY / "configs" / "models" / "qwen2.5-1.5b"
    config = cli.parse(["--config", str(plan), "--model.base", str(base), *flags])
    model = decoder_config(config.model.base)
    model = dataclasses.replace(model, layers=model.layers[-layers:])  # a hybrid's last: attention
    blueprint = load_team(config.team.file)
    bases = {MAIN: (ByteTokenizer(), config.model.context)}
    team = make_team(config.team, config.lora.mode, blueprint, bases)
    work = step_work(config, team, workflow_of(config.team, blueprint))
    algorithm = find_algorithm(config.algo.name)
    return describe(config, team, algorithm, model, work, find_topology(topology))


@functools.cache
def text_of(program: str, topology: str, layers: int, flags: tuple[str, ...]) -> str:
    return lowered(run_of(topology, layers, flags))[program].compile().as_text()


def step_of(topology: str, layers: int, flags: tuple[str, ...], cache: float = 0) -> Loop:
    """A step of decoding."""
    text = text_of("decode", topology, layers, flags)
    return loops(text, [0] * run_of(topology, layers, flags).here.size, cache)[0]


def cache_of(topology: str) -> float:
    kind = topology.partition(":")[0]
    return GPUS[kind].cache if kind in GPUS else 0


def dims_of(array: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", array.partition("[")[2])]


def gb(size: float) -> float:
    return round(size / 1e9, 3)


@pytest.mark.parametrize("topology, layers, flags", [H100, V5E, V5E_HYBRID, V5E_READERS])
def test_a_step_of_decoding_moves_weights_cache_and_logits_once(topology, layers, flags):
    run, loop = run_of(topology, layers, flags), step_of(topology, layers, flags)
    least = cost.decode_bytes(run)
    moved = step_of(topology, layers, flags, cache_of(topology)).moved
    FOUND[f"decode, {topology}, {layers} layers, {run.model.d_model} wide"] = {
        "needed, GB": gb(least), "moved": gb(moved), "with what a cache may hold": gb(loop.moved),
        "copies, MB": {shape: round(n / 1e6, 1) for shape, n in loop.copies.items() if n > 1e5},
    }  # fmt: skip
    assert least <= moved <= 1.15 * least


@pytest.mark.parametrize("topology, layers, flags", [H100, V5E, V5E_HYBRID])
def test_decoding_copies_no_weight_and_no_layer_of_the_cache(topology, layers, flags):
    run, loop = run_of(topology, layers, flags), step_of(topology, layers, flags)
    copied = {math.prod(dims_of(shape)) for shape in loop.copies}
    leaves = jax.tree.leaves((run.base_here, run.slots.cache))
    shapes = [leaf.sharding.shard_shape(leaf.shape) for leaf in leaves if leaf.ndim > 1]
    large = {math.prod(shape) for shape in shapes}
    periods = {segment.periods for segment in run.model.segments}
    large |= {math.prod(shape[1:]) for shape in shapes if shape[0] in periods}
    assert not {n for n in copied & large if n > 1e5}
    # a copy of anything that grows with the model would be more than a thousandth
    assert max(loop.copies.values()) < 1e-3 * cost.decode_bytes(run)


@TPU
@pytest.mark.parametrize("slots", ["64", "8"])
def test_a_step_of_decoding_reads_experts_where_they_lie(slots):
    """A kernel is given all experts of all layers and reads those that have rows, which its text
    does not say; everything else that moves is counted."""
    flags = (*MIXTURE, "--rollout.slots", slots)
    run, loop = run_of("v5e:2x2", 4, flags), step_of("v5e:2x2", 4, flags)
    leaves = jax.tree.leaves(run.base_here["layers"][0]["mlp"])
    experts = [(x.shape[1], per_chip(x)) for x in leaves if x.ndim == 5]  # [L, pieces, E, in, out]
    given = 4 * sum(pieces * size for pieces, size in experts)
    chosen = 1 - (1 - 8 / 128) ** run.shape.slots
    read = loop.moved - given + chosen * sum(size for _, size in experts)
    least = cost.decode_bytes(run)
    FOUND[f"decode, v5e, Qwen3-30B-A3B, 4 layers, {slots} slots"] = {
        "needed, GB": gb(least), "moved": gb(read),
    }  # fmt: skip
    assert least <= read <= 1.2 * least


@GPU
def test_a_base_in_eight_bits_is_decoded_with_less_than_bfloat16_takes():
    flags, kind = ("--mesh.tensor", "1"), "int8"
    plain = step_of("h100:1", 8, flags, cache_of("h100:1"))
    packed = step_of("h100:1", 8, (*flags, "--model.quantize", kind), cache_of("h100:1"))
    saved = [per_chip(run_of("h100:1", 8, (*flags, *more)).base_here)
             for more in ((), ("--model.quantize", kind))]  # fmt: skip
    FOUND[f"decode, h100:1, 8 layers, {kind}"] = {"moved": gb(packed.moved)}
    assert plain.moved - packed.moved > 0.9 * (saved[0] - saved[1])


@pytest.mark.parametrize(
    "topology, layers, flags",
    [
        pytest.param("h100:1", 2, ("--mesh.tensor", "1"), marks=GPU, id="h100"),
        V5E,
        pytest.param("v5e:2x2", 2, HYBRID, marks=TPU, id="v5e, delta net and attention"),
    ],
)
def test_an_update_keeps_no_scores(topology, layers, flags):
    run, text = run_of(topology, layers, flags), text_of("gradients", topology, layers, flags)
    _, rows, width = run.batch.rows.rows.tokens.ids_BT.shape
    for array in arrays(text):
        dims = dims_of(array)
        scores = dims.count(width) > 1 and math.prod(dims) > rows * width * width
        assert not scores, array


@GPU
def test_cudnn_runs_once_forward_and_once_backward_in_a_layer():
    text = text_of("gradients", "h100:1", 2, ("--mesh.tensor", "1"))
    called = re.findall(r'custom_call_target="__cudnn\$(\w+)"', text)
    FOUND["gradients, h100:1, 2 layers"] = {"kernels": {k: called.count(k) for k in set(called)}}
    assert sorted(called) == ["fmhaScaleBiasSoftmax"] * 2 + ["fmhaScaleBiasSoftmaxBackward"] * 2


@pytest.mark.parametrize(
    "topology, flags",
    [pytest.param("h100:8", ("--mesh.tensor", "4"), marks=GPU, id="h100, fewer heads than places"),
     pytest.param("h100:2", ("--mesh.tensor", "2"), marks=GPU, id="h100")],
)  # fmt: skip
def test_a_layer_sums_twice_over_tensor_and_exchanges_nothing_large_besides(topology, flags):
    """What each further layer adds to a step of decoding."""
    less, more = (step_of(topology, layers, flags).collectives.kinds for layers in (2, 4))
    added = {kind: (more[kind, False].payload - less.get((kind, False), (0, 0, 0))[0]) / 2
             for kind, _ in more}  # fmt: skip
    run = run_of(topology, 2, flags)
    rows = run.shape.slots // run.here.shape["data"]
    sums = 2 * 2 * rows * run.model.d_model
    FOUND[f"decode, {topology}, {' '.join(flags)}"] = {"exchanged a layer, bytes": added}
    assert sums <= added["all-reduce"] <= 1.15 * sums
    assert sum(added.values()) < 1.35 * sums


@GPU
def test_places_along_data_exchange_nothing_but_sums_of_gradients():
    where = ("h100:2", 2, ("--mesh.tensor", "1"))
    run, programs = run_of(*where), lowered(run_of(*where))
    copied = run.engine.prefill.lower(**_prefill(run) | {"read": run.shape.context})
    programs["prefill, prefixes copied"] = copied
    for name, program in programs.items():
        moved = hlo.traffic(program.compile().as_text(), [0, 0]).moved(across=False)
        FOUND[f"{name}, h100:2 along data"] = {"payload, bytes": moved.payload}
        gradients = per_chip(run.state.adapters) + per_chip(run.state.critic)
        assert moved.payload <= (1.05 if name == "optimiser" else 1e-4) * gradients, name
