"""Memory and ranks are checked before anything is allocated."""

from __future__ import annotations

import jax
import pytest

from marft_jax import cli, train
from marft_jax.models import lora
from marft_jax.models.weights import tiny
from marft_jax.run import memory
from marft_jax.run.models import open_devices, open_models
from marft_jax.run.samplers import open_sampler
from marft_jax.run.states import make_learner
from marft_jax.settings import config as config_lib
from marft_jax.team.team_files import load_team
from marft_jax.types import MAIN


def refused(capsys, *flags) -> str:
    with pytest.raises(SystemExit) as left:
        train.main([*flags])
    assert left.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "flags",
    [("--lora.rank", "100000"), ("--lora.rank", "129", "--lora.targets", "k", "v")],
)
def test_a_rank_above_that_of_every_matrix_is_refused(tmp_path, capsys, flags):
    told = refused(capsys, *flags, "--run.dir", str(tmp_path / "run"))
    assert "--lora.rank: expected at most " in told and f"got {flags[1]}" in told
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize("targets", [("all-linear",), ("q",), ("k", "v"), ("k", "gate")])
def test_the_rank_of_the_largest_matrix_is_the_most(targets):
    """Smaller matrices beside it may have less: keys often have few channels."""
    pairs = [x for n in lora.adapted(tiny.CONFIG, targets) for x in tiny.CONFIG.matrices()[n]]
    most = max(min(x.d_in, x.d_out) for x in pairs)
    lora.check_rank(tiny.CONFIG, targets, most)
    with pytest.raises(ValueError, match=f"at most {most}"):
        lora.check_rank(tiny.CONFIG, targets, most + 1)


@pytest.mark.parametrize(
    "flags",
    ["--rollout.lag 2", "--lora.rank 64", "--lora.mode shared", "--model.dtype bfloat16",
     "--model.quantize int8", "--mesh.data 4 --mesh.tensor 2"],
)  # fmt: skip
@pytest.mark.slow
def test_an_estimate_is_no_more_than_what_a_run_holds_and_not_much_less(flags):
    config = cli.parse([*flags.split(), "--algo.episodes", "8"])
    blueprint, devices = load_team(None), open_devices(config.mesh)
    found = memory.least(config, config.model, tiny.CONFIG, 256, blueprint.agents, devices.learning)
    with open_models(config, blueprint) as models, open_sampler(models) as sampler:
        state = make_learner(models).init()
        sampler.load(state.adapters, "")
        one = (state.adapters, state.past, [p.adapters_opt for p in state.policies.values()])
        held = {
            "weights": bytes_of(models.bases[MAIN].params),
            "adapters": bytes_of(one) + bytes_of(state.adapters),  # and gradients
            "cache": bytes_of(sampler.samplers[MAIN]._slots.cache),
        }
    for name, size in held.items():
        assert 0.7 * size <= found[name] <= 1.02 * size, name


def bytes_of(tree) -> int:
    """On one device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("share", [0.5, 1.5])
def test_what_does_not_fit_is_refused_before_weights_are_read(tmp_path, capsys, monkeypatch, share):
    config, devices, agents = cli.parse([]), open_devices(config_lib.Mesh()), load_team(None).agents
    needed = memory.least(config, config.model, tiny.CONFIG, 256, agents, devices.learning)
    monkeypatch.setattr(memory, "limit_of", lambda mesh: share * sum(needed.values()))
    opened = open_models(config, load_team(None), devices)
    if share > 1:
        with opened:
            told = capsys.readouterr().out
        assert told.count("memory: at least ") == 1 and "adapters" in told
    else:
        monkeypatch.setattr(tiny, "tensors", lambda: pytest.fail("weights were read"))
        with pytest.raises(ValueError, match="--lora.rank 8: expected 2 agents .* lower"), opened:
            pass


def test_agents_that_share_an_adapter_or_do_not_learn_take_less(tmp_path):
    def adapters(team: str) -> float:
        (tmp_path / "team.yaml").write_text(team)
        agents, config = load_team(str(tmp_path / "team.yaml")).agents, cli.parse([])
        mesh = open_devices(config_lib.Mesh()).learning
        return memory.least(config, config.model, tiny.CONFIG, 64, agents, mesh)["adapters"]

    one = adapters("agents: [{name: a, answers: true}]")
    assert adapters("agents: [{name: a}, {name: b, answers: true}]") == 2 * one
    frozen = "agents: [{name: a, trainable: false}, {name: b, answers: true}]"
    assert adapters(frozen) == one + one / 4
    shared = "agents: [{name: a, adapter: x}, {name: b, adapter: x, answers: true}]"
    assert adapters(shared) == one
