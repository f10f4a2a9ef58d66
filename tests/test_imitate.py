"""Learning from demonstrations: the loss, the commands that go on from it, and exact resume."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import bounds
import jax
import numpy as np
import pytest
import small
from one_step import LAYERS, ONCE, fresh, learn, same, settings
from run_files import lines_of

from marft_jax import chat, cli, evaluate, export, imitate, random_keys, train
from marft_jax.learning.settings import Imitation
from marft_jax.models.weights import tiny
from marft_jax.run import imitation

SMALL = ["--algo.episodes", "8", "--algo.minibatches", "1", "--run.save_every", "2"]
EVALUATED = ["--eval.every", "4", "--eval.episodes", "4"]
PLAN, ANSWER = ("planner", "1+1=2"), ("solver", "17")


pytestmark = pytest.mark.usefixtures("one_device")


def left(main, *words: object) -> int:
    with pytest.raises(SystemExit) as gone:
        main([str(word) for word in words])
    return gone.value.code if isinstance(gone.value.code, int) else 0


def imitated(*words: object) -> int:
    return left(imitate.main, *SMALL, *words)


def line(*turns: tuple[str, str], **more: object) -> str:
    said = [{"agent": agent, "text": text} for agent, text in turns]
    return json.dumps({"turns": said, **more})


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Four uninterrupted steps over twelve demonstrations."""
    run = tmp_path_factory.mktemp("runs") / "start"
    assert imitated("--out", run, "--demonstrations", 12, "--run.steps", 4, *EVALUATED) == 0
    return run


@pytest.mark.slow
def test_the_loss_of_every_agent_falls(finished):
    rows = lines_of(finished)
    for agent in ("planner", "solver"):
        losses = [row[f"agent/{agent}/loss"] for row in rows]
        assert losses[-1] < 0.7 * losses[0]
    assert rows[0]["reward/mean"] == 1.0 and "eval/arithmetic/accuracy" in rows[3]
    assert "loss 0." in (finished / "log.txt").read_text()


def test_the_loss_is_the_cross_entropy_of_recorded_tokens_whatever_was_earned():
    episodes = small.random_episodes(6)
    unpaid = [e._replace(results=[r._replace(reward=0.0) for r in e.results]) for e in episodes]
    unpaid = [
        e._replace(turns=[t._replace(logprobs=np.zeros_like(t.logprobs)) for t in e.turns])
        for e in unpaid
    ]
    config = settings(ONCE, mode="none")
    state, seen = learn(config, unpaid, name="imitation")
    right = small.with_policy(episodes, small.adapters(layers=LAYERS))
    for agent in range(2):
        own = [t.logprobs for e in right for t in e.turns if t.agent == agent]
        gap = pytest.approx(-np.concatenate(own).mean(), abs=bounds.logprobs(layers=LAYERS))
        assert seen["logprob_gap"][agent] == gap
        before = jax.device_get(fresh(config, "imitation").adapters)
        moved = [jax.tree.map(lambda x, n=agent: x[n], tree) for tree in (before, state.adapters)]
        assert not same(*moved)


@pytest.mark.slow
def test_one_demonstration_of_ten_is_measured_and_not_learned_from(finished):
    rows = lines_of(finished)
    for agent in ("planner", "solver"):
        losses = [row[f"agent/{agent}/heldout_loss"] for row in rows]
        assert 0 < losses[-1] < losses[0]
    log = (finished / "log.txt").read_text()
    assert "12 of 12 demonstrations, mean reward 1.000, 1 held out; a step learns from 8 in " in log
    assert "in 2 x 1 optimiser steps" in log
    shown, demonstrated = (
        {json.loads(line)["task"] for line in (finished / name).read_text().splitlines()}
        for name in ("transcripts/4.jsonl", "demonstrations.jsonl")
    )
    assert shown < demonstrated


