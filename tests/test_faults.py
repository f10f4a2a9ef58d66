"""Real training processes, killed, frozen out and stopped; and what users' code does wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import faults
import pytest
import small
from scripted import Scripted

from marft_jax import cli, train_team
from marft_jax.background import DaemonThreads
from marft_jax.envs.base import settings_type
from marft_jax.errors import BadInput, EpisodesFailed, Stopped
from marft_jax.formats import jsonlines
from marft_jax.learning.credit import make_credit
from marft_jax.learning.settings import Appo
from marft_jax.learning.step_rewards import find_step_reward
from marft_jax.rollout.rollout import Rollout
from marft_jax.run import transcripts
from marft_jax.team.workflows import find_workflow


@pytest.fixture
def threads():
    """Threads for users' calls; all that a test starts end with it."""
    before = environment_threads()
    faults.OVER.clear()
    with DaemonThreads() as threads:
        yield threads
    faults.OVER.set()
    assert_gone(before)


def environment_threads():
    return {thread for thread in threading.enumerate() if thread.name == "environment"}


def assert_gone(before, but=0):
    """All threads that were not there before end, but for so many that hang."""
    deadline = time.monotonic() + 60.0
    while len(environment_threads() - before) > but and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(environment_threads() - before) == but


FAULTS = {
    **{f"environment: {name}": fault for name, fault in faults.ENVS.items()},
    **{f"workflow: {name}": fault for name, fault in faults.WORKFLOWS.items()},
}


def parts(name: str, fault):
    """The workflow and the environment: sound, but for task 1 with the fault."""
    if name.startswith("workflow"):
        return lambda team, task: (fault if task == "t1" else faults.sound)(
            team, task
        ), faults.Sound

    class Mixed:
        def reset(self, seed):
            self._env = (fault if seed == 1 else faults.Sound)()
            return self._env.reset(seed)

        def step(self, turns):
            return self._env.step(turns)

        def __getattr__(self, name):
            return getattr(self._env, name)

    return faults.sound, Mixed


