"""Procedural tasks: made by seed, kept apart by hash, scored by their own scorers in workers."""

import dataclasses
import json
import socket
import subprocess
import sys

import numpy as np
import pytest

from marft_jax import cli
from marft_jax.envs.base import make
from marft_jax.errors import BadInput
from marft_jax.extras.gym.environment import Settings
from marft_jax.types import Turn

pytest.importorskip("reasoning_gym")
READY = [
    *("gsm_symbolic", "countdown"),
    *(pytest.param(n, marks=pytest.mark.release) for n in ("mini_sudoku", "maze", "sokoban")),
]


def source(split="train", **env):
    return make(Settings(workers=1, **env), split)


def turn(text):
    nothing = np.zeros(0, np.int32)
    return Turn(0, "solver", 0, nothing, nothing, nothing, text, True, (), False, 1.0)


@pytest.mark.parametrize("name", READY)
def test_a_ready_config_asks_and_scores(repository, name):
    config = cli.parse(["--config", str(repository / f"configs/gym_{name}.yaml")])
    made = make(dataclasses.replace(config.env, workers=1), "train")
    try:
        env = made.create()
        assert env.reset(5) == made.create().reset(5) != made.create().reset(6)
        wrong = env.step([turn("<answer>nothing of the kind</answer>")])
        assert wrong.reward < 0.5
        env.reset(5)
        right = env.step([turn(f"It is <answer>{wrong.info['reference']}</answer>.")])
        assert right.reward == 1.0 and right.done
    finally:
        made.close()


def test_held_out_tasks_never_appear_in_training():
    options = {"task": "maze", "options": ("min_dist=3", "max_dist=4", "min_grid_size=5",
                                           "max_grid_size=5"), "holdout": 0.3}  # fmt: skip
    train, held = source(**options), source("eval", **options)
    try:
        asked = {train.create().reset(seed) for seed in range(40)}
        assert not asked & {held.create().reset(seed) for seed in range(20)}
        assert len(asked) > 20
    finally:
        train.close()
        held.close()


@pytest.mark.parametrize(
    "env, message",
    [
        ({"task": "sudoko"}, "takes the names of datasets"),
        ({"task": "maze", "options": ("min_dist",)}, "expected name=value"),
        ({"task": "maze", "options": ("colour=3",)}, "colour"),
    ],
)
def test_a_wrong_task_is_one_clear_line(env, message):
    with pytest.raises(BadInput) as error:
        source(**env)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_worker_can_reach_nothing_even_if_a_scorer_evaluates_the_answer(tmp_path):
    """The countdown scorer hands the answer to an expression parser that runs it as Python."""
    mark = tmp_path / "mark"
    code = f"""
import sys, json
sys.argv = ["worker", "countdown", "{{}}"]
import reasoning_gym
def attack(self, text, entry):
    done = []
    import os, socket
    for deed in (os.fork, lambda: open({str(mark)!r}, "w").write("x"),
                 lambda: socket.socket()):
        try: done.append(deed())
        except BaseException as error: done.append(type(error).__name__)
    print(done, file=sys.stderr)
    return 0.0
from reasoning_gym.games import countdown
countdown.CountdownDataset.score_answer = attack
import runpy
runpy.run_module("marft_jax.extras.gym.worker", run_name="__main__")
"""
    request = json.dumps({"seed": 1, "text": "1", "seconds": 20}) + "\n"
    line, theirs = socket.socketpair()
    with line, line.makefile() as replies:
        line.sendall(request.encode())
        line.shutdown(socket.SHUT_WR)
        with theirs:
            # packages that are not compiled yet may warn
            run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], stdin=theirs,
                                 text=True, capture_output=True, timeout=120)  # fmt: skip
        assert replies.readlines()[1:] == ['{"score": 0.0}\n'], run.stderr
    assert not mark.exists() or mark.read_text() == ""
    assert run.stderr == "['PermissionError', 1, 'PermissionError']\n"  # 1: buffered, never written
