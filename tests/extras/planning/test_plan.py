"""Plans: what programs need and move, found without running them."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from commands import code_of

from marft_jax import cli
from marft_jax.extras.planning import command as plan_lib
from marft_jax.extras.planning import cost, planner, verdict
from marft_jax.extras.planning.chips import Chip
from marft_jax.extras.planning.compile import Compiled, describe, lowered, per_chip
from marft_jax.extras.planning.topology import find_topology
from marft_jax.extras.planning.work import step_work
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.settings import Appo
from marft_jax.models import decoder
from marft_jax.models.weights import tiny as tiny_model
from marft_jax.run.models import open_models
from marft_jax.run.samplers import open_sampler
from marft_jax.run.states import make_learner
from marft_jax.settings import config as config_lib
from marft_jax.team.team_files import load_team
from marft_jax.types import MAIN

TWO_HOSTS = [0, 0, 0, 0, 1, 1, 1, 1]


# What a configuration needs.


def settings(**sections) -> config_lib.Config:
    default = dict(rollout=config_lib.Rollout(slots=8), model=config_lib.Model(context=64))
    default["algo"] = Appo(episodes=8, microbatch_tokens=512)
    return small.config(**(default | sections))


def run_of(config: config_lib.Config, model=small.CONFIG, topology: str = "cpu:2x4"):
    algorithm, team = find_algorithm(config.algo.name), small.team(max_new_tokens=16)
    work = step_work(config, team, "sequential")
    return describe(config, team, algorithm, model, work, find_topology(topology))


@functools.cache
def tiny() -> verdict.Plan:
    """The quickstart on two hosts."""
    algo = Appo(episodes=32, microbatch_tokens=2048)
    team = config_lib.Team(max_new_tokens=8)
    config = settings(mesh=config_lib.Mesh(tensor=2), team=team, algo=algo)
    [found] = planner.plans(config, find_topology("cpu:2x4")).values()
    return found


@pytest.mark.release
def test_each_base_is_planned_beside_what_the_others_hold(tmp_path):
    team = """
        bases: {large: {model: tiny, context: 64}, wise: {model: tiny}}
        teacher: {base: wise}
        agents:
          - {name: planner, base: large, trainable: false}
          - {name: solver, answers: true}"""
    (tmp_path / "team.yaml").write_text(team)
    words = ["--team.file", str(tmp_path / "team.yaml"), "--algo.name", "distill"]
    found = planner.plans(cli.parse(words), find_topology("cpu:1"))
    assert {*found["large"].programs} == {"prefill", "decode"}  # nothing learns there
    assert {*found["wise"].programs} == {"teacher"}
    alone, _ = verdict.memory_of(found["main"].run, found["main"].programs)
    _, peaks = verdict.memory_of(found["large"].run, found["large"].programs)
    always = sum(alone[name] for name in ("weights", "adapters", "critic", "optimiser"))
    always += found["wise"].memory["weights"]
    assert found["large"].peaks["decode"] == peaks["decode"] + always + alone["cache"]
    assert found["large"].memory["optimiser"] == 0 < found["main"].memory["optimiser"]
    held = {name for name, size in found["wise"].memory.items() if size}
    assert held == {"weights", "activations"}
    assert found["wise"].costs["teacher"].flops < found["main"].costs["gradients"].flops / 2
    assert [found[base].run.work.turns for base in ("large", "main", "wise")] == [64] * 3


@pytest.mark.parametrize(
    "mesh, layers",
    [((-1, 1, 4), "unrolled"), ((-1, 4, 1), "unrolled"), ((-1, 2, 2), "stacked")],
    ids=str,
)
@pytest.mark.release
def test_hosts_exchange_gradients_and_never_the_base(mesh, layers):
    """At most 1.2 times the gradients of adapters and critic in an optimiser step, however large
    the base is and however many microbatches a step has."""
    config = settings(
        mesh=config_lib.Mesh(*mesh),
        algo=Appo(episodes=32, microbatch_tokens=512),
        model=config_lib.Model(context=64, layers=layers),
    )
    run = run_of(config, small.config_of(d_ff=64 * 16, n_layers=1))
    assert len(run.batch.rows.rows.tokens.ids_BT) >= 2 * config.algo.minibatches
    programs = lowered(run)
    gradients = per_chip(run.state.adapters) + per_chip(run.state.critic)
    micros = len(run.batch.rows.rows.tokens.ids_BT) / config.algo.minibatches
    calls = {"gradients": micros, "critic": micros, "optimiser": 1}
    found = {n: hlo.traffic(programs[n].compile().as_text(), TWO_HOSTS) for n in calls}
    across = sum(n * found[name].moved(across=True).payload for name, n in calls.items())
    assert 0.9 * gradients < across < 1.2 * gradients
    assert not any(each.endless for each in found.values())


def test_a_plan_counts_no_microbatch_that_has_no_rows():
    batch = run_of(settings(algo=Appo(episodes=32, microbatch_tokens=512))).batch
    assert batch.prompts is not None
    for rows in (batch.rows.rows, batch.prompts.rows):
        assert len(rows.actions.mask_BA) > 4 and (rows.actions.mask_BA > 0).any((1, 2)).all()


def test_what_a_plan_counts_is_what_a_run_holds():
    where = config_lib.Mesh(data=4, tensor=2)
    config = settings(mesh=where, team=config_lib.Team(max_new_tokens=16))
    planned, _ = verdict.memory_of(run_of(config, tiny_model.CONFIG, "cpu:8"), {})
    with open_models(config, load_team(None)) as models, open_sampler(models) as sampler:
        state = make_learner(models).init()
        sampler.load(state.adapters, "")
        held = {
            "weights": models.bases[MAIN].params,
            "adapters": state.adapters,
            "critic": state.critic,
            "optimiser": ([p.adapters_opt for p in state.policies.values()], state.critic_opt),
            "cache": sampler.samplers[MAIN]._slots,
        }
        for name, tree in held.items():
            on_one = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
            assert planned[name] == on_one, name


def test_with_a_lag_the_cache_lies_beside_the_update():
    """And the adapters that sample the steps in flight: as many more as the lag."""
    found = []
    for lag in (0, 2):
        run = run_of(settings(rollout=config_lib.Rollout(slots=8, lag=lag)), topology="cpu:1")
        found.append(verdict.memory_of(run, {"gradients": Compiled(0.0)}))
    (plain, alone), (held, ahead) = found
    assert held["adapters"] - 2 * 2 * 4 == 3 * plain["adapters"]  # and the curriculum's progress
    more = held["cache"] + held["adapters"] - plain["adapters"]
    assert ahead["gradients"] - alone["gradients"] == more


@pytest.mark.release
def test_where_another_sampler_plays_the_learner_is_planned_alone():
    elsewhere = config_lib.RolloutSettings(sampler="own:Sampler", lag=1)
    run = run_of(settings(rollout=elsewhere))
    assert {*lowered(run)} == {"values", "gradients", "critic", "optimiser"}
    memory, _ = verdict.memory_of(run, {})
    assert memory["cache"] == 0 < memory["weights"]
    told = verdict.verdict(cramped(1e12, run=run))
    assert "sampled elsewhere" in told


def test_a_base_is_planned_on_the_places_that_play_it():
    config, team = settings(mesh=config_lib.Mesh(bases=(3, 1))), small.team(max_new_tokens=16)
    work, where = step_work(config, team, "sequential"), find_topology("cpu:4")
    how = find_algorithm(config.algo.name), small.CONFIG, work, where
    runs = [describe(config, team, *how, place=(n, 2)) for n in (0, 1)]
    assert [(run.here.size, run.mesh.size) for run in runs] == [(3, 4), (1, 4)]
    assert [len(run.slots.length_S) for run in runs] == [9, 8]


def test_devices_that_play_hold_the_cache_and_those_that_learn_the_state():
    """With or without a lag; both hold a copy of the base."""
    rollout = config_lib.Rollout(slots=8, lag=2)
    apart = config_lib.Mesh(tensor=2, rollout=(2, 1, 2))
    run = run_of(settings(rollout=rollout, mesh=apart), topology="cpu:2x4")
    assert run.here.devices.shape == (1, 1, 2) and run.mesh.devices.shape == (2, 1, 2)
    assert run.here.devices.flat[0].id == 2  # the last ones of a host
    assert per_chip(run.base_here) == per_chip(run.base)
    names = ("prefill", "decode", "values", "gradients", "optimiser")
    memory, peaks = verdict.memory_of(run, dict.fromkeys(names, Compiled(0.0)))
    assert peaks["decode"] == peaks["prefill"] == memory["adapters"]
    assert peaks["values"] == memory["optimiser"]
    assert peaks["gradients"] == memory["optimiser"] + 2 * memory["critic"]  # and its gradients
    assert peaks["optimiser"] == memory["weights"]


def test_a_process_has_slots_for_its_own_episodes_in_a_plan_and_in_a_run(monkeypatch):
    config = settings(algo=Appo(episodes=24))
    assert run_of(config, topology="cpu:3x2").shape.slots == 8
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    with open_models(config, load_team(None)) as models, open_sampler(models) as sampler:
        assert sampler.capabilities.at_once == 8


def test_every_part_of_a_chips_memory_is_in_the_peak():
    plan = tiny()
    learning = {"values", "gradients", "critic", "optimiser"}
    assert set(plan.programs) == {"decode", "prefill", *learning}
    parts = sum(plan.memory.values())
    assert max(plan.memory.values()) < plan.peak < 1.5 * parts
    for name, program in plan.programs.items():
        base = 0 if name == "optimiser" else plan.memory["weights"]
        adapters = 0 if name == "values" or "critic" in name else plan.memory["adapters"]
        assert program.arguments >= base + adapters, name


def test_arithmetic_is_counted_as_xla_counts_it_where_there_is_no_loop():
    model = small.config_of(d_ff=256, d_model=128, head_dim=32, vocab_size=300)
    graphdef, base = small.abstract_decoder(model, jnp.float32)
    tokens = jax.ShapeDtypeStruct((4, 32), jnp.int32)
    run = jax.jit(lambda base, x: decoder.forward(graphdef, base, x, x, x)[0])
    counted = run.lower(base, tokens).compile().cost_analysis()["flops"]
    # products alone are counted; the rest is less than a tenth
    assert cost.forward_flops(model, 4 * 32, 32) == pytest.approx(counted, rel=0.1)


def test_a_layer_that_slides_reads_no_more_than_its_window():
    model = small.config_of(window=8, sliding=(True, False))
    saved = cost.forward_flops(small.CONFIG, 128, 32) - cost.forward_flops(model, 128, 32)
    assert saved == 4 * 128 * (32 - 8) * 4 * 8
    assert cost.forward_flops(model, 128, 8) == cost.forward_flops(small.CONFIG, 128, 8)


# What to change.


def cramped(memory: float, **changes) -> verdict.Plan:
    """The plan on chips with that much memory."""
    chip = Chip(1e12, memory, 1e12)
    plan = tiny()
    return plan._replace(topology=plan.topology._replace(chip=chip), **changes)


def test_a_plan_says_whether_it_fits_and_what_to_change():
    plan = tiny()
    assert "no limit" in verdict.verdict(plan)
    assert "fits: peak" in verdict.verdict(cramped(2 * plan.peak))
    playing = {name: plan.peaks[name] for name in ("prefill", "decode")}
    short = cramped(max(playing.values()) - 0.5 * plan.memory["cache"], peaks=playing)
    half = plan.run.shape.slots // 2
    assert not short.fits and f"--rollout.slots {half} " in verdict.verdict(short)
    shorter = cramped(plan.peak - 2 * plan.memory["cache"])
    assert "--algo.microbatch_tokens" in verdict.advice(shorter)
    heavy = cramped(1.5 * plan.memory["weights"])
    assert "--model.dtype bfloat16" in verdict.advice(heavy)
    model = dataclasses.replace(plan.run.config.model, dtype="bfloat16")
    run = plan.run._replace(config=dataclasses.replace(plan.run.config, model=model))
    assert "--mesh.tensor 4" in verdict.advice(heavy._replace(run=run))


def test_all_numbers_are_plain_and_told(capsys):
    told = json.loads(json.dumps(verdict.numbers(cramped(1e12))))
    assert told["fits"] and told["peak"] < told["limit"] == 1e12
    assert told["programs"]["gradients"]["flops"] > told["programs"]["values"]["flops"] > 0


@pytest.mark.parametrize(
    "words, messages",
    [
        (["nope:2x2"], ["expected v5e:4x4"]),
        (["v5e:0x2"], ["expected v5e:4x4"]),
        (["cpu:2x2x2"], ["expected v5e:4x4"]),
        (["cpu:64"], ["JAX_NUM_CPU_DEVICES=64"]),
        (["h100:2x8x8"], ["GPUs are a100, h100"]),
        (["gtx1080:8"], ["GPUs are a100, h100"]),
        (["cpu:2x4", "--mesh.tensor", "8"], ["4 devices of a process"]),
        (["cpu:8", "--mesh.tensor", "8"], ["divisor of the model's 4 query heads, got 8",
         "--mesh.tensor 4 leaves 2 times as many places along data"]),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_one_line_and_exit_code_2(words, messages, capsys):
    assert code_of(plan_lib.main, "--topology", *words) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert all(message in told for message in messages)


def test_a_shape_that_no_tpu_has_is_one_line_and_exit_code_2(capsys):
    """Without libtpu it says how to get it."""
    assert code_of(plan_lib.main, "--topology", "v5e:3x5") == 2
    told = capsys.readouterr().err.splitlines()
    assert "v5e:3x5" in told[-1]
    if not importlib.util.find_spec("libtpu"):
        assert 'pip install -e ".[tpu]"' in told[-1]


@pytest.mark.skipif(bool(importlib.util.find_spec("jax_plugins")), reason="GPU's compiler there")
def test_without_a_gpus_compiler_it_says_how_to_get_it(capsys):
    assert code_of(plan_lib.main, "--topology", "h100:8") == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and 'pip install -e ".[gpu-plans]"' in told


@pytest.mark.parametrize(
    "name, billions",
    [("qwen2.5-1.5b", 1.54), ("qwen2.5-7b", 7.6), ("qwen2.5-32b", 32.8), ("llama-3-70b", 70.6)],
)
def test_the_models_that_are_planned_have_their_published_size(repository, name, billions):
    model = planner.decoder_config(str(repository / "configs" / "models" / name))
    _, abstract = small.abstract_decoder(model, jnp.bfloat16)
    weights = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(abstract))
    assert weights / 1e9 == pytest.approx(billions, rel=0.01)  # so many digits are published


def test_the_plans_of_the_readme_can_be_read(repository, monkeypatch):
    monkeypatch.chdir(repository)
    for file in sorted((repository / "configs" / "plans").glob("*.yaml")):
        config = cli.parse(["--config", str(file)])
        assert planner.decoder_config(config.model.base).n_layers >= 28
        assert len(load_team(config.team.file).agents) == 2


@pytest.mark.parametrize("heads", [2, 4])
def test_each_place_along_tensor_holds_one_key_value_head_of_the_cache(heads):
    model = small.config_of(n_kv_heads=heads)
    run = run_of(settings(mesh=config_lib.Mesh(tensor=4)), model)
    [first, *_] = run.slots.cache
    assert first.v_BGTC.sharding.shard_shape(first.v_BGTC.shape) == (4, 1, 64, 8)
    assert run.here.shape == {"data": 1, "fsdp": 1, "tensor": 4}