def rollout(threads, name, fault, **settings):
    workflow, env = parts(name, fault)
    team = small.team(2, context=200)
    engine = Scripted(lambda request: "words")
    return Rollout(engine, team, workflow, env, threads, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_its_episode_and_nothing_else(threads, name, caplog, capfd):
    fault, expected = FAULTS[name]
    limits = {"step_seconds": 0.8 if expected == faults.LATE else 20.0, "max_turns": 12}
    tasks = small.samples([0, 1, 2])
    played = rollout(threads, name, fault, max_failed=0.5, **limits).play(tasks, 0)
    faulty = [e for e in played.episodes if e.index == 1]
    fine = [e for e in played.episodes if e.index != 1]
    assert [(len(e.turns), e.reward) for e in fine] == [(2, 2.0), (2, 2.0)]
    if expected is faults.KEPT:
        assert not played.failed and 1 <= len(faulty[0].turns) <= 12
    else:
        [(*place, why)] = played.failed
        assert place == [1, 1, 0] and not faulty and expected in why and why in caplog.text
        assert why.isprintable() and len(why) < 600
        if expected != faults.LATE or name == "environment: reset hangs":  # each takes its time
            with pytest.raises((BadInput, EpisodesFailed)) as caught:
                rollout(threads, name, fault, max_failed=0.5, **limits).play(small.samples([1]), 0)
            assert expected in str(caught.value) and str(caught.value).isprintable()
    credit = make_credit(Appo(), small.team(2))
    assert all(len(credit.pay(episode)) == len(episode.turns) for episode in played.episodes)
    for row in transcripts.records(played, small.team(2).decoders):
        jsonlines.dumps(row).encode()
    assert "Traceback" not in capfd.readouterr().err


HANGING = [name for name, (_, expected) in FAULTS.items() if expected == faults.LATE]


@pytest.mark.slow
@pytest.mark.parametrize("name", dict.fromkeys([*HANGING, *[*FAULTS][::12]]))
def test_a_play_can_be_stopped_whatever_goes_wrong_in_it(threads, name):
    until = time.monotonic() + 0.02
    settings = {"max_failed": None, "stop": lambda: time.monotonic() > until}
    try:
        tasks = small.samples([0, 1, 2])
        rollout(threads, name, FAULTS[name][0], step_seconds=600.0, **settings).play(tasks, 0)
    except Stopped:
        pass
    assert time.monotonic() < until + 60.0  # of the 600 s that a call may take


@pytest.mark.parametrize("name", faults.ERRORS)
def test_a_step_reward_that_raises_is_one_line_with_its_place(name, monkeypatch):
    error, expected = faults.ERRORS[name]
    monkeypatch.setattr(faults, "reward", faults.raising(error), raising=False)
    settings = {"credit": "per_step", "step_reward": "faults:reward"}
    episode = small.episode(0, [small.turn(0, [1], [2])], [0.5])
    if not isinstance(error, (Exception, SystemExit)):  # a person's Ctrl-C, say
        return
    with pytest.raises(BadInput, match="step reward of agent 'planner'") as caught:
        small.paid([episode], **settings)
    message = str(caught.value)
    assert expected in message and "faults.py:" in message and message.isprintable()


@pytest.mark.parametrize("line", ["raise SystemExit(0)", "x = ", "1 / 0", "import nowhere"])
def test_a_users_module_that_cannot_be_imported_is_one_line(line, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for i, find in enumerate((settings_type, find_workflow, find_step_reward)):
        name = f"wrong_{abs(hash(line))}_{i}"
        (tmp_path / f"{name}.py").write_text(line)
        with pytest.raises(BadInput) as caught:
            find(f"{name}:thing")
        assert str(caught.value).isprintable() and name in str(caught.value)


@pytest.mark.slow
def test_hanging_episodes_run_out_of_time_together(threads):
    """Wherever they hang, and in whichever step of the engine; the others are played to the end."""

    class Hanging(faults.Sound):
        def reset(self, seed):
            self._seed = seed
            return super().reset(faults.sleeping() if seed == 1 else seed)

        def view(self, agent, observation):
            return faults.sleeping() if self._seed in (2, 3) else observation

        def step(self, turns):
            return faults.sleeping() if self._seed % 4 == 0 else super().step(turns)

    def speak(request) -> str:
        return "x"

    engine = Scripted(speak, slots=2)  # so that few episodes come to an end at the same time
    rollout = Rollout(
        engine, small.team(2), faults.sound, Hanging, threads, max_failed=1.0, step_seconds=4.0
    )
    started = time.monotonic()
    played = rollout.play(small.samples(range(24)), 0)
    assert time.monotonic() - started < 30.0  # one after another, 9 of them would take 36
    assert [e.index for e in played.failed] == [i for i in range(24) if i < 4 or i % 4 == 0]
    assert [e.index for e in played.episodes] == [i for i in range(5, 24) if i % 4]
    assert all("faults.py" in e.why for e in played.failed)


def test_threads_end_with_what_made_them_but_those_that_hang():
    before = environment_threads()
    faults.OVER.clear()
    pool = DaemonThreads()
    hanging = pool.submit(faults.sleeping)
    assert pool.submit(lambda: 3).result() == 3
    assert_gone(before, but=1)
    assert not hanging.done()
    faults.OVER.set()
    hanging.result(60.0)
    assert_gone(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_run_leaves_no_threads_of_environments_behind(tmp_path):
    before = environment_threads()
    words = ["--run.steps", "1", "--algo.episodes", "8", "--run.loggers", "none"]
    assert train_team(cli.parse([*words, "--run.dir", str(tmp_path / "run")])) == 0
    assert_gone(before)


@pytest.mark.release  # a minute
def test_a_run_that_was_killed_ends_like_one_that_was_not(repository, tmp_path):
    """At its start, in a step and in a save, with a lag, which has more to lose; ``--kills 24`` is
    the long form."""
    command = [sys.executable, str(repository / "scripts" / "fault_test.py"), "--kills", "3"]
    flags = ["--steps", "10", "--save-every", "2", "--dir", str(tmp_path), "--algo.episodes", "8"]
    flags += ["--rollout.lag", "2"]
    done = subprocess.run([*command, *flags], cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "final state are equal" in done.stdout


@pytest.mark.release  # a minute
def test_a_learning_rate_1000_times_too_high_ends_with_a_normal_reward(repository, tmp_path):
    run = tmp_path / "run"
    flags = ["--algo.lr", "1.0", "--algo.episodes", "16", "--run.dir", str(run)]
    flags += ["--run.steps", "10", "--guard.patience", "2", "--guard.lr_factor", "0.001"]
    command = [sys.executable, "-m", "marft_jax.train", *flags]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert rows[-1]["guard/rollbacks"] == 1
    events = [json.loads(x) for x in (run / "events.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "rolled back" for event in events) == 1
    first = sum(row["reward/mean"] for row in rows[:3]) / 3
    last = sum(row["reward/mean"] for row in rows[-5:]) / 5
    assert last > 0.6 and last > first - 0.1, (first, last)
