"""scripts/study.py: what is finished is kept, what changed is run anew, faults are one line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import small
import yaml

from configs.studies import long_text, relay
from marft_jax import cli
from marft_jax.errors import BadInput
from marft_jax.learning.settings import SETTINGS
from marft_jax.plugins import load_plugin
from marft_jax.team.profiles import Profile
from marft_jax.types import Act, Sampling, StepResult

STUDY = {
    "about": "try",
    "settings": {"run.steps": 2},
    "seeds": [0, 1],
    "rows": {"untrained": {"command": "evaluate"},
        "start": {"command": "imitate", "options": {"demonstrations": 9}},
        "team": {"from": "start", "settings": {"algo.name": "grpo"}},
        "muted": {"command": "evaluate", "from": "team", "evaluate": {"team.workflow": "muted"}}},
}  # fmt: skip


@pytest.fixture
def study(repository, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(repository / "scripts"))
    import study

    monkeypatch.setattr(study, "commit", lambda: "c0ffee")
    return study


class Commands:
    """In place of the package's commands: writes what they leave, and notes what was asked."""

    def __init__(self, monkeypatch, study, killed_at=None):
        self.calls, self._killed_at = [], killed_at
        monkeypatch.setattr(study.Runner, "_call", lambda *args: self.call(*args))

    def call(self, runner, command, flags, *rest):
        self.calls.append((command, list(flags)))
        if len(self.calls) == self._killed_at:
            runner._stop()
        if runner._stopped:
            raise RuntimeError("exit code 75")
        out = Path(flags[flags.index("--out" if "--out" in flags else "--run.dir") + 1])
        out.mkdir(parents=True, exist_ok=True)
        if command == "evaluate":
            played = Path(flags[flags.index("--run") + 1]).name if "--run" in flags else ""
            muted = "--team.workflow" in flags
            right = {"team-0": 0.9, "team-1": 0.7}.get("" if muted else played[:6], 0.5)
            row = {"eval/x/reward": right, "interval": [0.4, 0.6], "tasks": 100}
            (out / "summary.json").write_text(json.dumps({"x, team": row}))
        else:
            step = {"reward/mean": 0.95, "tokens/action": 10, "time/step_s": 2.0}
            (out / "metrics.jsonl").write_text(f"{json.dumps(step)}\n" * 2)


def written(tmp_path, tree):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    return file


def run(study, file, tmp_path, *flags):
    study.main([str(file), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path), *flags])


def test_every_row_and_seed_is_learned_and_evaluated(study, monkeypatch, tmp_path, capsys):
    commands = Commands(monkeypatch, study)
    run(study, written(tmp_path, STUDY), tmp_path)
    table = (tmp_path / "table.md").read_text()
    learned = r"\| team \| from start algo.name=grpo \| 0.800 \(0.0\d\d to 1.000\) "
    learned += r"\| \+0.300 \(-0.4\d\d to \+0.5\d\d\) \| 0.950 \| 1, 1 \| 0.95, 0.95 \|"
    assert re.search(learned, table)
    start = r"\| start \| demonstrations=9 \| 0.500 \(0.40\d to 0.\d+\) (\|  ){4}\|"
    assert re.search(start, table)
    assert "Planned and not run" not in table and "-dirty" not in table
    assert [command for command, _ in commands.calls].count("evaluate") == 8
    taught = next(flags for command, flags in commands.calls if command == "imitate")
    assert taught[taught.index("--demonstrations") + 1] == "9"
    learned = next(flags for command, flags in commands.calls if command == "train")
    assert learned[learned.index("--lora.init") + 1] == taught[taught.index("--out") + 1]
    muted = [flags for command, flags in commands.calls if "--team.workflow" in flags]
    assert len(muted) == 2 and all("team-" in flags[flags.index("--run") + 1] for flags in muted)


