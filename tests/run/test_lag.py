"""A run with a lag is exact: whatever takes how long, and wherever it is stopped."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import faults
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from run_files import arrays_of, killed_after, lines_of

from marft_jax import cli, train
from marft_jax.envs.arithmetic import Addition
from marft_jax.errors import BadInput
from marft_jax.learning.learner import Learner
from marft_jax.learning.settings import resolve
from marft_jax.rollout.pipeline import Pipeline
from marft_jax.rollout.source import RolloutSource
from marft_jax.run import imitation, loop, signals
from marft_jax.types import MAIN

SMALL = ["--algo.episodes", "8", "--run.loggers", "none", "--run.transcripts_every", "1"]
LAG = 2
LEVELS = ["--env.curriculum", "0.15", "--eval.every", "2", "--eval.episodes", "4"]
TREE = ["--algo.name", "grpo", "--algo.credit", "tree", "--algo.branches", "1", "--algo.branch_at",
        "every", "--algo.branch_continue", "best", "--algo.branch_budget", "leaves"]  # fmt: skip
FLAGS = [*LEVELS, *TREE, "--rollout.lag", LAG]
"""With what depends on earlier samples: levels, evaluations between, and trees."""


pytestmark = pytest.mark.usefixtures("one_device")


def run_train(run: Path, *flags: object) -> int:
    with pytest.raises(SystemExit) as left:
        train.main([*SMALL, "--run.dir", str(run), *map(str, flags)])
    return left.value.code if isinstance(left.value.code, int) else 0


def assert_same(run: Path, other: Path, step: int) -> None:
    """Metrics, transcripts, and every array of the last checkpoint, bit for bit."""
    assert lines_of(run) == lines_of(other)
    names = [sorted(p.name for p in (r / "transcripts").iterdir()) for r in (run, other)]
    assert names[0] == names[1]
    for name in names[0]:
        texts = [(r / "transcripts" / name).read_text() for r in (run, other)]
        assert texts[0] == texts[1], name
    states = [jax.tree_util.tree_leaves_with_path(arrays_of(r, step)) for r in (run, other)]
    for (path, one), (_, two) in zip(*states, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes(), path


def slowed(patch: pytest.MonkeyPatch, owner: type, name: str, *seconds: float) -> None:
    """Makes a method wait before it runs, each time as long as is next in turn."""
    run, calls, lock = getattr(owner, name), [0], threading.Lock()

    def wait(*args, **kwargs):
        with lock:
            calls[0] += 1
        time.sleep(seconds[calls[0] % len(seconds)])
        return run(*args, **kwargs)

    patch.setattr(owner, name, wait)


def on_two_devices(patch: pytest.MonkeyPatch) -> list[str]:
    """The flags of a run of which one device plays and one learns."""
    patch.setattr(jax, "devices", lambda *backend: jax.local_devices()[:2])
    return ["--mesh.rollout", "1"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(six uninterrupted steps, what sampled each)."""
    run = tmp_path_factory.mktemp("lag") / "whole"
    flags = [*FLAGS, "--run.save_every", 1, "--run.keep", 9]
    sampled, play = [], RolloutSource._play

    def noted(self, job, cancelled):
        sampled.append((job, jax.tree.map(np.array, job.adapters[MAIN])))
        return play(self, job, cancelled)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutSource, "_play", noted)
        assert run_train(run, *flags, "--run.steps", 6) == 0
    return run, sampled


@pytest.mark.slow
def test_step_s_is_sampled_with_the_adapters_after_s_minus_lag_updates(whole):
    run, sampled = whole
    assert [job.updates for job, _ in sampled] == [max(0, step - LAG) for step in range(6)]
    for job, adapters in sampled:
        if job.updates:
            jax.tree.map(np.testing.assert_array_equal, adapters,
                         arrays_of(run, job.updates)["policies"][MAIN]["adapters"])  # fmt: skip
    rows = lines_of(run)
    assert [row["rollout/version"] for row in rows] == [job.updates for job, _ in sampled]
    assert [row["rollout/lag"] for row in rows] == [min(step, LAG) for step in range(6)]
    # The first reward is enough for the next level, and known from version 1 on.
    assert [job.level for job, _ in sampled] == [0, 0, 0, 1, 1, 1]
    assert [row["curriculum/level"] for row in rows] == [0, 0, 0, 1, 1, 1]
    past = arrays_of(run, 6)["past"]
    assert len(past) == LAG
    for version, kept in enumerate(past, start=6 - LAG):
        before = arrays_of(run, version)
        own = before["policies"][MAIN]["adapters"], before["progress"]
        jax.tree.map(np.testing.assert_array_equal, (kept["adapters"][MAIN], kept["progress"]), own)


