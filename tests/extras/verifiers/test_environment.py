"""Environments of the package verifiers; most tests run where it is installed."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
from commands import code_of

from marft_jax import train
from marft_jax.envs.base import make
from marft_jax.errors import BadInput
from marft_jax.extras.verifiers.environment import Settings

TASKSET = """
import verifiers.v1 as vf

__all__ = ["Sums", "Pair"]


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data]):
    @vf.reward
    async def wrote(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") > 0)


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for i in range(40):
            yield Sum(Data(prompt=f"{i}+1=?", answer=str(i + 1)), self.config.task)


class PairConfig(vf.EnvConfig):
    planner: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()


class Pair(vf.Env[PairConfig]):
    async def run(self, task, agents):
        await agents.planner.run(task)
        await agents.solver.run(task)

    async def finalize(self, task, episode):
        episode.traces[0].record_reward("both", 0.25)
"""


def test_without_the_package_a_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r'needs that package: pip install -e "\.\[verifiers\]"'):
        make(Settings(taskset="sums"), "train")


@pytest.fixture
def taskset(tmp_path, monkeypatch):
    pytest.importorskip("verifiers")
    (tmp_path / "pair_of_sums.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return "pair_of_sums"


def test_an_unknown_taskset_and_wrong_settings_are_one_line(taskset):
    for wrong, message in (
        (Settings(taskset="nowhere_v1"), "--env.taskset nowhere_v1: "),
        (Settings(taskset=taskset, args="{"), "--env.args: expected a JSON object"),
        (Settings(taskset=taskset, holdout=0.0), "expected tasks of both kinds, got 40 in all"),
    ):
        with pytest.raises(BadInput) as caught:
            make(wrong, "eval")
        assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
def test_each_seat_is_played_by_its_agent_and_earns_what_stands_on_its_traces(taskset, tmp_path):
    words = f"""--env.name verifiers --env.taskset {taskset} --team.workflow program --run.dir run
        --algo.name grpo --algo.episodes 4 --algo.group_size 2 --run.steps 1 --run.loggers none
        --run.transcripts_every 1"""
    assert code_of(train.main, *words.split()) == 0
    [line] = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["agent/planner/reward"] == 1.25 and metrics["agent/solver/reward"] == 1.0
    assert metrics["reward/mean"] == (1.25 + 1.0) / 2
    row = json.loads((tmp_path / "run" / "transcripts" / "1.jsonl").read_text().splitlines()[0])
    assert [turn["agent"] for turn in row["turns"]] == ["planner", "solver"]
    assert row["results"][0]["info"]["verifiers"]["planner"] == [{"wrote": 1.0, "both": 0.25}]


@pytest.mark.parametrize(
    "content", ["", "raise ImportError('cannot import name Response')", "raise TypeError('odd')"]
)
def test_a_package_that_is_too_old_or_broken_is_one_line_at_the_start(
    content, tmp_path, monkeypatch
):
    old = tmp_path / "verifiers"
    old.mkdir()
    (old / "__init__.py").write_text(content)
    for name in [name for name in sys.modules if name.partition(".")[0] == "verifiers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BadInput, match=r"expected verifiers 0.4 or newer: pip install -U") as error:
        make(Settings(taskset="sums"), "train")
    assert "\n" not in str(error.value)
    monkeypatch.delitem(sys.modules, "verifiers", raising=False)
