"""The commands as a user meets them: exit codes, one-line errors, resuming, the run directory."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bounds
import pytest
import yaml
from run_files import lines_of

from marft_jax import chat, cli, evaluate, train
from marft_jax.models.weights import tiny
from marft_jax.run import checkpoints, loop, signals
from marft_jax.run.signals import EXIT_STOPPED

SMALL = ["--algo.episodes", "8", "--run.save_every", "2"]


pytestmark = pytest.mark.usefixtures("one_device")  # meshes have a module of their own


def run_train(*flags: object) -> int:
    with pytest.raises(SystemExit) as left:
        train.main([*SMALL, *map(str, flags)])
    return left.value.code if isinstance(left.value.code, int) else 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Four uninterrupted steps."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert run_train("--run.dir", run, "--run.steps", 4, "--eval.every", 2) == 0
    return run


@pytest.mark.slow
def test_a_run_directory_explains_itself(finished):
    assert cli.parse(["--config", str(finished / "config.yaml")]).run.steps == 4
    team = yaml.safe_load((finished / "team.yaml").read_text())
    assert [agent["name"] for agent in team["agents"]] == ["planner", "solver"]
    assert [row["step"] for row in lines_of(finished)] == [1, 2, 3, 4]
    assert sorted(p.name for p in (finished / "checkpoints").iterdir()) == ["2", "4"]
    assert list((finished / "tensorboard").iterdir())
    assert "eval/arithmetic/accuracy" in lines_of(finished)[-1]
    assert all(row["tokens/prefix_shared"] > 0 for row in lines_of(finished))
    episode = json.loads((finished / "transcripts" / "4.jsonl").read_text().splitlines()[0])
    assert episode["D"] == [[0, 0], [1, 0]]
    assert episode["turns"][1]["reward"] == episode["reward"]


@pytest.mark.slow
def test_metrics_have_the_documented_names(finished, repository):
    names = set(lines_of(finished)[0]) - {"step"}
    assert {"eval/arithmetic/accuracy", "agent/solver/truncated", "critic/loss"} <= names
    readme = (repository / "marft_jax" / "run" / "README.md").read_text()
    listed = readme[readme.index("## Metrics") : readme.index("## Never lose")]
    for name in names:
        assert re.search(rf"\b{re.escape(name.split('/')[-1])}\b", listed), name


@pytest.mark.slow
def test_what_is_compiled_is_counted_and_soon_all_is(finished, tmp_path):
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["device/compiled"] == 0
    of_no_other_test = ["--lora.rank", 5, "--algo.episodes", 4, "--run.steps", 1]
    assert run_train("--run.dir", tmp_path / "run", *of_no_other_test) == 0
    [row] = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert row["device/compiled"] > 0 and row["time/compile_s"] > 0


@pytest.mark.slow
def test_steps_of_known_shapes_hardly_wait_for_a_compiler(tmp_path):
    """Tasks of one length, and actions cut at their limit; a prefill may still be a new one."""
    run, brief = tmp_path / "run", ["--team.max_new_tokens", 3, "--algo.episodes", 4]
    assert run_train("--run.dir", run, "--run.steps", 6, *brief) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["device/compiled"] for row in rows[2:]) <= 2


@pytest.mark.slow
def test_engine_and_learner_agree_from_the_first_update(finished):
    for row in lines_of(finished):
        assert row["agent/planner/logprob_gap"] < bounds.logprobs(tiny.CONFIG)
        assert row["agent/solver/logprob_gap"] < bounds.logprobs(tiny.CONFIG)


@pytest.mark.slow
def test_stopping_and_starting_again_changes_nothing(finished, tmp_path):
    run = tmp_path / "halves"
    assert run_train("--run.dir", run, "--run.steps", 2, "--eval.every", 2) == 0
    assert run_train("--run.dir", run, "--run.steps", 4, "--eval.every", 2) == 0
    assert lines_of(run) == lines_of(finished)
    assert "--run.steps was 2, is 4" in (run / "log.txt").read_text()
    whole = (finished / "transcripts" / "4.jsonl").read_text()
    assert (run / "transcripts" / "4.jsonl").read_text() == whole


@pytest.mark.slow
def test_another_seed_is_another_run(finished, tmp_path):
    run = tmp_path / "seed"
    assert run_train("--run.dir", run, "--run.steps", 1, "--run.seed", 1) == 0
    assert lines_of(run)[0]["tokens/action"] != lines_of(finished)[0]["tokens/action"]


def test_a_dry_run_shows_what_the_models_are_shown_and_leaves_nothing(tmp_path, capsys):
    run = tmp_path / "run"
    assert run_train("--dry_run", "--run.dir", run) == 0
    shown = capsys.readouterr().out
    assert "planner is shown:\n<|system|>plan<|user|>" in shown and "solver is shown:" in shown
    assert "reward " in shown and str(run) in shown
    assert "verdicts: agent solver, verdict " in shown and "{" not in shown
    assert not any(line.startswith(",") for line in shown.splitlines())
    assert f"{tempfile.gettempdir()}/tmp" not in shown.replace(str(run), "")
    assert not run.exists()


@pytest.mark.parametrize("topic", [[], ["team"], ["all"]])
def test_the_help_has_the_dry_run(topic, capsys):
    assert run_train("--help", *topic) == 0
    assert "--dry_run" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_is_not_continued_with_adapters_of_another_shape(finished, capsys):
    assert run_train("--run.dir", finished, "--lora.rank", 4) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "lora.rank was 8, is 4" in line


OTHERS = {
    "another environment": (["--env.name", "own_sum:Sum"], "--env.name was arithmetic"),
    "another algorithm": (["--algo.name", "tppo"], "--algo.name was appo, is tppo"),
    "another workflow": (["--team.workflow", "debate"],
        "--team.workflow was sequential, is debate"),
    "a base of another form": (["--model.quantize", "int8"], "--model.quantize was none, is int8"),
    "another team": (["--team.file", "{tmp}/team.yaml"], "agents was ['planner', 'solver']"),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("steps", [4, 5])
@pytest.mark.slow
def test_a_run_is_not_continued_as_another_one_and_stays_as_it_is(
    finished, what, steps, tmp_path, monkeypatch, capsys
):
    """Done or not: its files would tell of what never ran."""
    (tmp_path / "own_sum.py").write_text(HANGS.format(do="pass").replace("Hangs", "Sum"))
    team = "agents: [{name: one, prompt: p}, {name: two, prompt: p, answers: true}]"
    (tmp_path / "team.yaml").write_text(team)
    monkeypatch.syspath_prepend(tmp_path)
    flags, named = OTHERS[what]
    before = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file() and p.name != "lock"}
    flags = [flag.format(tmp=tmp_path) for flag in flags]
    assert run_train("--run.dir", finished, "--run.steps", steps, *flags) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert named in line and "--run.dir" in line
    for path, content in before.items():
        assert path.read_bytes() == content, path


@pytest.mark.slow
def test_a_run_that_is_done_says_how_to_go_on_and_takes_no_settings(finished, capsys):
    before = (finished / "config.yaml").read_text()
    assert run_train("--run.dir", finished) == 0
    assert "done: 4 steps in" in (shown := capsys.readouterr().out) and "--run.steps 8" in shown
    for flags in (["--algo.lr", "0.5"], ["--run.steps", "3"]):
        assert run_train("--run.dir", finished, *flags) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert f"{flags[0]} was" in line and "--run.steps 8" in line
    assert (finished / "config.yaml").read_text() == before


MOVES = """
import os
import tempfile
from marft_jax.types import StepResult