@pytest.mark.slow
def test_a_run_with_a_lag_reports_it_and_weighs_stale_samples(whole):
    run, _ = whole
    settings = cli.parse(["--config", str(run / "config.yaml")])
    assert settings.algo.correction == "decoupled"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {"rollout/lag", "rollout/version", "time/player_wait_s"} <= set(rows[-1])
    weights = [row["agent/solver/correction_weight"] for row in rows]
    # A step whose branches all leave out the solver has nothing to weigh, and says 1.
    assert any(weight != 1 for weight in weights)


@pytest.mark.slow
def test_what_is_slow_changes_nothing(whole, tmp_path, monkeypatch):
    """Environments, the thread that plays, here on a device of its own, and the learner."""
    run, _ = whole
    slowed(monkeypatch, Addition, "reset", 0.0, 0.03, 0.0, 0.01)
    slowed(monkeypatch, RolloutSource, "_play", 0.5, 0.0, 0.2)
    slowed(monkeypatch, Learner, "learn", 0.0, 0.0, 0.6)
    flags = [*FLAGS, *on_two_devices(monkeypatch), "--run.steps", 6]
    assert run_train(tmp_path / "run", *flags) == 0
    assert_same(tmp_path / "run", run, 6)


@pytest.mark.slow
def test_a_device_that_only_plays_changes_nothing_without_a_lag_either(tmp_path, monkeypatch):
    """And adds one number, the time that adapters take to get there."""
    flags = ["--run.steps", 2, "--eval.every", "2", "--eval.episodes", "4"]
    assert run_train(tmp_path / "one", *flags) == 0
    assert run_train(tmp_path / "two", *flags, *on_two_devices(monkeypatch)) == 0
    assert_same(tmp_path / "one", tmp_path / "two", 2)
    told = "plays on 1 others (0.91 MB of adapters each), learns on mesh 1x1x1; "
    assert told in (tmp_path / "two/log.txt").read_text()
    names = [set(json.loads((tmp_path / run / "metrics.jsonl").read_text().splitlines()[-1]))
             for run in ("one", "two")]  # fmt: skip
    assert names[1] - names[0] == {"time/place_s"}


@pytest.mark.slow
def test_a_run_that_is_killed_in_any_step_continues_exactly(whole, tmp_path, monkeypatch):
    """Between saves, in its first steps and later: what was in flight is played again."""
    run, _ = whole
    flags = [*FLAGS, "--run.save_every", 2, "--run.steps", 6]
    for step in (3, 6):
        with killed_after(step, monkeypatch):
            train.main([*SMALL, "--run.dir", str(tmp_path / "run"), *map(str, flags)])
    assert run_train(tmp_path / "run", *flags) == 0
    assert_same(tmp_path / "run", run, 6)


@pytest.mark.slow
def test_another_lag_is_refused_when_a_run_continues(whole, capsys):
    run, _ = whole
    assert run_train(run, "--rollout.lag", LAG + 1, "--run.steps", 7) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert f"--rollout.lag was {LAG}, is {LAG + 1}" in line


ENV = """
import pathlib
import time

import faults
from marft_jax.types import StepResult


class Own:
    '''Sound in the first two steps.'''

    def reset(self, seed):
        self.late = seed >= 16
        return "3+4+5=?"

    def step(self, turns):
        if self.late:
            {do}
        return StepResult("", float("12" in turns[-1].text), True)
"""


@pytest.fixture
def own_env(tmp_path, monkeypatch):
    """Flags of an environment that does what the test says; what hangs in it ends with the test."""
    monkeypatch.syspath_prepend(tmp_path)
    faults.OVER.clear()

    def make(name: str, do: str) -> list[str]:
        (tmp_path / f"{name}.py").write_text(ENV.format(do=do))
        return ["--env.name", f"{name}:Own", "--rollout.lag", "2", "--run.steps", "5"]

    yield make
    faults.OVER.set()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["between two microbatches", "on the devices"])
