"""Teams whose members run on several bases: training, resuming, evaluating, exporting."""

from __future__ import annotations

import json

import bounds
import jax
import numpy as np
import other_tokenizer
import pytest
import small
from run_files import arrays_of, killed_after, lines_of

from marft_jax import evaluate, export, imitate, train
from marft_jax.cli import configure, parse
from marft_jax.errors import BadInput
from marft_jax.learning.settings import resolve, resolved
from marft_jax.models.weights import tiny
from marft_jax.run.directory import write_settings
from marft_jax.run.loaded_team import LoadedTeam
from marft_jax.settings.config import clamp_to_context, with_context
from marft_jax.team.bases import Base, context_of, models_of
from marft_jax.team.team_files import dump_team, load_team

pytestmark = pytest.mark.usefixtures("one_device")

AGENTS = """
agents:
  - {name: planner, prompt: plan}
  - {name: solver, prompt: solve, answers: true%s}
"""
ONE, TWO = AGENTS % "", "bases:\n  other: {model: tiny}" + AGENTS % ", base: other"
FLAGS = """--algo.name grpo --algo.episodes 8 --algo.group_size 4 --rollout.lag 1 --run.steps 3
--run.save_every 1 --run.keep 9 --run.loggers none --run.transcripts_every 1""".split()


def run_train(folder, text, *flags):
    team = folder.with_suffix(".yaml")
    team.write_text(text)
    with pytest.raises(SystemExit) as left:
        train.main([*FLAGS, "--team.file", str(team), "--run.dir", str(folder), *flags])
    return left.value.code


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    run = tmp_path_factory.mktemp("bases") / "two"
    assert not run_train(run, TWO)
    return run


def said(run, step):
    lines = (run / "transcripts" / f"{step}.jsonl").read_text().splitlines()
    return [[turn["text"] for turn in json.loads(line)["turns"]] for line in lines]


@pytest.mark.release
def test_two_bases_that_are_one_file_give_what_one_base_gives(two, tmp_path):
    """Invariant 21: the same texts, metrics and weights, as far as rounding goes."""
    one = tmp_path / "one"
    assert not run_train(one, ONE)
    assert [said(one, n) for n in (1, 2, 3)] == [said(two, n) for n in (1, 2, 3)]
    roundings = bounds.update(tiny.CONFIG)
    for before, now in zip(lines_of(one), lines_of(two), strict=True):
        assert now.pop("lr/other") == now["lr"]
        assert {*before} == {*now}
        for name, value in before.items():
            if name not in ("tokens/prefix_shared", "tokens/once_update"):  # packed by base
                bounds.close({name: now[name]}, {name: value}, roundings, size=1.0)
    whole, apart = (arrays_of(run, 1)["policies"] for run in (one, two))
    for n, base in enumerate(("main", "other")):
        of_one = jax.tree.map(lambda x, n=n: x[n : n + 1], whole["main"])
        moments, expected = (x["adapters_opt"][1] for x in (apart[base], of_one))
        bounds.close(moments["mu"], expected["mu"], roundings)
        pair = apart[base]["adapters"], of_one["adapters"]
        bounds.close_steps(*pair, expected["nu"], 1e-3, roundings)  # the rate of tiny