class Moves:
    def reset(self, seed):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
        return "3+4+5=?"

    def step(self, turns):
        return StepResult("", float("12" in turns[-1].text), True)
"""


@pytest.mark.slow
def test_an_environment_that_changes_into_a_removed_directory_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "moves_away.py").write_text(MOVES)
    assert run_train("--run.dir", "run", "--env.name", "moves_away:Moves", "--run.steps", 2) == 0
    monkeypatch.undo()
    assert len(lines_of(tmp_path / "run")) == 2 and (tmp_path / "run/checkpoints/2").is_dir()


LOGGERS = """
import sys


class Leaves:
    def __init__(self, run_dir, first_step):
        self.folder = run_dir

    def write(self, step, metrics):
        (self.folder / "written").touch()
        sys.exit(0)

    def close(self):
        raise RuntimeError("closed badly")


class Closes(Leaves):
    def write(self, step, metrics):
        pass

    def close(self):
        (self.folder / "closed").touch()


class ClosesBadly(Leaves):
    def write(self, step, metrics):
        pass
"""


@pytest.mark.slow
def test_a_logger_of_a_users_ends_its_own_logging_and_nothing_else(tmp_path, monkeypatch):
    """Neither a run, a step that is finished, nor the loggers beside it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_loggers.py").write_text(LOGGERS)
    run = tmp_path / "run"
    kinds = [f"own_loggers:{name}" for name in ("Closes", "Leaves", "ClosesBadly")]
    assert run_train("--run.dir", run, "--run.steps", 2, "--run.loggers", *kinds) == 0
    assert len(lines_of(run)) == 2 and (run / "checkpoints" / "2").is_dir()
    assert (run / "written").exists() and (run / "closed").exists()
    log = (run / "log.txt").read_text()
    assert log.count("own_loggers:Leaves: no more steps are logged there: SystemExit: 0") == 1
    assert "own_loggers:ClosesBadly: no more steps are logged there: RuntimeError: closed" in log


