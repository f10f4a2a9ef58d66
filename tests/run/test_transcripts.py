"""Transcripts: what was said, by whom, seen by whom, and what it earned."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import small
from rich.console import Console

from marft_jax.formats import jsonlines
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer
from marft_jax.rollout.collect import Collected
from marft_jax.run import transcripts
from marft_jax.types import Episode, StepResult, Turn


def turn(name: str, text: str, **more: Any) -> Turn:
    ids = [*text.encode()]
    made = small.turn(0, [112, 33], ids, logprobs=np.zeros(len(ids)), text=text, limit=None)
    return made._replace(name=name, **more)


def decode(ids, special=False) -> str:
    assert all(isinstance(i, int) for i in ids), "tokenizers want Python integers"
    return f"<user>{bytes(ids).decode()}" if special else bytes(ids).decode()


def episode() -> Episode:
    turns = [
        turn("planner", "3+5=8"),
        turn("solver", "[b]16[/b]", sees=(0,), answers=True, truncated=True),
        turn("solver", "17", step=1, sees=(0, 1), answers=True),
    ]
    results = [
        StepResult("try again", 0.0, False, {"score": np.float32(0.5), "answer": {"17"}}),
        StepResult("", 1.25, True, {"score": float("nan")}),
    ]
    return Episode(7, 7, 0, "3+5+9=?", turns, results)


def written(episode, numbers=()) -> dict:
    return json.loads(jsonlines.dumps(transcripts.record(episode, [decode] * 2, numbers)))


def test_an_episode_is_one_line_with_its_turns():
    numbers = [{"reward": 0, "value": 0.1 * i, "advantage": i} for i in (1, 2, 3)]
    line = written(episode(), numbers)
    assert (line["index"], line["task"], line["reward"]) == (7, "3+5+9=?", 1.25)
    assert line["turns"][1] == {
        "agent": "solver", "step": 0, "prompt": "<user>p!", "text": "[b]16[/b]",
        "ids": [*b"[b]16[/b]"], "tokens": [5, 14], "sees": [0], "truncated": True, "answers": True,
        "reward": 0, "value": 0.2, "advantage": 2,
    }  # fmt: skip
    assert [turn["tokens"] for turn in line["turns"]] == [[0, 5], [5, 14], [14, 16]]
    assert line["D"] == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]


def test_a_character_of_several_tokens_is_the_last_ones():
    tokenizer = ByteTokenizer()
    ids = [*tokenizer.encode("aé€😀b"), tokenizer.END]
    found = transcripts.pieces(ids, tokenizer.decode)
    assert found == ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]
    broken = [97, 0x80, 0x81, 98, 0xF0, 0x9F]
    assert "".join(transcripts.pieces(broken, tokenizer.decode)) == tokenizer.decode(broken)


def test_a_space_before_a_word_is_the_words_where_a_tokenizer_drops_the_first():
    words = ["▁the", "▁sum", "s", "▁is"]

    def decode(ids, special=False):
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    assert transcripts.pieces([0, 1, 2, 3], decode) == ["the", " sum", "s", " is"]


def numbers_of(level, *turns) -> list[dict]:
    one = episode()._replace(turns=turns)
    paid = [np.arange(len(turns))]
    collected = Collected([one], paid, [one], paid, 0, 0, 0.0)
    numbers = np.array([[1.0, 2.0, 4.0, 0.0]])
    estimates: Any = SimpleNamespace(advantages_EJ=numbers, values_EJ=-numbers)
    [rows] = transcripts.turn_numbers(collected, estimates, level, [decode] * 2)
    return rows


def test_a_sampled_turn_has_its_tokens_and_their_logprobs():
    logprobs = np.array([-0.5, -0.123456, 0], np.float32)
    sampled = turn("solver", "ab ")._replace(limit=9, logprobs=logprobs)
    recorded, own = numbers_of("action", turn("planner", "x"), sampled)
    assert (own["pieces"], own["logprobs"]) == (["a", "b", " "], [-0.5, -0.1235, 0.0])
    assert recorded == {"reward": 0, "value": -1.0, "advantage": 1.0}


def test_at_a_token_level_each_token_has_its_advantage_and_value():
    planner, solver = numbers_of("token", turn("planner", "ab"), turn("solver", "c"))
    assert (planner["advantage"], planner["advantages"]) == (1.5, [1.0, 2.0])
    assert (solver["value"], solver["values"], solver["reward"]) == (-4.0, [-4.0], 1)


def test_a_tools_answer_stands_by_itself():
    asking = episode().turns[0]._replace(text="ADD 2 3", tool="5")
    line = written(episode()._replace(turns=[asking]))
    assert line["turns"][0]["text"] == "ADD 2 3" and line["turns"][0]["tool"] == "5"


def test_what_agents_earn_alone_stands_by_their_names():
    alone = transcripts.record(episode()._replace(alone={0: 0.25}), [decode] * 2)["alone"]
    assert alone == {"planner": 0.25, "solver": 0.25}
    assert "alone" not in transcripts.record(episode(), [decode] * 2)


def test_results_keep_the_reward_of_each_step_and_strict_json():
    line = written(episode())
    assert line["results"] == [
        {"reward": 0.0, "done": False, "info": {"score": 0.5, "answer": ["17"]}},
        {"reward": 1.25, "done": True, "info": {"score": None}},
    ]


@pytest.mark.parametrize(
    "value, line",
    [
        ({"a": "half \ud83d", "\udc00": 1}, r'{"a": "half \\ud83d", "\\udc00": 1}'),
        ({"a": 10**400}, '{"a": "' + hex(10**400) + '"}'),
        ({1: {2}, None: float("inf")}, '{"1": [2], "None": null}'),
        (np.arange(3), "[0, 1, 2]"),
    ],
)
def test_whatever_is_reported_is_a_line_that_files_can_hold(value, line):
    assert jsonlines.dumps(value) == line
    jsonlines.dumps(value).encode()


def test_what_holds_itself_is_refused():
    inner: list = []
    inner.append(inner)
    with pytest.raises(ValueError, match="in itself"):
        jsonlines.plain({"x": inner})


def shown(*what) -> str:
    file = io.StringIO()
    Console(file=file, width=60).print(transcripts.render(*what))
    return file.getvalue()


def test_a_person_can_read_who_said_what():
    text = shown(episode())
    parts = (
        "3+5+9=?", "planner", "3+5=8", "solver · answers · cut off", "[b]16[/b]",
        "reward 0, score: 0.5", "solver · step 2 · answers", "reward 1.25",
    )  # fmt: skip
    order = [text.index(part) for part in parts]
    assert order == sorted(order)
    assert "reward" not in shown(episode()._replace(results=[]))


def test_a_prompt_may_be_shown_before_its_answer():
    text = shown(episode(), [decode] * 9)
    assert text.index("planner is shown:") < text.index("3+5=8")