def test_a_killed_study_repeats_nothing_that_is_finished(study, monkeypatch, tmp_path):
    file = written(tmp_path, STUDY)
    Commands(monkeypatch, study, killed_at=5)
    with pytest.raises(SystemExit):
        run(study, file, tmp_path)
    finished = (tmp_path / "results.jsonl").read_text().splitlines()
    assert len(finished) == 2  # untrained, and the start
    again = Commands(monkeypatch, study)
    run(study, file, tmp_path)
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert lines[:2] == finished and len(lines) == 8
    assert [command for command, _ in again.calls].count("imitate") == 1  # that of the other seed
    nothing = Commands(monkeypatch, study)
    run(study, file, tmp_path)
    assert nothing.calls == []


def test_a_row_that_changed_is_run_anew_with_all_that_start_from_it(study, monkeypatch, tmp_path):
    Commands(monkeypatch, study)
    run(study, written(tmp_path, STUDY), tmp_path)
    changed = json.loads(json.dumps(STUDY))
    changed["rows"]["start"]["settings"] = {"algo.lr": 0.1}
    again = Commands(monkeypatch, study)
    run(study, written(tmp_path, changed), tmp_path)
    counts = [command for command, _ in again.calls]
    assert (counts.count("imitate"), counts.count("train"), counts.count("evaluate")) == (2, 2, 6)


def test_a_row_with_axes_in_its_name_is_one_for_every_combination(study, tmp_path):
    tree = STUDY | {
        "axes": {
            "rank": {"rank 1": {"lora.rank": 1}, 8: {"lora.rank": 8}},
            "rate": {"slow": {"algo.lr": 1e-4, "algo.epochs": 1}, "fast": {"algo.lr": 1e-3}},
        },
        "rows": {
            "start, {rank}": {"command": "imitate"},
            "{rank}, {rate}": {"from": "start, {rank}", "settings": {"algo.epochs": 2}},
        },
    }
    rows = study.read(written(tmp_path, tree)).rows
    assert list(rows) == [
        "start, rank 1", "start, 8", "rank 1, slow", "rank 1, fast", "8, slow", "8, fast"
    ]  # fmt: skip
    row = rows["8, slow"]
    assert row.own == {"lora.rank": 8, "algo.lr": 1e-4, "algo.epochs": 2}
    assert row.settings == {"run.steps": 2} | row.own and row.start == "start, 8"


def test_a_run_that_fails_is_told_and_the_others_go_on(study, monkeypatch, tmp_path, capsys):
    commands = Commands(monkeypatch, study)

    def call(runner, command, flags, *rest):
        if command == "train":
            raise RuntimeError("exit code 1: no space left")
        commands.call(runner, command, flags, *rest)

    monkeypatch.setattr(study.Runner, "_call", call)
    with pytest.raises(SystemExit) as left:
        run(study, written(tmp_path, STUDY), tmp_path)
    assert left.value.code == 1
    assert "team, seed 0: exit code 1: no space left" in capsys.readouterr().err
    assert "| untrained |" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize("change, line", [
    ({"rows": {"a": {"command": "teach"}}}, "row a: command: expected .*, got 'teach'"),
    ({"rows": {"a": {"from": "b"}, "b": {}}}, "row a: from: expected a row above it, got 'b'"),
    ({"rows": {"a": {"setting": {}}}}, "row a: expected .*settings, got 'setting'"),
    ({"row": {}}, "expected .*rows.*, got 'row'"),
    ({"rows": None}, "expected a study with `rows:`"),
    ({"rows": {"a, {b}": {}}}, "row a, {b}: expected axes of none, got 'b'"),
    ({"axes": {"b": {1: {}}}, "rows": {"a, {b}": {}, "a, 1": {}}},
     "row a, 1: expected one row of this name, got two"),
    ({"axes": {"b": {1: {}}}, "rows": {"a": {}, "c": {"from": "a, {b}"}}},
     "row c: from: expected a row above it, got 'a, {b}'"),
])  # fmt: skip
def test_a_study_with_a_fault_is_one_line(study, tmp_path, change, line):
    with pytest.raises(BadInput, match=line):
        study.read(written(tmp_path, STUDY | change))