@pytest.mark.parametrize("name", ["os:system", "pathlib:Path", "sys:exit"])
def test_a_logger_that_is_none_is_one_line(name, tmp_path, capsys):
    assert run_train("--run.dir", tmp_path / "run", "--run.loggers", name, "--run.steps", 1) == 2
    assert f"--run.loggers {name}: cannot be opened: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_disk_that_is_full_in_a_checkpoint_is_one_line(tmp_path, monkeypatch, capsys):
    write, (soft, hard) = checkpoints.whole_folder, resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(folder):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # no file grows beyond that
        return write(folder)

    monkeypatch.setattr(checkpoints, "whole_folder", full)
    try:
        left = run_train("--run.dir", tmp_path, "--run.steps", 2, "--run.loggers", "none")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    [line] = capsys.readouterr().err.splitlines()
    assert left == 1 and "cannot be written (File too large)" in line


@pytest.mark.slow
def test_token_level_training_runs(tmp_path):
    run = tmp_path / "tppo"
    assert run_train("--run.dir", run, "--run.steps", 2, "--algo.name", "tppo") == 0
    assert lines_of(run)[0]["agent/solver/logprob_gap"] < bounds.logprobs(tiny.CONFIG)


@pytest.mark.release
def test_a_base_in_bfloat16_is_sampled_and_learned_from(tmp_path):
    """Engine and learner round differently, and no more than that."""
    run, flags = tmp_path / "halves", ["--critic.mode", "lora", "--model.remat", "none"]
    assert run_train("--run.dir", run, "--run.steps", 2, "--model.dtype", "bfloat16", *flags) == 0
    for row in lines_of(run):
        for name in ("planner", "solver"):
            assert 0 < row[f"agent/{name}/logprob_gap"] < 0.01
            assert row[f"agent/{name}/grad_norm"] > 0


@pytest.mark.slow
def test_baselines_refills_and_levels_continue_exactly(tmp_path):
    """The moving average and the level of the curriculum are saved, and which tasks replace a
    dropped group is not chance."""
    flags = ["--algo.name", "reinforce", "--algo.baseline", "moving", "--algo.group_size", 4]
    flags += ["--algo.dynamic_sampling", "true", "--algo.max_refills", 1, "--algo.kl_coef", 0.01]
    flags += ["--env.curriculum", 0.05]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert run_train("--run.dir", whole, "--run.steps", 4, *flags) == 0
    assert run_train("--run.dir", halves, "--run.steps", 2, *flags) == 0
    assert run_train("--run.dir", halves, "--run.steps", 4, *flags) == 0
    assert lines_of(halves) == lines_of(whole)
    last = lines_of(whole)[-1]
    assert last["agent/solver/ref_kl"] != 0 and "critic/loss" not in last
    assert sum(row["episode/dropped_groups"] for row in lines_of(whole)) > 0
    levels = [row["curriculum/level"] for row in lines_of(whole)]
    assert levels[0] == 0 and levels[-1] == 1
    episode = json.loads((whole / "transcripts" / "4.jsonl").read_text().splitlines()[0])
    assert episode["turns"][0]["value"] is None
    assert episode["turns"][0]["advantage"] is not None


@pytest.mark.slow
def test_evaluate_reports_and_keeps_every_response(finished, capsys):
    with pytest.raises(SystemExit) as left:
        evaluate.main(["--run", str(finished), "--eval.episodes", "8", *SMALL])
    assert left.value.code == 0
    shown = r"accuracy [01]\.\d{4} \(0\.\d+ to [01]\.\d+\) \(8 tasks\)"
    assert re.search(shown, capsys.readouterr().out)
    file = finished / "evaluations" / "arithmetic-4.jsonl"
    assert len(file.read_text().splitlines()) == 8


def test_evaluate_takes_a_bare_base_and_several_samples(capsys, tmp_path):
    flags = ["--samples", "2", "--eval.temperature", "1", "--eval.episodes", "8", *SMALL]
    flags += ["--out", str(tmp_path)]
    with pytest.raises(SystemExit) as left:
        evaluate.main(["--base", "tiny", *flags])
    assert left.value.code == 0
    assert "pass@2" in capsys.readouterr().out