def test_a_play_that_fails_ends_a_long_update_and_changes_nothing(
    own_env, tmp_path, tmp_path_factory, capsys, monkeypatch, where
):
    """It is raised as soon as it is known; with its cause gone the run goes on as if unbroken."""
    run, learn, wait_for = tmp_path / "run", Learner.learn, Pipeline.wait_for
    waits, learns, mended = (tmp_path / name for name in ("waits", "learns", "mended"))
    flags = own_env(
        f"lag_fails_{where.split()[0]}",
        f"""
            pathlib.Path({str(waits)!r}).touch()
            while not pathlib.Path({str(learns)!r}).exists():
                time.sleep(0.01)
            if not pathlib.Path({str(mended)!r}).exists():
                raise OverflowError""",
    )

    def long(self, state, batch, step, check):
        while step == 1 and where == "between two microbatches":  # for ever
            learns.touch()
            time.sleep(0.01)
            check()
        return learn(self, state, batch, step, check)

    def slow(self, arrays):
        updates = int(arrays[0].step)
        if updates == 2:
            while not waits.exists():  # the device computes one thing after another
                time.sleep(0.01)
            learns.touch()
            arrays = seconds(jnp.eye(300))
        wait_for(self, arrays)
        assert updates == 1, "it was waited for"

    @jax.jit
    def seconds(x):
        return jax.lax.fori_loop(0, 3_000, lambda i, x: x @ x, x)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "learn", long)
        patch.setattr(Pipeline, "wait_for", slow)
        assert run_train(run, *flags) == 1
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "8 of 8 episodes failed" in line
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["1"]
    assert not [t for t in threading.enumerate() if t.name.startswith("player")]
    mended.touch()
    whole = tmp_path_factory.getbasetemp() / "unbroken"  # one for both ways
    for folder in (run,) if whole.exists() else (run, whole):
        assert run_train(folder, *flags) == 0
    assert_same(run, whole, 5)


@pytest.mark.slow
def test_an_error_of_the_learner_ends_a_play_that_hangs(own_env, tmp_path, capsys, monkeypatch):
    run, learn = tmp_path / "run", Learner.learn
    failed: list[float] = []

    def failing(self, state, batch, step, check):
        if step == 0:
            return learn(self, state, batch, step)
        failed.append(time.monotonic())
        raise BadInput("no more")

    monkeypatch.setattr(Learner, "learn", failing)
    assert run_train(run, *own_env("lag_hangs", "faults.OVER.wait(1000)")) == 2
    assert time.monotonic() - failed[0] < 100.0  # the play itself takes 1000
    assert capsys.readouterr().err.strip().splitlines() == ["marft_jax: no more"]
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["1"]
    assert not [t for t in threading.enumerate() if t.name.startswith("player")]


@pytest.mark.slow
def test_a_signal_ends_a_play_that_hangs_and_saves_what_is_learned(own_env, tmp_path, monkeypatch):
    """As if it came in a wait for the player: the third step is never played."""
    run, hangs = tmp_path / "run", threading.Event()
    monkeypatch.setattr(signals.Stop, "__call__", lambda self: hangs.is_set())
    report = loop.report

    def asked(run, state, *args):
        reported = report(run, state, *args)
        if int(state.step) == 2:
            threading.Timer(0.5, hangs.set).start()
        return reported

    monkeypatch.setattr(loop, "report", asked)
    assert run_train(run, *own_env("lag_stops", "faults.OVER.wait(1000)")) == 75
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["2"]


@pytest.mark.release
def test_a_rollback_drops_what_was_played_ahead(own_env, tmp_path, monkeypatch):
    """Twice the same, with other delays; steps after it are sampled by what it went back to."""
    do = "return StepResult('', 77.0 if {0} else 1.0, True)"
    flags = [*own_env("lag_breaks", "pass"), "--algo.name", "spoiled:SPOILED"]
    broken = "self.broken = 24 <= seed < 8000\n        self.late = "
    text = ENV.format(do=do.format("self.broken")).replace("self.late = ", broken)
    (tmp_path / "lag_breaks.py").write_text(text)
    flags += ["--guard.skips", 2, "--run.save_every", 2, "--run.steps", 6]
    for name in ("one", "two"):
        assert run_train(tmp_path / name, *flags) == 0
        slowed(monkeypatch, RolloutSource, "_play", 0.3, 0.0)
    rows = lines_of(tmp_path / "one")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["guard/rollbacks"] for row in rows] == [0, 0, 1, 1, 1, 1]
    assert [row["rollout/version"] for row in rows] == [0, 0, 0, 1, 2, 3]
    assert_same(tmp_path / "one", tmp_path / "two", 6)


def test_demonstrations_have_no_lag():
    config = cli.parse(["--rollout.lag", "2"])
    assert imitation.settings_of(config).rollout.lag == 0


def test_correction_follows_the_lag_where_it_is_left_open():
    for flags, meant in ([], "none"), (["--rollout.lag", "1"], "decoupled"):
        assert resolve(cli.parse(flags), {MAIN: ("tiny", small.CONFIG)}).correction == meant
    stated = cli.parse(["--rollout.lag", "1", "--algo.correction", "none"])
    assert resolve(stated, {MAIN: ("tiny", small.CONFIG)}).correction == "none"
    assert cli.parse(["--rollout.lag", "1", "--algo.correction_cap", "2"]).algo.correction_cap == 2