@pytest.mark.slow
def test_demonstrations_depend_on_the_seed_and_are_not_what_training_begins_with(tmp_path):
    def numbers(seed: int) -> set[int]:
        run = tmp_path / str(seed)
        words = ["--demonstrations", 12, "--run.steps", 1, "--run.seed", seed]
        assert imitated("--out", run, *words) == 0
        lines = (run / "demonstrations.jsonl").read_text().splitlines()
        return {json.loads(line)["index"] for line in lines}

    first = numbers(0)
    assert len(first) == 12 and not first & numbers(1)
    assert not first & {random_keys.task(0, number) for number in range(10_000)}
    size = 20  # of so many distinct tasks, those at the end of the first pass
    found = [random_keys.demonstrated_task(1, number, size) for number in range(12)]
    begins = random_keys.task(1, 0)
    left = size - begins % size
    assert len({number % size for number in found}) == 12
    assert not {n % size for n in found} & {(begins + n) % size for n in range(min(8, left))}
    assert {number // size for number in found} == {begins // size}


@pytest.mark.slow
def test_stopping_and_starting_again_changes_nothing(finished, tmp_path):
    run = tmp_path / "halves"
    assert imitated("--out", run, "--demonstrations", 12, "--run.steps", 2, *EVALUATED) == 0
    assert left(imitate.main, "--out", run, "--run.steps", 4) == 0
    ours, theirs = lines_of(run), lines_of(finished)
    ours[1] = {key: value for key, value in ours[1].items() if not key.startswith("eval/")}
    assert ours == theirs
    for step in (1, 4):
        name = f"transcripts/{step}.jsonl"
        assert (run / name).read_text() == (finished / name).read_text()


@pytest.mark.slow
def test_a_run_goes_on_with_no_other_demonstrations_than_its_own(finished, capsys):
    assert imitated("--out", finished, "--demonstrations", 12, "--run.steps", 4) == 0
    assert imitated("--out", finished, "--demonstrations", 11, "--run.steps", 4) == 2
    assert "began with other demonstrations" in capsys.readouterr().err
    assert left(train.main, "--run.dir", finished) == 2
    assert "see marft_jax.imitate" in capsys.readouterr().err


@pytest.mark.slow
def test_training_evaluation_chat_and_export_take_the_run(finished, tmp_path, monkeypatch, capsys):
    assert left(evaluate.main, "--run", finished, "--limit", "2") == 0
    assert left(export.main, "--run", finished, "--out", tmp_path / "team") == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("4+7+8=?\n"))
    assert left(chat.main, "--run", finished) == 0
    losses = []
    for start in (finished, tmp_path / "team"):
        again = tmp_path / f"from-{start.name}"
        words = ["--lora.init", start, "--run.steps", 1, "--demonstrations", 12]
        assert imitated("--out", again, *words) == 0
        losses.append(lines_of(again)[0]["agent/solver/loss"])
    assert losses[0] == pytest.approx(losses[1], abs=bounds.logprobs(tiny.CONFIG))
    assert losses[0] < 0.7 * lines_of(finished)[0]["agent/solver/loss"]
    capsys.readouterr()
    rank = ["--lora.rank", 4, "--lora.init", finished, "--run.dir", tmp_path / "low"]
    assert left(train.main, *rank) == 2
    assert "start/planner: its rank is 8; set --lora.rank 8" in capsys.readouterr().err


@pytest.mark.slow
def test_the_transcripts_of_a_run_can_be_filtered_by_what_they_earned(tmp_path):
    """Rejection sampling: only what was right is learned."""
    first, second = tmp_path / "first", tmp_path / "second"
    train_flags = [*SMALL, "--run.dir", first, "--run.steps", 1, "--run.transcripts_every", 1]
    assert left(train.main, *train_flags) == 0
    sampled = [json.loads(x) for x in (first / "transcripts/1.jsonl").read_text().splitlines()]
    right = [episode for episode in sampled if episode["reward"] == 1.0]
    assert 0 < len(right) < len(sampled)
    words = ["--data", first / "transcripts/1.jsonl", "--min_reward", 1, "--run.steps", 1]
    assert imitated("--out", second, *words) == 0
    kept = [json.loads(x) for x in (second / "demonstrations.jsonl").read_text().splitlines()]
    assert kept == right and lines_of(second)[0]["reward/mean"] == 1.0