@pytest.mark.slow
def test_a_run_on_two_bases_continues_exactly_after_a_kill(two, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with killed_after(2, monkeypatch):
        run_train(run, TWO)
    assert not run_train(run, TWO)
    assert lines_of(run) == lines_of(two)
    jax.tree.map(np.testing.assert_array_equal, arrays_of(run, 3), arrays_of(two, 3))


@pytest.mark.slow
def test_a_base_on_which_nobody_learns_has_no_optimiser_and_stays_bit_equal(tmp_path):
    run = tmp_path / "run"
    frozen = "prompt: plan, trainable: false, base: other"
    team = TWO.replace(", base: other", "").replace("prompt: plan", frozen)
    assert not run_train(run, team, "--guard.min_entropy", "1e-6")
    measured = {*lines_of(run)[0]}
    assert "agent/solver/entropy" in measured and "agent/planner/entropy" not in measured
    states = [arrays_of(run, step)["policies"] for step in (1, 3)]
    assert not jax.tree.leaves(states[1]["other"]["adapters_opt"])
    first, last = (state["other"]["adapters"] for state in states)
    jax.tree.map(np.testing.assert_array_equal, first, last)


@pytest.mark.slow
def test_a_run_on_other_bases_is_refused(two, tmp_path, capsys):
    (tmp_path / "run").symlink_to(two)
    assert run_train(tmp_path / "run", ONE, "--run.steps", "4") == 2
    assert "base other was " in capsys.readouterr().err


@pytest.mark.release
def test_a_team_on_two_bases_is_evaluated_asked_and_exported(two, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        evaluate.main(["--run", str(two), "--limit", "8", "--compare", "--out", str(tmp_path)])
    assert not left.value.code
    assert len(LoadedTeam(two).ask("4+7=?").turns) == 2
    with pytest.raises(SystemExit) as left:
        export.main(["--run", str(two), "--out", str(tmp_path / "out")])
    assert not left.value.code, capsys.readouterr().err
    found = sorted(str(p.parent.relative_to(tmp_path / "out"))
                   for p in (tmp_path / "out").glob("**/adapter_config.json"))  # fmt: skip
    assert found == ["main/planner", "other/solver"]
    card = (tmp_path / "out" / "README.md").read_text()
    for base, adapter in zip(("main", "other"), ("planner", "solver"), strict=True):
        template, module = f"{base}/chat_template.jinja", f"{adapter}={base}/{adapter}"
        assert f"--chat-template {template}" in card and f"--lora-modules {module}\n" in card
        assert (tmp_path / "out" / template).is_file()
    for init in (tmp_path / "out", two):
        run, more = tmp_path / f"from-{init.name}", ("--algo.lr", "1e-30", "--run.steps", "1")
        assert not run_train(run, TWO, "--lora.init", str(init), *more)
        for base, policy in arrays_of(run, 1)["policies"].items():
            expected = arrays_of(two, 3)["policies"][base]["adapters"]
            jax.tree.map(bounds.close, policy["adapters"], expected)


def test_a_base_has_the_settings_of_the_run_but_for_its_own():
    usual = train.cli.parse(["--model.base", "x", "--model.context", "300"]).model
    own = Base("y", quantize="nf4", lr=0.1)
    found = models_of(usual, {"large": own}, ("large", "main", "large"))
    assert [*found] == ["large", "main"] and found["main"] is usual
    assert (found["large"].base, found["large"].quantize) == ("y", "nf4")
    assert found["large"].context == 300


def test_what_several_bases_decide_is_decided_again_when_the_run_continues(tmp_path):
    """Written down, the numbers of the main base would count as given for all bases."""
    config = with_context(configure({"model.base": "m.gguf"}), 512)
    bases = {"main": ("m", small.CONFIG), "other": ("tiny", small.CONFIG)}
    config = resolved(config, resolve(config, bases))
    (tmp_path / "two.yaml").write_text(TWO)
    write_settings(tmp_path, config, load_team(str(tmp_path / "two.yaml")))
    again = parse(["--config", str(tmp_path / "config.yaml")])
    assert resolve(again, bases).lr == resolve(configure({"model.base": "m.gguf"}), bases).lr
    other = models_of(again.model, {"other": Base("tiny")}, ("other",))["other"]
    assert context_of("other", other, 64) == 64  # and not refused
    assert clamp_to_context(again.team, 64).max_new_tokens == 16


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (AGENTS % ", base: lage", "agent 'solver': base: expected one of main, got 'lage'"),
        ("bases:\n  large: {model: tiny}" + ONE, "bases that an agent or a teacher names"),
        ("bases:\n  main: {model: tiny}" + AGENTS % ", base: main", "and none named main"),
        ("bases:\n  large: {model: tiny, lr: -1}" + AGENTS % ", base: large", "bases.large.lr"),
    ],
)
def test_a_team_file_with_wrong_bases_is_refused(changed, message, tmp_path):
    file = tmp_path / "team.yaml"
    file.write_text(changed)
    with pytest.raises(BadInput, match=r"team\.yaml: ") as caught:
        load_team(str(file))
    assert message in str(caught.value)


def test_a_team_file_with_bases_is_written_as_it_is_read(tmp_path):
    file, again = tmp_path / "team.yaml", tmp_path / "again" / "team.yaml"
    (tmp_path / "beside").mkdir()
    file.write_text(TWO.replace("model: tiny", "model: beside, context: 64"))
    team = load_team(str(file))
    assert team.bases == {"other": Base(str(tmp_path / "beside"), context=64)}
    again.parent.mkdir()
    again.write_text(dump_team(team))
    assert load_team(str(again)) == team


@pytest.mark.slow
def test_every_base_reads_and_writes_with_its_own_tokenizer(tmp_path):
    """The built-in model under other token ids learns and says what it does under its own."""
    other = other_tokenizer.write(tmp_path / "other")
    teams = {"one": ONE, "two": TWO.replace("model: tiny", f"model: {other}")}
    found, words = {}, ["--demonstrations", "8", "--algo.episodes", "8", "--algo.lr", "1e-30"]
    for name, text in teams.items():
        run, team = tmp_path / name, tmp_path / f"{name}.yaml"
        team.write_text(text)
        with pytest.raises(SystemExit) as left:
            imitate.main(["--out", str(run), "--team.file", str(team), "--run.steps", "1",
                          "--run.loggers", "none", *words])  # fmt: skip
        assert not left.value.code
        [row] = lines_of(run)
        losses = [row[f"agent/{agent}/{what}"] for agent in ("planner", "solver")
                  for what in ("loss", "entropy", "tokens")]  # fmt: skip
        said = [turn.text for turn in LoadedTeam(run).ask("4+7+8=?").turns]
        found[name] = row["reward/mean"], said, losses
    *one, losses = found["one"]
    *other, found_losses = found["two"]
    assert one == other and one[0] == 1
    bounds.close(found_losses, losses, bounds.forward(tiny.CONFIG), bounds.LOGITS)
