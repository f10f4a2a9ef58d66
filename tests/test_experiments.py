"""The experiments of the second MARFT release, as settings: task files that compose with teams."""

from __future__ import annotations

import json
from pathlib import Path

import bounds
import pytest

from marft_jax import cli, train_team
from marft_jax.errors import BadInput
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer
from marft_jax.models.weights import tiny
from marft_jax.team import State
from marft_jax.team.assemble import make_team
from marft_jax.team.team_files import load_team
from marft_jax.types import MAIN

CONFIGS = Path(__file__).parent.parent / "configs"
TEAMS = {
    2: "planner_solver", 3: "planner_solver_verifier", 4: "planner_solver_reflector_verifier",
}  # fmt: skip


@pytest.mark.parametrize("anonymous", ["false", "true"])
@pytest.mark.parametrize("members", TEAMS)
@pytest.mark.parametrize("task", ["deepscaler", "deepcoder"])
def test_each_task_composes_with_each_team(task, members, anonymous):
    team_file = str(CONFIGS / "teams" / f"{TEAMS[members]}.yaml")
    words = ["--config", str(CONFIGS / f"{task}.yaml"), "--team.file", team_file]
    config = cli.parse([*words, "--team.anonymous", anonymous])
    context, mode = config.model.context, config.lora.mode
    team = make_team(config.team, mode, load_team(team_file), {MAIN: (ByteTokenizer(), context)})
    assert len(team.profiles) == members and team.adapters == {MAIN: members} and team.shared
    prompt = bytes(i for i in team.act(0, State("TASK")).prompt.tolist() if i < 256).decode()
    assert (prompt == "TASK") == (anonymous == "true")
    algo = config.algo
    assert (algo.lr, algo.minibatches, algo.gamma, algo.gae_lambda) == (3e-5, 4, 1.0, 1.0)
    assert (algo.reward_bias, algo.correction, algo.correction_cap) == (-0.5, "decoupled", 5.0)
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (32, 16.0, ("q", "v"))


MATHS = [{"problem": f"{i}+{i}=?", "answer": str(2 * i)} for i in range(20)]
PROGRAMS = [
    {
        "problem": f"Read a number, print it plus {i}.",
        "tests": json.dumps([{"type": "stdin_stdout", "input": "1\n", "output": f"{1 + i}\n"}]),
    }
    for i in range(20)
]


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(("task", "rows"), [("deepscaler", MATHS), ("deepcoder", PROGRAMS)])
@pytest.mark.release
def test_an_experiment_takes_a_step_on_the_built_in_model(tmp_path, task, rows):
    data, held_out = tmp_path / "tasks.jsonl", tmp_path / "held_out.jsonl"
    data.write_text("\n".join(map(json.dumps, rows[:-2])))
    held_out.write_text("\n".join(map(json.dumps, rows[-2:])))
    words = ["--config", str(CONFIGS / f"{task}.yaml"), "--run.dir", str(tmp_path / "run")]
    words += ["--team.file", str(CONFIGS / "teams" / "planner_solver.yaml"), "--run.steps", "1"]
    words += ["--model.base", "tiny", "--model.dtype", "float32", "--model.context", "1024"]
    words += ["--team.max_new_tokens", "8", "--env.data", str(data), "--algo.episodes", "4"]
    words += ["--algo.minibatches", "2", "--rollout.slots", "4", "--eval.every", "0"]
    words += ["--env.eval_data", str(held_out)]
    try:
        code = train_team(cli.parse(words))
    except BadInput as error:
        if "isolation" not in str(error):
            raise
        pytest.skip(f"no isolation on this machine: {error}")
    assert code == 0
    [line] = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["agent/planner/logprob_gap"] < bounds.logprobs(tiny.CONFIG)
    assert metrics["episode/turns"] == 2
    [first, *_] = (tmp_path / "run" / "transcripts" / "1.jsonl").read_text().splitlines()
    plan, solution = json.loads(first)["turns"]
    assert solution["prompt"].startswith(plan["prompt"])  # one conversation