@pytest.mark.slow
def test_chat_shows_who_said_what(finished, capsys, monkeypatch, tmp_path):
    questions = tmp_path / "questions"
    questions.write_text("3+4+5=?\n")
    with questions.open() as typed, pytest.raises(SystemExit) as left:
        monkeypatch.setattr(sys, "stdin", typed)
        chat.main(["--run", str(finished), *SMALL])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "3+4+5=?" in shown and "planner" in shown and "solver" in shown


TEAM_WITHOUT_ANSWER = "agents: [{name: a, prompt: p}]"
WRONG = {
    "an unknown algorithm": (["--algo.name", "ppo"], "appo"),
    "an unknown environment": (["--env.name", "chess"], "arithmetic"),
    "an unknown workflow": (["--team.workflow", "ring"], "sequential"),
    "a missing model": (["--model.base", "/nowhere/model.gguf"], "/nowhere/model.gguf"),
    "adapters of a run that is not there": (
        ["--lora.init", "runs/nowhere"],
        "see --lora.init (a run, an export or hub:owner/name)"),
    "adapters of a file": (["--lora.init", "{tmp}/rows.jsonl"], "--lora.init"),
    "an unknown environment, before its data": (
        ["--env.data", "nowhere.jsonl", "--env.name", "maths"], "--env.name: expected arithmetic"),
    "an unknown workflow, before missing data": (
        ["--env.name", "math", "--env.data", "nowhere.jsonl", "--team.workflow", "seq"],
        "--team.workflow: expected program, sequential"),
    "an unknown step reward, before missing data": (
        ["--env.name", "math", "--env.data", "nowhere.jsonl", "--algo.credit", "per_step",
         "--algo.step_reward", "solvr"], "step reward: expected planner"),
    "a row without an answer": (["--env.name", "math", "--env.data", "{tmp}/rows.jsonl"], "2"),
    "a team that nobody answers for": (["--team.file", "{tmp}/team.yaml"], "answers: true"),
    "a prompt longer than the context": (["--model.context", "12", "--team.max_new_tokens", "4"],
                                         "context"),
    "a metric for the best that no step has": (
        ["--run.best_metric", "reward/meen", "--algo.episodes", "4"], "reward/mean"),
    "a metric for the best that no evaluation has": (
        ["--run.best_metric", "eval/arithmetic/pass"], "--eval.every"),
    "a coordinator without a port": (["--mesh.coordinator", "localhost", "--mesh.processes", "2",
                                      "--mesh.process", "0"], "HOST:PORT"),
    "an impossible mesh": (["--mesh.tensor", "3"], "possible"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", WRONG)
def test_wrong_input_is_one_clear_line_and_exit_code_2(what, tmp_path, capsys):
    (tmp_path / "team.yaml").write_text(TEAM_WITHOUT_ANSWER)
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n{"question": "x"}\n')
    flags, mentioned = WRONG[what]
    flags = [flag.format(tmp=tmp_path) for flag in flags]
    assert run_train("--run.dir", tmp_path / "run", *flags) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("marft_jax: ") and mentioned in line


def steps_of(run: Path) -> list[str]:
    file = run / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


HANGS = """
import time
from marft_jax.types import StepResult


class Hangs:
    '''Never answers from the third step on; those before it are fine.'''

    def reset(self, seed):
        self.seed = seed
        return "3+4+5=?"

    def step(self, turns):
        if self.seed >= 16:
            open("hangs", "w").close()
            {do}
        return StepResult("", float("12" in turns[-1].text), True)
"""


def stopped(folder: Path, flags, ready, number: signal.Signals, wait_s: float = 0) -> bool:
    """Whether a training in a process of its own, once ``ready``, ends with 75 by this signal."""
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": root}
    command = [sys.executable, "-m", "marft_jax.train", *map(str, flags)]
    process = subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 240
        while not ready():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        time.sleep(wait_s)
        process.send_signal(number)
        return process.wait(240) == EXIT_STOPPED
    finally:
        process.kill()


@pytest.mark.slow
def test_an_interrupt_in_the_first_step_closes_the_loggers(tmp_path):
    (tmp_path / "own_loggers.py").write_text(LOGGERS)
    (tmp_path / "hangs_now.py").write_text(HANGS.format(do="time.sleep(1000)").replace("16", "0"))
    flags = [*SMALL, "--run.dir", "run", "--env.name", "hangs_now:Hangs"]
    flags += ["--run.loggers", "own_loggers:Closes"]
    assert stopped(tmp_path, flags, lambda: (tmp_path / "hangs").exists(), signal.SIGINT)
    assert (tmp_path / "run" / "closed").exists()


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, pytest.param(2, marks=pytest.mark.release)])
def test_sigterm_saves_the_last_finished_step_and_exits_with_75(tmp_path, lag):
    """In a rollout that never ends, between two saves."""
    (tmp_path / "hangs_later.py").write_text(HANGS.format(do="time.sleep(1000)"))
    run = tmp_path / "stopped"
    flags = [*SMALL, "--run.dir", run, "--run.save_every", 100, "--env.name", "hangs_later:Hangs"]
    flags += ["--rollout.lag", lag]
    flags += ["--run.steps", 500]

    def hangs() -> bool:
        return (tmp_path / "hangs").exists() and len(steps_of(run)) >= 2

    # with a lag it hangs early: until step 2 is held, after it was reported
    assert stopped(tmp_path, flags, hangs, signal.SIGTERM, wait_s=2 if lag else 0)
    assert len(steps_of(run)) == 2
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["2"]
    assert (
        "stopping: saving step 2; the unfinished step 3 is dropped; again to leave now"
        in (run / "log.txt").read_text()
    )