def test_the_shipped_studies_are_of_settings_that_exist(study, repository):
    from marft_jax.settings import setting

    kinds = [cli.parse(["--algo.name", name]) for name in SETTINGS]
    kinds.append(cli.parse(["--env.name", "configs.studies.relay:Relay"]))
    known = {key: field for one in kinds for key, field in setting.settings(one)}
    for file in (repository / "configs" / "studies").glob("*.yaml"):
        for row in study.read(file).rows.values():
            given = {**row.settings, **row.evaluate}
            assert given.keys() <= known.keys()
            for key in given.keys() & {"env.name", "team.workflow"}:  # as they are found from here
                assert load_plugin(given[key], key, ()).__module__.startswith("configs.studies.")


def test_a_muted_team_is_sequential_and_shows_no_message():
    shown = []

    class Team:
        profiles = ("planner", "solver")

        def act(self, agent, state, turns=()):
            shown.append([turn.text for turn in turns])
            return agent

    turn = small.turn(0, [1], [2])._replace(text="3+4=7")
    play = relay.muted(Team(), "task")
    assert next(play) == [0] and play.send([turn]) == [1] and shown == [[], [""]]
    assert play.send([turn]).turns == [turn, turn]
    with pytest.raises(StopIteration):
        play.send(StepResult("", 1.0, True))


@pytest.mark.parametrize(
    ("successes", "before", "low", "high"),
    [
        ([0.8, 0.9, 1.0], [], 0.64, 1.0),  # Student's t alone: 0.652 to 1.148
        ([0.5], [], 0.415, 0.585),  # one seed: 128 tasks
        ([0.5, 0.5, 0.5], [], 0.415, 0.585),  # the same tasks: no surer
        ([1.0, 1.0, 1.0], [], 0.98, 1.0),
        ([0.0], [], 0.0, 0.02),
        ([0.8, 0.8], [0.5, 0.5], 0.18, 0.41),
        ([1.0, 0.98], [0.01, 0.01], 0.85, 1.0),
    ],
)
def test_an_interval_is_of_seeds_and_tasks_and_holds_the_mean(study, successes, before, low, high):
    from study_report import interval

    middle, least, most = interval(successes, 128, before)
    assert -1 <= least <= middle <= most <= 1
    assert (least, most) == pytest.approx((low, high), abs=0.02)  # simulated


def test_a_torn_last_line_of_the_results_is_run_again(study, monkeypatch, tmp_path):
    file = written(tmp_path, STUDY)
    Commands(monkeypatch, study)
    run(study, file, tmp_path)
    results = tmp_path / "results.jsonl"
    whole = results.read_text()
    results.write_text(whole[:-40])
    again = Commands(monkeypatch, study)
    run(study, file, tmp_path)
    assert len(again.calls) == 1 and results.read_text() == whole


def test_a_study_runs_from_committed_code_unless_told(study, monkeypatch, tmp_path, capsys):
    file = written(tmp_path, STUDY)
    monkeypatch.setattr(study, "commit", lambda: "c0ffee-dirty")
    commands = Commands(monkeypatch, study)
    with pytest.raises(SystemExit) as left:
        run(study, file, tmp_path, "--seeds", "0")
    assert left.value.code == 2 and not commands.calls and "--dirty" in capsys.readouterr().err
    run(study, file, tmp_path, "--seeds", "0", "--dirty")
    monkeypatch.setattr(study, "commit", lambda: "decade")
    run(study, file, tmp_path, "--only", "start", "--seeds", "1")
    table = (tmp_path / "table.md").read_text()
    assert "| 2 | c0ffee-dirty, decade |" in table and "| 1 | c0ffee-dirty |" in table
    assert "-dirty: that commit with changes" in table
    assert "Planned and not run: seeds 1 of `untrained`, `team`, `muted`." in table
    run(study, file, tmp_path, "--seeds", "0")  # nothing to run, so any tree will do


