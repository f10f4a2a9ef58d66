"""Evaluation as a command: benchmarks by name, comparison, and going on after a kill."""

import dataclasses
import json
import time
from pathlib import Path

import jax
import pytest
import real_bases

from marft_jax import evaluate, train
from marft_jax.cli import configure
from marft_jax.envs import maths
from marft_jax.errors import BadInput
from marft_jax.evaluation.benchmarks import BENCHMARKS, plans
from marft_jax.formats import jsonlines
from marft_jax.run import evaluating, saved_answers
from marft_jax.run.models import open_models
from marft_jax.run.states import restore_state
from marft_jax.settings.setting import get, replaced, settings, that_decide
from marft_jax.team.team_files import load_team
from marft_jax.types import MAIN, StepResult

WARM = dataclasses.replace(configure(), eval=dataclasses.replace(configure().eval, temperature=1.0))


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *backend: first)


def test_specs_name_benchmark_samples_and_temperature(tmp_path):
    for place in ("math500.jsonl", "aime/aime2024.jsonl", "humaneval.parquet"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text("{}\n")
    specs = ["math500", "aime2024:16@0.6", "humaneval", "own/tasks.jsonl:3@1", "arithmetic"]
    config = configure({"env.name": "math"})
    found = plans(specs, config, str(tmp_path), 1, None)
    assert [(p.name, p.samples, p.config.eval.temperature) for p in found] == [
        ("math500", 1, 0.0), ("aime2024", 16, 0.6), ("humaneval", 1, 0.0), ("tasks", 3, 1.0),
        ("arithmetic", 1, 0.0),
    ]  # fmt: skip
    assert [p.config.env.name for p in found] == ["math", "math", "code", "math", "arithmetic"]
    assert found[1].config.env.eval_data == (str(tmp_path / "aime/aime2024.jsonl"),)
    assert found[2].config.env.reward == "all" and found[2].config.env.tests == 0
    assert found[0].tasks > 10**6 and found[4].tasks == configure().eval.episodes
    assert plans(["gsm8k"], config, None, 1, 7)[0].config.env.eval_data == (
        "openai/gsm8k/main:test",
    )
    assert plans(["gsm8k"], config, None, 1, 7)[0].tasks == 7
    assert plans([], WARM, None, 2, None)[0][:2] == ("arithmetic", 2)


def test_a_benchmark_is_read_and_graded_as_itself_whatever_the_run_does_with_its_own_rows():
    own = {"env.data": "rows.csv", "env.reward": "mine:score", "env.question_field": "q"}
    [found] = plans(["math500"], configure(own), None, 1, None)
    source = ("HuggingFaceH4/MATH-500:test",)
    assert found.config.env == maths.Settings(data=("rows.csv",), eval_data=source)


@pytest.mark.parametrize("specs, samples, message", [
    (["math501"], 1, "expected gsm8k, math"),
    (["gsm8k"], 1, "expected one of gsm8k/test.jsonl"),
    (["a.jsonl"], 1, "expected --env.name math or code"),
    (["A.JSONL"], 1, "expected --env.name math or code"),
    (["arithmetic:4"], 1, "add --eval.temperature"),
    (["arithmetic"], 2, "add --eval.temperature"),
    (["arithmetic"], 0, "--samples: expected at least 1"),
    (["arithmetic", "arithmetic:2@1"], 1, "expected each once"),
])  # fmt: skip
def test_specs_that_make_no_sense_are_one_clear_line(tmp_path, specs, samples, message):
    with pytest.raises(BadInput) as error:
        plans(specs, configure(), str(tmp_path), samples, None)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_benchmark_that_the_workflow_cannot_play_is_refused_before_the_first_step():
    game = {"env.name": "open_spiel", "eval.every": 100, "eval.benchmarks": "arithmetic"}
    with pytest.raises(BadInput, match="--eval.benchmarks arithmetic: .* --env.name open_spiel al"):
        with saved_answers.open_evaluation(configure(game), "players"):
            pass


@pytest.mark.release
def test_training_evaluates_on_the_benchmarks_of_the_settings(tmp_path):
    flags = ["--run.dir", tmp_path / "run", "--run.steps", 1, "--algo.episodes", 8]
    flags += ["--eval.every", 1, "--eval.episodes", 4, "--eval.benchmarks", "arithmetic:2@1"]
    with pytest.raises(SystemExit) as left:
        train.main([str(flag) for flag in flags])
    assert left.value.code == 0
    [line] = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = {key: value for key, value in json.loads(line).items() if key.startswith("eval/")}
    kinds = "accuracy", "reward", "pass@2"
    assert found.keys() == {f"eval/arithmetic/{kind}" for kind in kinds}
    assert found["eval/arithmetic/accuracy"] <= found["eval/arithmetic/pass@2"]


@pytest.mark.slow
def test_a_signal_ends_an_evaluation_with_75_and_what_was_answered_stays(tmp_path, monkeypatch):
    flags = ("--limit", 2, "--team.max_new_tokens", 4, "--out", tmp_path)
    assert run(*flags) == 0
    [file] = tmp_path.glob("*.jsonl")
    first = file.read_text().split("\n")[0]
    file.write_text(first + "\n")
    with monkeypatch.context() as patch:
        patch.setattr(evaluating.Stop, "__call__", lambda self: True)
        assert run(*flags) == 75
    assert file.read_text() == first + "\n"


def test_answers_with_odd_ends_of_lines_are_found_again(tmp_path):
    file = tmp_path / "answers.jsonl"
    rows = [{"sample": 0, "index": i, "key": "k", "task": "a\u2028b\x0cc"} for i in range(2)]
    jsonlines.append(file, map(jsonlines.dumps, rows))
    before = file.read_bytes()
    assert (
        list(saved_answers._saved(file, "k", 1, 2).values()) == rows and file.read_bytes() == before
    )


@pytest.fixture(scope="module")
def models():
    with open_models(configure({"rollout.slots": 2}), load_team(None)) as opened:
        yield opened


@pytest.fixture(scope="module")
def adapters(models):
    return restore_state(models, None).adapters


def another(value):
    """A value that a setting does not have."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return (*value, "another") if isinstance(value, tuple) else "another"


def key_of(models, adapters, size=8):
    return saved_answers.key_of(models.config, models.bases, models.team, adapters, size)


@pytest.mark.slow
def test_a_setting_decides_answers_if_and_only_if_it_says_so(models, adapters):
    known, wrong = key_of(models, adapters), list[str]()
    deciding = that_decide("answers", models.config)
    for key, _ in settings(models.config):
        config = replaced(models.config, key, another(get(models.config, key)))
        same = key_of(models._replace(config=config), adapters) == known
        wrong += [key] if same == (key in deciding) else []
    assert not wrong and {"env.name", "run.seed"} < deciding


DATED = "{{ strftime_now('%d %b') }}{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"


@pytest.mark.parametrize(
    "base, template, days, same",
    [("tiny", None, 9, True), ("directory", None, 0, True), ("directory", None, 9, True),
     ("gguf", None, 9, True), ("directory", DATED, 0, True), ("directory", DATED, 1, False),
     ("two", DATED, 0, True), ("two", None, 3, True)],
)  # fmt: skip
@pytest.mark.slow
def test_an_evaluation_of_a_bare_base_has_the_same_key_whenever_it_is_started(
    tmp_path, monkeypatch, base, template, days, same
):
    folder, team = real_bases.directory(tmp_path / "model", 512), None
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if base == "gguf":
        folder = real_bases.gguf_file(tmp_path / "model.gguf", 512)
    if base == "two":
        team = str(tmp_path / "team.yaml")
        Path(team).write_text(
            f"bases: {{big: {{model: {folder}}}}}\n"
            "agents: [{name: a}, {name: b, base: big, answers: true}]"
        )
    source = "tiny" if base in ("tiny", "two") else str(folder)
    config, keys = configure({"model.base": source, "rollout.slots": 2, "team.file": team}), []
    for now in (1.8e9 // 86400 * 86400 + 60, 1.8e9 // 86400 * 86400 + 7200 + 86400 * days):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        with open_models(config, load_team(team)) as opened:
            keys.append(key_of(opened, restore_state(opened, None).adapters))
    assert (keys[0] == keys[1]) == same


def test_answers_of_another_base_team_or_size_are_others(models, adapters):
    team = models.team
    key = lambda models, size: key_of(models, adapters, size)  # noqa: E731
    other_base = models.bases[MAIN]._replace(digest="another")
    prompt = dataclasses.replace(team.profiles[0], prompt="Another.")
    teams = [
        team._replace(profiles=(prompt, *team.profiles[1:])),
        team._replace(graph=team.graph._replace(edges=((0, 1),))),
        team._replace(judge=1), team._replace(orchestrator=0), team._replace(opener=1),
    ]  # fmt: skip
    found = [key(models, 8), key(models, 9), key(models._replace(bases={MAIN: other_base}), 8)]
    found += [key(models._replace(team=other), 8) for other in teams]
    found += [key(models._replace(team=team._replace(workflow="solo")), 8)]
    same_sums = jax.tree.map(lambda leaf: leaf[..., ::-1], adapters)
    found += [key_of(models, same_sums)]
    assert len(set(found)) == len(found) and key(models, 8) == found[0]


def test_benchmarks_lie_where_the_data_folder_has_them(shared_data):
    here = [name for name in BENCHMARKS if BENCHMARKS[name].file]
    assert len(plans(here, configure(), str(shared_data), 1, None)) == len(here) == 8


def run(*flags):
    with pytest.raises(SystemExit) as left:
        evaluate.main(["--base", "tiny", "--algo.episodes", "16", *map(str, flags)])
    return left.value.code


def lines(folder, name):
    return (folder / name).read_text().splitlines()


@pytest.mark.slow
def test_an_evaluation_that_was_killed_goes_on_where_it_was(tmp_path, capsys, monkeypatch):
    flags = ["--samples", 2, "--eval.temperature", 1, "--limit", 40, "--out", tmp_path]
    assert run(*flags) == 0
    first = capsys.readouterr().out
    whole = lines(tmp_path, "arithmetic-team_without_adapters.jsonl")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(whole) == 80
    places = {(r["sample"], r["index"]): r for r in map(json.loads, whole)}
    assert len(places) == 80 and len({r["task"] for r in places.values()}) == 40
    assert any(places[0, i]["turns"] != places[1, i]["turns"] for i in range(40))

    file = tmp_path / "arithmetic-team_without_adapters.jsonl"
    other = json.dumps(json.loads(whole[0]) | {"key": "another model's"})
    file.write_text("\n".join([*whole[:30], *whole[35:50], other, whole[50][:100]]))
    played = []
    real = saved_answers.play_held_out
    monkeypatch.setattr(saved_answers, "play_held_out",
                        lambda *a: played.append(a[2:5]) or real(*a))  # fmt: skip
    assert run(*flags) == 0
    again = capsys.readouterr().out
    assert "45 of 80 were already answered" in again
    assert played == [(0, 35, 30), (1, 40, 10)]
    restored = lines(tmp_path, "arithmetic-team_without_adapters.jsonl")
    assert sorted(restored) == sorted(whole)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    tables = [text[text.index("benchmark  ") :] for text in (first, again)]
    assert tables[0] == tables[1] and "@2 " in tables[0]

    for other in (["--team.max_new_tokens", 20], ["--model.quantize", "int4"]):
        played.clear()
        assert run(*flags[:4], "--limit", 8, "--out", tmp_path, *other) == 0
        assert played == [(0, 8, 0), (1, 8, 0)], "other settings are other responses"


@pytest.mark.slow
def test_compare_plays_the_base_alone_and_as_a_team(tmp_path, capsys):
    assert run("--compare", "--limit", 8, "--out", tmp_path) == 0
    out = capsys.readouterr().out
    assert "arithmetic, base model: accuracy" in out and "team without adapters" in out
    alone = [json.loads(line) for line in lines(tmp_path, "arithmetic-base_model.jsonl")]
    assert {turn["agent"] for record in alone for turn in record["turns"]} == {"solver"}
    together = lines(tmp_path, "arithmetic-team_without_adapters.jsonl")
    assert [t["agent"] for t in json.loads(together[0])["turns"]] == ["planner", "solver"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    row = summary["arithmetic, base model"]
    assert row["tasks"] == 8 and 0 <= row["eval/arithmetic/accuracy"] <= 1
    assert set(row["agents"]) == {"solver"}


class Pair:
    """Two players who act at once, a step."""

    def players(self, agents):
        self._names = agents
        return {name: name for name in agents}

    def acting(self):
        return self._names

    def reset(self, seed):
        return "go"

    def step(self, turns):
        return StepResult("", float(len(turns) == 2), True)


def two(task, client):
    for agent in ("planner", "solver"):
        client.chat.completions.create(model=agent, messages=[{"role": "user", "content": "go"}])
    return 1.0


@pytest.mark.parametrize(("workflow", "env"), [("players", Pair), ("program", two)])
@pytest.mark.slow
def test_where_no_agent_acts_alone_the_team_is_compared_with_itself(workflow, env, tmp_path):
    """Agents of a game and of a program act as these say, not alone in answer to a question."""
    config = configure({"env.name": env, "team.workflow": workflow, "team.max_new_tokens": 2})
    scores = evaluating.evaluate_team(None, config, compare=True, limit=1, out=tmp_path)
    assert [(who, found.accuracy.mean) for (_, who), found in scores.items()] == [
        ("team without adapters", 1.0)
    ]


def test_an_evaluation_of_no_task_is_refused():
    with pytest.raises(BadInput, match="--limit: expected at least 1, got 0"):
        evaluating.evaluate_team(None, limit=0)
