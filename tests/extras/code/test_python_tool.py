"""The tool ``python``."""

from __future__ import annotations

import json

import pytest

from marft_jax.background import DaemonThreads
from marft_jax.errors import BadInput
from marft_jax.tools import EpisodeTools, ToolCall, load_toolboxes


@pytest.fixture(scope="module")
def box():
    try:
        [made] = load_toolboxes({"solver": [{"python": {"seconds": 0.5}}]}, "team")
    except BadInput as reason:
        pytest.skip(f"no isolation on this machine: {reason}")
    return made


@pytest.mark.parametrize(
    ("code", "verdict", "answer"),
    [
        ("print(6 * 7)", "ok", "42"),
        ("x = 1", "ok", "(nothing was printed)"),
        ("print(x)", "wrong", "error: NameError: name 'x' is not defined"),
        ("1 +", "wrong", "error: SyntaxError: invalid syntax"),
        ("while True: pass", "wrong", "error: not done after 0.5 s"),
        ("while True: print('a' * 10**6)", "wrong", "error: "),
        ("print('a' * 10**5)", "ok", "a" * 100),
        ("open('/etc/passwd')", "wrong", "error: FileNotFoundError"),
    ],
)
def test_a_program_is_answered_with_what_it_prints_and_its_mistakes_are_the_models(
    box, code, verdict, answer
):
    calls = [ToolCall("python", json.dumps({"code": code}))]
    [call] = EpisodeTools(DaemonThreads()).answer(box, calls)
    assert (call.verdict, call.answer[: len(answer)]) == (verdict, answer)
    assert len(call.answer) < 10_100


def test_variables_are_kept_in_an_episode_and_a_branch_has_them_again(box):
    [own] = load_toolboxes({"solver": [{"python": {"seconds": 0.5, "state": "episode"}}]}, "team")
    codes = ["import random\nx = [1]; print(random.random())", "x.append(2); y", "while True: pass",
             "def f(): return x\nprint(f())"]  # fmt: skip
    calls = [ToolCall("python", json.dumps({"code": code})) for code in codes]
    answered = EpisodeTools(DaemonThreads()).answer(own, calls)
    assert [call.verdict for call in answered] == ["ok", "wrong", "wrong", "ok"]
    assert answered[1].answer == "error: NameError: name 'y' is not defined"
    assert answered[3].answer == "[1, 2]"
    for recorded, answer in (answered[:0], "error: NameError"), (answered[:2], "[1, 2]"):
        branch = EpisodeTools(DaemonThreads())
        branch.repeat(own, recorded)
        [call] = branch.answer(own, [ToolCall("python", json.dumps({"code": "print(x)"}))])
        assert call.answer.startswith(answer)


def test_programs_run_side_by_side_and_keep_nothing(box):
    calls = [ToolCall("python", json.dumps({"code": c})) for c in ("x = 1", "print(x)")] * 4
    answered = EpisodeTools(DaemonThreads()).answer(box, calls)
    assert [call.verdict for call in answered] == ["ok", "wrong"] * 4
