"""Real training processes, killed, frozen out and stopped; and what users' code does wrong."""

from __future__ import annotations

import contextlib
import gc
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import faults
import pytest
import small
from scripted import Scripted

from marft_jax.envs import base
from marft_jax.envs.base import load_class
from marft_jax.envs.threads import Call, DaemonThreads, interrupt_hanging
from marft_jax.errors import BadInput, EpisodesFailed, Stopped
from marft_jax.formats import jsonlines
from marft_jax.learning.credit import make_credit
from marft_jax.learning.settings import Appo
from marft_jax.learning.step_rewards import find_step_reward
from marft_jax.rollout.rollout import Rollout
from marft_jax.run import transcripts
from marft_jax.team.workflows import find_workflow


@pytest.fixture(scope="module")
def threads():
    faults.OVER.clear()
    yield DaemonThreads()
    faults.OVER.set()
    for _ in range(3000):
        if not interrupt_hanging():
            break
        time.sleep(0.01)
    assert not interrupt_hanging()


PAIR = small.samples([0, 1])
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
    assert all(len(credit(episode)) == len(episode.turns) for episode in played.episodes)
    for row in transcripts.records(played, small.team(2).tokenizer.decode):
        jsonlines.dumps(row).encode()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("name", FAULTS)
def test_a_play_can_be_stopped_whatever_goes_wrong_in_it(threads, name):
    until = time.monotonic() + 0.02
    settings = {"max_failed": None, "stop": lambda: time.monotonic() > until}
    try:
        tasks = small.samples([0, 1, 2])
        rollout(threads, name, FAULTS[name][0], step_seconds=600.0, **settings).play(tasks, 0)
    except Stopped:
        pass
    assert time.monotonic() < until + 5.0


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["holds on", "holds on to all", "closes badly"])
@pytest.mark.parametrize("steps", [3, 10**9])
def test_a_workflow_that_holds_on_is_let_go_without_a_word(threads, name, steps):
    """Also where its play is stopped: Python prints a traceback of what fails when collected."""
    name = f"workflow: {name}"
    asked = iter(range(steps))
    stop = lambda: next(asked, None) is None  # noqa: E731
    with contextlib.suppress(Stopped):
        rollout(threads, name, FAULTS[name][0], max_failed=1.0, stop=stop).play(PAIR, 0)
    gc.collect()
    time.sleep(0.05)


def test_there_are_more_than_a_hundred_kinds_of_faults():
    assert len(FAULTS) > 150


@pytest.mark.parametrize("name", faults.ERRORS)
def test_a_step_reward_that_raises_is_one_line_with_its_place(name, monkeypatch):
    error, expected = faults.ERRORS[name]
    monkeypatch.setattr(faults, "reward", faults.raising(error), raising=False)
    settings = {"credit": "per_step", "step_reward": "faults:reward"}
    episode = small.episode(0, [small.turn(0, [1], [2])], [0.5])
    if isinstance(error, KeyboardInterrupt):  # in the main thread that is a person's Ctrl-C
        return
    with pytest.raises(BadInput, match="step reward of agent 'planner'") as caught:
        small.paid([episode], **settings)
    message = str(caught.value)
    assert expected in message and "faults.py:" in message and message.isprintable()


@pytest.mark.parametrize("line", ["raise SystemExit(0)", "x = ", "1 / 0", "import nowhere"])
def test_a_users_module_that_cannot_be_imported_is_one_line(line, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for i, find in enumerate((load_class, find_workflow, find_step_reward)):
        name = f"wrong_{abs(hash(line))}_{i}"
        (tmp_path / f"{name}.py").write_text(line)
        with pytest.raises(BadInput) as caught:
            find(f"{name}:thing")
        assert str(caught.value).isprintable() and name in str(caught.value)


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
        engine, small.team(2), faults.sound, Hanging, threads, max_failed=1.0, step_seconds=2.0
    )
    started = time.monotonic()
    played = rollout.play(small.samples(range(24)), 0)
    assert time.monotonic() - started < 15.0  # one after another, 9 of them would take 18
    assert [e.index for e in played.failed] == [i for i in range(24) if i < 4 or i % 4 == 0]
    assert [e.index for e in played.episodes] == [i for i in range(5, 24) if i % 4]
    assert all("faults.py" in e.why for e in played.failed)


@pytest.mark.parametrize(("file", "ends"), [("workers.py", True), ("../team/dag.py", False)])
def test_code_that_waits_for_our_workers_is_left_alone_when_it_is_late(threads, file, ends):
    """They have time limits of their own; an endless loop of a user's own is interrupted."""
    code = "import time\ndef wait(begun, over):\n    begun.set()\n"
    code += "    for _ in range(20): time.sleep(0.01)\n    over.set()"
    names: dict = {}
    exec(compile(code, str((Path(base.__file__).parent / file).resolve()), "exec"), names)
    begun, over, done = threading.Event(), threading.Event(), threading.Event()
    call = Call("a step", lambda: names["wait"](begun, over))
    threads.submit(call.run).add_done_callback(lambda _: done.set())
    assert begun.wait(5.0)
    call.give_up("too late")
    assert done.wait(5.0) and over.is_set() == ends


@pytest.mark.slow
@pytest.mark.parametrize("lag", ["0", "2"])
def test_a_run_that_was_killed_ends_like_one_that_was_not(repository, tmp_path, lag):
    """At its start, in a step and in a save; ``--kills 24`` is the long form."""
    command = [sys.executable, str(repository / "scripts" / "fault_test.py"), "--kills", "3"]
    flags = ["--steps", "40", "--save-every", "2", "--dir", str(tmp_path), "--algo.episodes", "8"]
    flags += ["--rollout.lag", lag]
    done = subprocess.run([*command, *flags], cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "final state are equal" in done.stdout


@pytest.mark.slow
def test_a_learning_rate_1000_times_too_high_ends_with_a_normal_reward(repository, tmp_path):
    run = tmp_path / "run"
    flags = ["--algo.lr", "1.0", "--algo.episodes", "32", "--run.dir", str(run)]
    flags += ["--run.steps", "14", "--guard.patience", "2", "--guard.lr_factor", "0.001"]
    command = [sys.executable, "-m", "marft_jax.train", *flags]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 15))
    assert rows[-1]["guard/rollbacks"] == 1
    events = [json.loads(x) for x in (run / "transcripts/guard.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "rolled back" for event in events) == 1
    first = sum(row["reward/mean"] for row in rows[:3]) / 3
    last = sum(row["reward/mean"] for row in rows[-5:]) / 5
    assert last > 0.6 and last > first - 0.1, (first, last)
