"""Bases whose vocabulary has rows without a token: whole commands on them."""

from __future__ import annotations

import json

import bounds
import numpy as np
import padded
import pytest
from run_files import lines_of

from marft_jax import evaluate, train
from marft_jax.cli import configure_run
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer, from_directory
from marft_jax.models.weights import tiny
from marft_jax.run.loaded_team import LoadedTeam
from marft_jax.settings.setting import replaced

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]
HOT = "--team.temperature", "2.0", "--algo.episodes", "8", "--run.loggers", "none"


def run_train(folder, base, *flags):
    with pytest.raises(SystemExit) as left:
        train.main(["--run.dir", str(folder), "--model.base", str(base), *HOT, *flags])
    return left.value.code


@pytest.mark.parametrize(
    ("context", "holes"),
    [("own", True), pytest.param("shared", False, marks=pytest.mark.release)],
)
@pytest.mark.release
def test_no_id_without_a_token_is_sampled_and_no_episode_is_dropped(context, holes, tmp_path):
    base = padded.write(tmp_path / "base", 400, holes)
    tokenizer, run = from_directory(base), tmp_path / "run"
    assert len(tokenizer.tokens) == padded.TOKENS - (64 if holes else 0)
    flags = "--run.steps", "1", "--team.context", context
    assert run_train(run, base, *flags) == 0
    [line] = lines_of(run)
    for agent in ("planner", "solver"):
        assert line[f"agent/{agent}/logprob_gap"] < bounds.logprobs(tiny.CONFIG)
        assert 0 < line[f"agent/{agent}/entropy"] < np.log(len(tokenizer.tokens))
    assert "nonfinite" not in (run / "log.txt").read_text()
    rows = (run / "transcripts" / "1.jsonl").read_text().splitlines()
    assert len(rows) == 8
    config = replaced(configure_run(run), "eval.temperature", 2.0)
    team = LoadedTeam(run, config)
    asked = [turn for n in range(6) for turn in team.ask(f"{n}+2+3=?").turns]
    drawn = {int(i) for turn in asked for i in turn.action}
    assert len(drawn) > 20 and drawn <= tokenizer.tokens
    with pytest.raises(SystemExit) as left:
        evaluate.main(["--run", str(run), "--limit", "4"])
    assert not left.value.code


TEAM = """
bases:
  other: {{model: {teacher}}}
teacher: {{base: other}}
agents:
  - {{name: planner, prompt: plan}}
  - {{name: solver, prompt: solve, answers: true}}
"""


@pytest.mark.parametrize(("student", "teacher"), [(400, 264), (400, 401)], ids=str)
def test_a_teacher_with_other_padding_scores_the_same_tokens(student, teacher, tmp_path):
    base = padded.write(tmp_path / "student", student)
    other = padded.write(tmp_path / "teacher", teacher)
    (tmp_path / "team.yaml").write_text(TEAM.format(teacher=other))
    flags = "--team.file", str(tmp_path / "team.yaml"), "--algo.name", "distill", "--run.steps", "2"
    assert run_train(tmp_path / "run", base, *flags) == 0
    first, second = lines_of(tmp_path / "run")
    for agent in ("planner", "solver"):  # the same weights: nothing to learn, but for rounding
        assert abs(first[f"agent/{agent}/teacher_kl"]) < 2 * bounds.logprobs(tiny.CONFIG)
        assert np.isfinite(second[f"agent/{agent}/grad_norm"])
    assert "nonfinite" not in (tmp_path / "run" / "log.txt").read_text()


def test_a_teacher_whose_matrix_lacks_a_token_is_refused(tmp_path, capsys):
    base = padded.write(tmp_path / "student", 300)
    other = padded.write(tmp_path / "teacher", padded.TOKENS - 1)
    (tmp_path / "team.yaml").write_text(TEAM.format(teacher=other))
    flags = "--team.file", str(tmp_path / "team.yaml"), "--algo.name", "distill"
    assert run_train(tmp_path / "run", base, *flags) == 2
    assert capsys.readouterr().err
    assert ByteTokenizer().extends(ByteTokenizer(), padded.TOKENS)
    assert not ByteTokenizer().extends(ByteTokenizer(), padded.TOKENS - 1)
    assert json.loads((other / "config.json").read_text())["vocab_size"] == padded.TOKENS - 1
