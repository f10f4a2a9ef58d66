"""What a contributor adds without touching the package: each in one module of at most 40 lines."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bounds
import numpy as np
import one_step
import orbax.checkpoint as ocp
import pytest
import rloo
import small
from median import by_median
from scripted import Scripted

from marft_jax import train
from marft_jax.envs import base
from marft_jax.errors import BadInput
from marft_jax.extras.check.playing import check
from marft_jax.learning.state_parts import find_state_parts
from marft_jax.rollout.rollout import Rollout
from marft_jax.settings.config import Run
from marft_jax.team import find_workflow

pytestmark = pytest.mark.usefixtures("one_device")

HERE = Path(__file__).parent
OPTIONS = ("modulus=3", "any_digit=0.25")


def environment(split="train"):
    return base.make(base.Own("remainder:Remainder", options=OPTIONS), split)


def test_each_is_one_module_of_at_most_forty_lines():
    modules = [file for file in HERE.glob("*.py") if not file.name.startswith("test_")]
    assert len(modules) == 6
    assert max(len(file.read_text().splitlines()) for file in modules) <= 40


def test_the_topology_and_the_environment_play():
    engine = Scripted(lambda request: "so 1")
    workflow, create = find_workflow("review:review"), environment().create
    team = small.team(2, context=300)
    with ThreadPoolExecutor(1) as threads:
        played = Rollout(engine, team, workflow, create, threads).play(small.samples([12]), 0)
    [episode] = played.episodes
    assert [turn.name for turn in episode.turns] == ["solver", "planner", "solver"]
    assert episode.dependency.astype(int).tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
    assert episode.task == "2+1 modulo 3=?" and episode.reward == 0.25


def test_the_environment_is_sound():
    problems, _ = check(environment().create, episodes=4)
    assert problems == []
    with pytest.raises(BadInput, match="takes modulus, any_digit, got 'module=3'"):
        base.make(base.Own("remainder:Remainder", options=("module=3",)), "train")


def test_the_algorithm_subtracts_the_mean_of_the_other_samples():
    rewards = np.random.default_rng(0).normal(size=4)
    config = dataclasses.replace(one_step.ALGO, group_size=4)
    batch = one_step.build(one_step.settings(config), samples(rewards), "reinforce")
    found_EJ, _ = rloo.RLOO.advantages(config, batch.chain, None, None)
    others = [np.delete(rewards, i).mean() for i in range(4)]
    last_E = found_EJ[np.arange(4), batch.chain.mask_EJ.sum(1).astype(int) - 1]
    bounds.close(last_E, rewards - others)


def test_the_normaliser_is_not_moved_by_one_lucky_turn():
    chain = one_step.build(one_step.settings(), samples(np.zeros(4)), "appo").chain
    plain_EJ = np.where(chain.weight_EJ > 0, 0.5, 0.0)
    lucky_EJ = plain_EJ.copy()
    lucky_EJ[0, 0] *= 100
    assert (by_median(plain_EJ, chain) == 2 * plain_EJ).all()
    assert (by_median(lucky_EJ, chain)[1:] == 2 * plain_EJ[1:]).all()
    assert not by_median(np.zeros_like(plain_EJ), chain).any()


def samples(rewards):
    """Samples of one task by a team of two, paid at the end."""
    return [
        small.episode(0, [small.turn(0, [5], [6, 7]), small.turn(1, [5], [8])], [reward])
        for reward in rewards
    ]


@pytest.mark.slow
def test_all_of_them_train_the_built_in_model(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    run = tmp_path / "run"
    flags = f"""--run.dir {run} --algo.episodes 8 --team.workflow review:review
        --algo.name rloo:RLOO --algo.normalize median:by_median
        --run.state_parts tally:tally
        --env.name remainder:Remainder --env.options {" ".join(OPTIONS)}"""
    for steps in ("1", "2"):  # the part is saved and restored with the rest of the state
        with pytest.raises(SystemExit) as left:
            train.main([*flags.split(), "--run.steps", steps])
        assert left.value.code == 0
    saved = ocp.StandardCheckpointer().restore(run / "checkpoints" / "2" / "state")
    assert saved["parts"]["tally"].tolist() == [16, 16]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(row["episode/turns"] == 3 for row in rows)
    assert any(row["agent/solver/grad_norm"] > 0 for row in rows)
    assert not any("critic/loss" in row for row in rows)
    assert "modulus=3" in (run / "config.yaml").read_text()


def test_two_parts_of_the_state_with_one_name_are_refused(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    config = small.config(run=Run(state_parts=("tally:tally", "tally:tally")))
    with pytest.raises(BadInput, match="with a name of its own, got tally"):
        find_state_parts(config, small.team())


SMALL = ["--algo.episodes", "32", "--critic.warmup_steps", "0"]


def train_with(sampler, run, capsys):
    flags = ["--rollout.sampler", f"table:{sampler}", "--run.dir", str(run), "--run.steps", "2"]
    with pytest.raises(SystemExit) as left:
        train.main([*flags, *SMALL])
    return left.value.code, capsys.readouterr().err


@pytest.mark.slow
def test_the_sampler_trains_the_quickstart_and_is_asked_for_no_more_than_it_has(tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("marft_jax.run.samplers.Engine", None)  # nobody plays on it
        assert train_with("Table", tmp_path, capsys)[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["agent/solver/grad_norm"] > 0 and rows[0]["agent/solver/approx_kl"] != 0
    assert "agent/solver/kept" not in rows[0] and "tokens/action" in rows[0]
    log = (tmp_path / "log.txt").read_text()
    assert "the sampler does not repeat" in log
    assert "--algo.correction truncated" in log and rows[0]["agent/solver/correction_weight"] > 0


@pytest.mark.slow
def test_a_sampler_that_kept_older_adapters_is_noticed_in_the_step_in_which_it_did(
    tmp_path, capsys
):
    """Invariant 23."""
    code, said = train_with("Stale", tmp_path, capsys)
    assert code == 1 and "the sampler did not load the adapters that it was given" in said
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1  # of two steps


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rollout.sampler", "engin"], "engine, http or package.module:Class, got 'engin'"),
        (["--rollout.sampler", "table:TABLE"], "expected a class, got {'planner'"),
        (["--rollout.sampler", "builtins:repr"], "expected the methods of"),
        (["--rollout.sampler", "table:Table", "--rollout.slots", "4"], "it belongs to engine"),
        (["--rollout.sampler", "table:Table", "--team.top_p", "0.5"], ""),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_what_is_no_sampler_is_refused_in_one_line(flags, said, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        train.main([*flags, *SMALL, "--run.dir", str(tmp_path), "--run.steps", "1"])
    error = capsys.readouterr().err
    assert left.value.code == (2 if said else 0) and said in error
    assert not said or error.count("\n") == 1