def test_every_fault_is_a_line_of_its_own(tmp_path, capsys):
    file = tmp_path / "mine.jsonl"
    lines = [
        line(PLAN, ANSWER, task=1),
        '{"task": 1',
        line(PLAN, ("critic", "no"), task=1),
        line(ANSWER, PLAN, task=1),
        line(PLAN, ("solver", "9" * 30), task=1),
        line(PLAN, task=1),
    ]
    file.write_text("\n".join(lines))
    assert imitated("--out", tmp_path / "run", "--data", file) == 2
    *told, last = capsys.readouterr().err.splitlines()
    assert len(told) == 5 and "5 of 6 demonstrations cannot be replayed" in last
    words = ("got no JSON", "got 'critic'", "expected planner", "24 tokens", "no turn 2")
    for number, word in enumerate(words, 2):
        [found] = [one for one in told if f"{file}:{number}: " in one]
        assert word in found


@pytest.mark.parametrize(("text", "shown"), [
    ("question,answer\na,b\nc,d\n", ':1: expected {"task"'),
    ('{"question": "a", "answer": "b"}\n' * 3, ':1: expected {"task": ..., "turns": ['),
    ('{"messages": [{"role": "user", "content": "a"}]}\n' * 2, ':1: expected {"task": ..., '),
    ("[1]\n2\n", ":1: expected {"),
    ('{"task": "a", "turns": [{"agent": "planner"}]}\n', ':1: expected {"task": '),
    ('{"task": "a", "turns": "abc"}\n' * 30, ":1: expected {"),
])  # fmt: skip
def test_a_file_of_another_kind_is_one_line_before_a_model_is_loaded(
    text, shown, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("marft_jax.run.imitation.open_training", None)
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    assert imitated("--out", tmp_path / "run", "--data", file) == 2
    [told] = capsys.readouterr().err.splitlines()
    count = len(text.splitlines())
    assert f"{file}{shown}" in told and told.endswith(
        f"none of {count} demonstrations can be replayed"
    )


@pytest.mark.parametrize(("words", "shown"), [
    ([], "expected --data FILE, or --demonstrations N"),
    (["--data", "missing.jsonl"], "missing.jsonl: cannot be read"),
    (["--data", "{empty}"], "expected good demonstrations, got 0 of 0"),
    (["--demonstrations", 2, "--algo.clip", 0.1], "--algo.clip: unknown setting"),
    (["--demonstrations", 2, "--algo.epohcs", 1], "algo.epohcs"),
    (["--demonstrations", 2, "--min_reward", 2], "got 0 of 2; see --min_reward"),
])  # fmt: skip
def test_wrong_input_is_one_line(words, shown, tmp_path, capsys):
    (tmp_path / "empty").write_text("\n")
    words = [str(word).format(empty=tmp_path / "empty") for word in words]
    assert imitated("--out", tmp_path / "run", *words) == 2
    [found] = capsys.readouterr().err.splitlines()
    assert shown in found


def test_files_for_training_fit(tmp_path):
    """What they say about the team's own samples is left aside."""
    file = tmp_path / "mine.yaml"
    file.write_text("algo: {name: grpo, group_size: 4, clip: 0.1, normalize: group, lr: 0.01}\n")
    config = imitation.settings_of(cli.parse(["--config", str(file)]))
    assert config.algo == Imitation(lr=0.01)
    assert not config.algo.has_critic and config.guard.max_kl is None


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "said"), [
    ([line(PLAN, ANSWER, task=f"What is {n}?") for n in range(4)],
     "4 of 4 demonstrations, not graded, "),
    ([line(PLAN, ANSWER, task=f"What is {n}?", reward=0.5) for n in range(4)],
     "mean reward 0.500, "),
    ([line(PLAN, ANSWER, task=f"What is {n}?", reward=0) for n in range(4)], "mean reward 0.000, "),
    ([line(PLAN, ANSWER, task=n) for n in range(4)], "4 of 4 demonstrations, mean reward 0."),
    ([line(PLAN, ANSWER, task="a?", reward=1),
     *(line(PLAN, ANSWER, task=f"{n}?") for n in range(3))],
     "mean reward 1.000 of the 1 that are graded, "),
])  # fmt: skip
def test_what_nobody_graded_is_not_said_to_have_earned_nothing(rows, said, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    flags = ["--data", tmp_path / "rows.jsonl", "--out", tmp_path / "run", "--run.steps", 1]
    assert imitated(*flags, "--algo.episodes", 4) == 0
    assert said in capsys.readouterr().out.replace("\n", " ")
