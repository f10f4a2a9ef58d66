"""The checker of users' environments: sound ones pass, each kind of mistake is named."""

import random
import re
import subprocess
import sys
import threading
import time

import pytest

from marft_jax.check import main
from marft_jax.extras.check.playing import check
from marft_jax.types import StepResult


class Sound:
    def reset(self, seed):
        return f"What is {seed} modulo 7?"

    def step(self, turns):
        [solver] = [turn for turn in turns if turn.answers]
        return StepResult("", 0.5 if "4" in solver.text else -0.25, True)


def odd(**methods):
    return type("Odd", (Sound,), methods)


def returning(result):
    return odd(step=lambda self, turns: result)


def of_training(self, split):
    assert split == "train"


@pytest.mark.parametrize("most", [{"episodes": 0}, {"steps": 0}, {"seconds": 0}])
def test_a_check_that_plays_nothing_finds_nothing_sound(most):
    problems, _ = check(Sound, **most)
    assert len(problems) == 1


@pytest.mark.parametrize("env", [Sound, odd(__init__=of_training)])
def test_a_sound_environment_passes(env):
    problems, remarks = check(env)
    assert problems == []
    assert "20 distinct tasks" in remarks[0] and "from -0.25 to 0.5" in remarks[1]


@pytest.mark.parametrize(
    "env, message",
    [
        (odd(reset=lambda self, seed: f"What is {random.random()}?"), "gave another task"),
        (odd(step=lambda *_: StepResult("", random.random(), True)), "gave another reward"),
        (odd(reset=lambda self, seed: ""), "expected a text that is not empty"),
        (odd(step=lambda self, turns: {}["gone"]), "seed 0: KeyError: 'gone'"),
        (returning((1.0, True)), "expected a marft_jax.types.StepResult, got (1.0"),
        (returning(StepResult("", float("nan"), True)), "reward: expected a finite number"),
        (returning(StepResult(None, 1.0, True)), "observation: expected a text"),
        (returning(StepResult("", 1.0, False)), "while the episode goes on"),
        (returning(StepResult("", 1.0, True, {}, {"solver": None})), "agent_rewards['solver']"),
    ],
)
def test_each_mistake_is_named(env, message):
    problems, _ = check(env)
    assert any(message in problem for problem in problems), problems


def test_endless_and_useless_environments_are_remarked():
    problems, remarks = check(returning(StepResult("go on", 1.0, False)), episodes=3, steps=4)
    text = "\n".join(remarks)
    assert "3 episodes were not done after 4 steps" in text and "nothing to learn" in text
    assert problems == ["no episode was done after 4 steps: a run cuts them off, as endless"]


class Watching(Sound):
    def view(self, agent, observation):
        return f"{agent} sees {observation}"

    def tool(self, turn):
        return "a tool" if turn.text == "42" else None


def test_views_and_tools_are_tried_and_agents_may_have_names_of_their_own():
    assert check(Watching, episodes=7)[0] == []
    paid = returning(StepResult("", 1.0, True, agent_rewards={"writer": 0.5}))
    assert "expected names of agents that acted" in check(paid)[0][0]
    assert check(paid, agents=["editor", "writer"])[0] == []


@pytest.mark.parametrize(
    "methods, message",
    [
        ({"view": lambda self, agent, text: None}, "seed 0: view: expected a text, got None"),
        ({"view": lambda self, agent, text: str(random.random())}, "gave another view"),
        ({"tool": lambda self, turn: 3}, "seed 0: tool: expected a text, got 3"),
        ({"tool": lambda self, turn: exec("raise SystemExit(0)")}, "SystemExit: 0"),
        ({"reset": lambda self, seed: exec("raise SystemExit(0)")}, "seed 0: SystemExit: 0"),
    ],
)
def test_mistakes_in_views_and_tools_are_named(methods, message):
    problems, _ = check(type("Wrong", (Watching,), methods))
    assert any(message in problem for problem in problems), problems


@pytest.mark.parametrize("method", ["__init__", "reset", "step", "view", "tool"])
def test_a_check_has_a_time_limit(method):
    over = threading.Event()
    hanging = type("Hanging", (Watching,), {method: lambda self, *args: over.wait(60)})
    problems, _ = check(hanging, seconds=1.0)
    over.set()
    assert len(problems) == 1 and re.search(r"no answer after [01]\.\d s", problems[0])
    assert "test_envs_check.py" in problems[0]


def test_a_slow_environment_is_checked_as_far_as_time_goes():
    slow = odd(reset=lambda self, seed: time.sleep(0.2) or f"t {seed}")
    problems, remarks = check(slow, seconds=2.0)
    assert problems == [] and any("of 20 episodes were played" in remark for remark in remarks)


def test_the_command_says_what_is_wrong_and_exits_accordingly(repository, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "class Bad:\n    def reset(self, seed): return 3\n    def step(self, turns): pass\n"
    )
    command = [sys.executable, "-m", "marft_jax.check", "mine:Bad"]
    paths = f"{repository}:{tmp_path}"
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": paths})
    assert done.returncode == 1 and "wrong: seed 0: reset(0): expected a text" in done.stdout
    with pytest.raises(SystemExit, match="2"):
        main(["nowhere:Env"])
    assert "cannot import nowhere" in capsys.readouterr().err


class Restorable:
    """Pays the number of the step, which its snapshots hold."""

    def reset(self, seed):
        self.step_number = 0
        return f"task {seed}"

    def step(self, turns):
        self.step_number += 1
        return StepResult("next", float(self.step_number), self.step_number == 3)

    def snapshot(self):
        return {"step": self.step_number}

    def restore(self, value):
        self.step_number = value["step"]


class Forgetting(Restorable):
    def restore(self, value):
        pass


def test_snapshots_are_restored_after_each_step():
    assert check(Restorable, episodes=2)[0] == []
    [problem, _] = check(Forgetting, episodes=2)[0]
    assert problem.startswith("seed 0: the same seed and turns gave another reward (a snapshot")