def test_a_signal_during_an_update_says_that_its_step_may_still_be_saved(tmp_path, monkeypatch):
    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 60
        # the thread that listens says so
        while "stopping" not in (tmp_path / "log.txt").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    monkeypatch.setattr(signals, "GRACE_S", 600.0)  # else it ends this process
    monkeypatch.setattr(loop, "transcribe", interrupted)
    assert run_train("--run.dir", tmp_path, "--run.steps", 3) == EXIT_STOPPED
    log = (tmp_path / "log.txt").read_text()
    assert "stopping: saving step 1 if it is done in 600 s, else nothing; again to leave now" in log
    assert f"stopped after step 1, which is saved in {tmp_path}; start again to continue" in log
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["1"]


@pytest.mark.slow
def test_when_too_many_episodes_fail_the_last_finished_step_is_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fails_later.py").write_text(HANGS.format(do="raise OverflowError"))
    run = tmp_path / "run"
    flags = ["--run.dir", run, "--run.save_every", 100, "--env.name", "fails_later:Hangs"]
    assert run_train(*flags, "--run.steps", 9) == 1
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "8 of 8 episodes failed" in line
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["2"]
    shutil.rmtree(run / "checkpoints")  # a start that finds history, and no checkpoint of it
    assert run_train(*flags, "--run.steps", 1) == 0
    assert len(lines_of(run)) == 1 and len(lines_of(run / "unsaved-1")) == 2
    assert "unsaved-1" in (run / "log.txt").read_text()
    moved = {p.name for p in (run / "unsaved-1").iterdir()}
    assert moved >= {"config.yaml", "team.yaml", "log.txt", "transcripts", "inputs.json"}


@pytest.mark.parametrize(("flags", "most"), [
    (["--algo.overlong_buffer", 25], 24),
    (["--algo.overlong_buffer", 9, "--team.max_new_tokens", 8], 8),
    (["--algo.name", "grpo", "--algo.overlong_buffer", 4096], 24),
    (["--algo.overlong_buffer", 7, "--team.file", "short.yaml"], 5),
])  # fmt: skip
def test_a_length_penalty_of_every_action_is_refused(flags, most, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    agents = "{name: a, max_new_tokens: 9}, {name: b, max_new_tokens: 5, answers: true}"
    Path("short.yaml").write_text(f"agents: [{agents}]")
    assert run_train("--run.dir", tmp_path / "run", *flags) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert f"--algo.overlong_buffer: expected at most {most}" in line
    assert not (tmp_path / "run").exists()


FLAT_ENV = """
from marft_jax.types import StepResult


class Flat:
    def reset(self, seed):
        self.seed = seed
        return "1+1=?"

    def step(self, turns):
        return StepResult("", {reward}, True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("reward", "flags", "which"), [
    ("0.0", [], "all 8 episodes earned 0,"),
    ("1.0", ["--algo.name", "grpo", "--algo.group_size", 4], "all 8 episodes earned 1,"),
    ("float(self.seed % 2)", ["--algo.name", "grpo", "--algo.group_size", 2],
     "in each of 4 groups all samples that are compared earned the same,"),
    ("float(self.seed % 2)", [], ""),
])  # fmt: skip
def test_a_step_without_any_gradient_is_named_once(
    reward, flags, which, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "flat_env.py").write_text(FLAT_ENV.format(reward=reward))
    flags = [*flags, "--env.name", "flat_env:Flat", "--run.dir", "run", "--run.steps", 3]
    assert run_train(*flags) == 0
    log = Path("run/log.txt").read_text()
    assert log.count("no gradient: ") == bool(which) and which in log
    assert "playing compiles at most" in log
