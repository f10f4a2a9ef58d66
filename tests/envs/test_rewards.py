"""Reward functions of a user's own beside rows of data: plain, async, weighted, and wrong ones."""

import json
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from marft_jax import check, cli
from marft_jax.envs.base import make
from marft_jax.envs.maths import Settings
from marft_jax.envs.rewards import weighted_sum
from marft_jax.errors import BadInput
from marft_jax.run.compatibility import inputs_of
from marft_jax.settings.config import EnvSettings

ROW = {"Prompt": "Say pear.", "id": 7, "tags": ["a", {"b": None}], "answer": {"no": "answer"}}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
            def score(text, row):
                return float("pear" in text) + row["id"]

            async def later(text, row):
                return len(text)

            def keys(text, row):
                assert row == ROW, row
                row.clear()
                return 1

            def raising(text, row):
                return 1 / 0

            def silent(text, row):
                pass

            def completions(completions, **kwargs):
                return [1.0]

            def text(text, row): return "1"
            def nan(text, row): return float("nan")
            def leaving(text, row): raise SystemExit(0)
            async def awaited(text, row): return 1 / 0
            number = 3
            ROW = """)
        + repr(ROW)
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def play(*rewards, text="a pear", horizon=1):
    settings = Settings(data=("rows.jsonl",), holdout=0.0, reward=rewards, horizon=horizon)
    env = make(settings, "train").create()
    assert env.reset(0) == "Say pear."
    turn: Any = SimpleNamespace(name="solver", text=text, answers=True)
    return env.step([turn])


@pytest.mark.parametrize(("rewards", "paid"), [
    (["mine:score"], 8.0),
    (["mine:later"], 6.0),
    (["mine:score*0.5"], 4.0),
    (["mine:score * 2", "mine:later*-1"], 10.0),
    (["mine:later*1e-1", "mine:keys", "mine:keys"], 2.6),
    (["mine:score*.5"], 4.0),
])  # fmt: skip
def test_functions_pay_the_text_and_the_row_as_it_was_read(rewards, paid):
    result = play(*rewards)
    assert result.reward == pytest.approx(paid) and result.done
    assert result.info["verdicts"] == []  # so that a positive reward counts as solved


def test_an_unsolved_task_is_not_called_incorrect_and_goes_on():
    result = play("mine:score*0", horizon=2)
    assert not result.done and "incorrect" not in result.observation


@pytest.mark.parametrize(("name", "message"), [
    ("mine:silent", r"--env.reward mine:silent \(.*mine.py:16\): expected a number, got None"),
    ("mine:text", "expected a number, got '1'"),
    ("mine:nan", "expected a finite number, got nan"),
    ("mine:raising", "division by zero"),
    ("mine:awaited", "division by zero"),
])  # fmt: skip
def test_what_a_function_does_wrong_is_named_when_it_is_called(name, message):
    with pytest.raises((BadInput, ZeroDivisionError), match=message):
        play(name)


@pytest.mark.parametrize(("name", "message"), [
    ("mine:completions", r"expected a function of \(text, row\), .*mine.py:19"),
    ("mine:nothing", "has no 'nothing'"),
    ("mine:number", "is no function"),
    ("nowhere:f", "cannot import nowhere"),
    ("score", "expected package.module:function, got 'score'"),
    ("mine:score*x", r"has no 'score\*x'"),
    ("mine:score*1.2.3", r"has no 'score\*1"),
])  # fmt: skip
def test_a_function_that_is_none_is_refused_at_the_start(name, message):
    with pytest.raises(BadInput, match=message) as error:
        make(Settings(data=("rows.jsonl",), reward=(name,)), "train")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("flags", [["--env.extract", "boxed"], ["--env.workers", "3"],
                                   ["--env.answer_field", "id"]])  # fmt: skip
def test_a_setting_of_the_comparison_is_refused_beside_a_function(flags):
    env = cli.parse(["--env.data", "rows.jsonl", "--env.reward", "mine:score", *flags]).env
    with pytest.raises(BadInput, match=rf"^{flags[0]}: not read beside --env.reward"):
        make(env, "train")


def run_check(*flags):
    with pytest.raises(SystemExit) as left:
        check.main(flags)
    return left.value.code


def test_check_tries_the_function_on_the_first_rows(capsys):
    assert run_check("--data", "rows.jsonl", "--env.reward", "mine:score") == 0
    assert "  reward:   7 for 'The answer is 1.'" in capsys.readouterr().out.splitlines()
    assert run_check("--data", "rows.jsonl", "--env.reward", "mine:silent") == 2
    assert "mine.py:16): expected a number, got None" in capsys.readouterr().err
    assert run_check("--data", "rows.jsonl", "--env.reward", "mine:raising") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "ZeroDivisionError: division by zero" in line and "mine.py:14" in line


def test_python_gives_functions_and_a_file_a_list(home):
    def half(text, row):
        return 0.5

    rows = [ROW]
    given: EnvSettings = cli.configure(env={"data": rows, "reward": half, "holdout": 0.0}).env
    assert given.name == "math" and make(given, "train").size == 1
    several = cli.configure(env={"data": rows, "reward": [half, "mine:score*0.5"]}).env
    assert len(several.reward) == 2
    (home / "c.yaml").write_text(
        "env: {name: math, data: [rows.jsonl], reward: [mine:score, mine:later*0.5]}\n"
    )
    assert cli.parse(["--config", "c.yaml"]).env.reward == ("mine:score", "mine:later*0.5")
    with pytest.raises(BadInput, match="expected functions of different names"):
        cli.configure(env={"data": rows, "reward": [lambda t, r: 0, lambda t, r: 1]})


def test_a_changed_function_is_another_input(home):
    config = cli.parse(["--env.data", "rows.jsonl", "--env.reward", "mine:score*0.5"])
    before = inputs_of(config)
    assert {"mine.py", "--env.data"} == set(before)
    (home / "mine.py").write_text("def score(text, row):\n    return 0\n")
    assert inputs_of(config)["mine.py"] != before["mine.py"]


def test_a_function_without_a_known_signature_is_taken_and_a_module_without_a_file_is_named():
    assert weighted_sum(["builtins:max*0.5"])
    for module in ("builtins", "sys", "itertools"):
        with pytest.raises(BadInput, match=f"--env.reward {module}:no: .*{module}.* has no 'no'"):
            weighted_sum([f"{module}:no"])