def test_changed_code_is_dirty_and_what_a_study_writes_is_not(repository, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(repository / "scripts"))
    import study

    monkeypatch.chdir(tmp_path)
    for name in ("code.py", "results.jsonl"):
        (tmp_path / name).write_text("1\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "a"]):
        subprocess.run(["git", *words], check=True)
    clean = study.commit()
    (tmp_path / "results.jsonl").write_text("2\n")
    assert study.commit() == clean and len(clean) >= 7
    (tmp_path / "code.py").write_text("2\n")
    assert study.commit() == clean + "-dirty"


def test_an_untrained_row_plays_the_base_that_the_settings_name(study, monkeypatch, tmp_path):
    (tmp_path / "model.yaml").write_text("model: {base: some/model}\n")
    commands = Commands(monkeypatch, study)
    tree = STUDY | {"configs": ["model.yaml"], "rows": {"untrained": {"command": "evaluate"}}}
    run(study, written(tmp_path, tree), tmp_path)
    assert all(flags[flags.index("--base") + 1] == "some/model" for _, flags in commands.calls)


def test_a_row_learns_until_it_has_spent_as_much_as_another(study, monkeypatch, tmp_path):
    commands = Commands(monkeypatch, study)
    plain = Commands.call

    def call(self, runner, command, flags, *rest):
        plain(self, runner, command, flags, *rest)
        if command == "train":
            run_dir = Path(flags[flags.index("--run.dir") + 1])
            given = [b for a, b in zip(flags, flags[1:], strict=False) if a == "--run.steps"]
            steps = int(given[-1])
            alone = run_dir.name.startswith("alone")
            step = {"reward/mean": 0.5, "tokens/action": 10 if alone else 20, "tokens/prompt": 30}
            (run_dir / "metrics.jsonl").write_text(f"{json.dumps(step)}\n" * steps)

    monkeypatch.setattr(Commands, "call", call)
    alone, alike = ({"match": {what: "team"}} for what in ("tokens", "compute"))
    rows = {"team": {}, "alone": alone, "alike": alike}
    tree = STUDY | {"seeds": [0], "settings": {"run.steps": 4}, "rows": rows}
    run(study, written(tmp_path, tree), tmp_path, "--only", "team")
    [team] = {Path(flags[flags.index("--run.dir") + 1]) for _, flags in commands.calls
              if "--run.dir" in flags}  # fmt: skip
    shutil.rmtree(team)  # its figures are enough, as after a fetch
    run(study, written(tmp_path, tree), tmp_path, "--only", "alone", "alike")
    lines = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    found = {line["row"]: (len(line["rewards"]), line["tokens"], line["compute"]) for line in lines}
    assert found == {"team": (4, 80, 200), "alone": (8, 80, 320), "alike": (4, 80, 200)}
    assert sum(command == "train" for command, _ in commands.calls) == 4  # alone, in two legs


def test_differences_are_paired_by_seed_and_task(study):
    from study_report import paired

    rng = np.random.default_rng(0)
    hard_T, luck_ST = rng.random(200) < 0.5, rng.random((5, 200)) < 0.05
    other = np.where(hard_T, 0.0, 1.0) + np.zeros((5, 1))
    middle, least, most = paired(np.maximum(other, luck_ST), other)
    assert middle == pytest.approx(np.maximum(other, luck_ST).mean() - 0.5, abs=0.1)  # 200 tasks
    assert 0 < least < middle < most < 0.06  # unpaired tasks alone: 0.14 wide
    assert paired(other, other)[1:] == pytest.approx((-0.02, 0.02), abs=0.01)  # simulated
    seeds = np.array([0.1, 0.2, 0.3])[:, None] + np.zeros((3, 2000))
    assert paired(seeds, 0 * seeds)[1:] == pytest.approx((-0.05, 0.45), abs=0.02)  # t: 4.3 x 0.058


@pytest.mark.parametrize("scale, more", [(1, 0), (0.01, 0), (100, -50), (3, 7)])
def test_an_interval_of_returns_is_that_of_shares_in_another_unit(study, scale, more):
    from study_report import interval, paired

    rng = np.random.default_rng(1)
    one, other = rng.random((3, 40)), rng.random((3, 40))
    span, turned = (more, scale + more), rng.permutation(3)
    wanted = np.array(paired(one, other)) * scale
    found = paired(scale * one[turned] + more, scale * other[turned] + more, span)
    assert found == pytest.approx(wanted, abs=0.02 * scale)
    wanted = np.array(interval(one.mean(1).tolist(), 40)) * scale + more
    found = interval([scale * x + more for x in one.mean(1)[turned]], 40, span=span)
    assert found == pytest.approx(wanted, abs=0.02 * scale)


def test_twice_the_tasks_tell_more_of_a_study(study):
    from study_report import interval, paired

    one, other = np.random.default_rng(1).random((2, 3, 40))
    twice = paired(np.tile(one, 2), np.tile(other, 2))
    once = paired(one, other)
    assert twice[2] - twice[1] < once[2] - once[1]
    equal = [0.3, 0.1 + 0.2, 0.3]  # seeds that differ by rounding
    widths = [most - least for _, least, most in (interval(equal, n) for n in (40, 80, 160))]
    assert widths == sorted(widths, reverse=True)
    assert interval(equal, 40) == pytest.approx(interval([0.3] * 3, 40), abs=0.005)  # other draws


def test_a_run_that_ends_below_its_best_has_fallen_off(study):
    from study_report import fell_off

    fine = {"rewards": [0.1] * 5 + [0.9] * 9, "last": 0.9}
    assert not fell_off(fine) and fell_off(fine | {"rollbacks": 1})
    assert fell_off({"rewards": [0.9] * 5 + [0.3] * 5, "last": 0.3})


def test_a_worker_answers_each_command_with_its_exit_code(repository, tmp_path):
    log = str(tmp_path / "log")
    asked = [json.dumps(["plan", ["--help"], log]), json.dumps(["nothing", [], log])]
    worker = [sys.executable, str(repository / "scripts" / "study_worker.py")]
    how = {"capture_output": True, "text": True, "cwd": repository}
    answers = subprocess.run(worker, input="\n".join(asked), **how)
    assert answers.stdout.split() == ["0", "1"]
    assert "usage" in Path(log).read_text() and "No module named" in Path(log).read_text()


def test_a_swapped_pair_does_each_others_work():
    class Team(NamedTuple):
        profiles: tuple

        def act(self, agent, state, turns=()):
            return agent, self.profiles[agent], [(turn.name, turn.text) for turn in turns]

    pair = Profile("planner"), Profile("solver", answers=True)
    play = relay.swapped(Team(pair), "task")
    assert next(play) == [(1, pair[0], [])]
    said = small.turn(1, [1], [2])._replace(text="3+9=12", name="solver", answers=True)
    assert play.send([said]) == [(0, pair[1], [("planner", "2")])]
    step = play.send([said._replace(name="planner", answers=False)])
    assert [turn.answers for turn in step.turns] == [False, True] and step.graded[0].answers


class Windows:
    """A team whose acts are what it is shown."""

    profiles = ("reader", "writer")

    def act(self, agent, state, turns=()):
        return Act(agent, state.observation, 0, (), Sampling(9))


def test_nobody_reads_more_of_a_long_text_than_a_window():
    said = small.turn(0, [1], [2])
    team, text = Windows(), "1+2+0+3+3+1+0+2+2=?"
    play = long_text.map_reduce(team, text)
    read = next(play)
    assert [act.prompt for act in read] == ["1+2+0=?", "3+3+1=?", "0+2+2=?"]
    told = [said._replace(text=t, index=i) for i, t in enumerate(("1+2=3,3+0=3", "7", "no idea"))]
    [last] = play.send(told)
    assert (last.agent, last.prompt, last.sees) == (1, "3+7+?=?", (0, 1, 2))
    play = long_text.notes(team, text)
    seen, answers = next(play), ["3", "3+6=9,9+1=10", "12"]
    for i, answer in enumerate(answers):
        seen = play.send([said._replace(text=answer, index=i)])
    assert seen[0].prompt == "12+2+2=?" and seen[0].sees == (0, 1, 2)
    assert play.send([said._replace(text="16")]).graded[0].text == "16"


def test_a_message_of_one_digit_tells_three_sums_of_four():
    assert [relay.bound(digits) for digits in (0, 1, 2)] == [0.1, 0.75, 1.0]
    assert relay.last_digits("9+7=16", 1) == "6" and relay.last_digits("guess", 2) == ""
    late = relay.shuffled_digits()
    assert [late("9+7=16"), late("1+1=2"), late("")] == ["", "16", "2"]
