"""An LLM judge: marks and rubrics are rewards, by an agent of the team or behind an address."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import small
from scripted import Scripted

from marft_jax.envs.base import make
from marft_jax.envs.judged import Settings, scores_of
from marft_jax.envs.threads import DaemonThreads
from marft_jax.errors import BadInput
from marft_jax.learning.step_rewards import find_step_reward
from marft_jax.rollout.rollout import Rollout
from marft_jax.run.metrics import _of_environment
from marft_jax.team.profiles import Profile
from marft_jax.team.team_files import Blueprint, load_team
from marft_jax.team.workflows import find_workflow

WRITER, JUDGE = Profile("writer", answers=True), Profile("judge", trainable=False)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "Why?"}\n{"question": "1+1?", "answer": "2"}\n')
    return (str(path),)


@pytest.mark.parametrize(
    ("text", "how", "expected"),
    [
        ("Score: 7/10", {}, {"": 0.7}),
        ("score: 3\nNo, the final score is 8.", {}, {"": 0.8}),
        ("mark = 4", {"best": 5}, {"": 0.8}),
        ("score: 99", {}, {"": 1.0}),
        ("score: 3/0", {}, {"": 0.3}),
        ("It is fine.", {}, {}),
        ("- planner: 2/4\n**solver**: 9\nscore 5", {"names": ["planner", "solver"]},
         {"": 0.5, "planner": 0.5, "solver": 0.9}),
        ("1. Yes\n2) no, it is not\n3: yes", {"criteria": 4}, {"": 0.5}),
        ("yes", {"criteria": 2}, {}),
    ],
)  # fmt: skip
def test_scores_are_read_as_judges_write_them(text, how, expected):
    assert scores_of(text, **how) == expected


def play(rows, speak, agents=(WRITER, JUDGE), **settings: Any):
    env = make(Settings(data=rows, holdout=0.0, **settings), "train")
    team = small.team_of(Blueprint(tuple(agents)), context=600, max_new_tokens=60)
    engine = Scripted(speak)
    rollout = Rollout(engine, team, find_workflow("sequential"), env.create, DaemonThreads())
    return rollout.play(small.samples(range(2)), 0).episodes, engine


def test_the_teams_judge_sees_what_nobody_else_does_and_its_marks_are_the_reward(rows):
    def speak(request):
        return "score: 8/10\nwriter: 4" if request.owner else "score: 10, for it is 2"

    episodes, engine = play(rows, speak)
    assert [episode.reward for episode in episodes] == [0.8, 0.8]
    shown = {
        bytes(r.prompt[r.prompt < 256].astype("uint8")).decode(): r.owner for r in engine.requests
    }
    assert {owner for text, owner in shown.items() if "reference answer is: 2" in text} == {1}
    assert any("writer: score: 10" in text for text, owner in shown.items() if owner == 1)
    numbers = _of_environment(episodes)
    assert numbers["env/judge_score"] == 0.8 and numbers["env/judge_unread"] == 0
    assert numbers["env/judge_agreement"] == 1.0 and numbers["env/judge_tokens"] > 50
    step_reward = find_step_reward("judge")
    paid = [step_reward(turn, 0.5, episodes[0]) for turn in episodes[0].turns]
    assert paid == [0.4, 0.8]


def test_a_rubric_pays_the_share_that_is_met_and_a_verdict_that_is_none_pays_nothing(rows):
    said = {0: "x", 1: "1. yes\n2. no\n3. yes"}
    episodes, _ = play(rows, lambda request: said[request.owner], rubric=("short", "true", "kind"))
    assert [episode.reward for episode in episodes] == pytest.approx([2 / 3, 2 / 3])
    said[1] = "I cannot say."
    episodes, _ = play(rows, lambda request: said[request.owner], rubric=("short",))
    assert [episode.reward for episode in episodes] == [0.0, 0.0]
    assert _of_environment(episodes)["env/judge_unread"] == 1.0


def test_a_team_without_a_judge_is_one_line(rows):
    with pytest.raises(BadInput, match="expected an agent named judge in the team"):
        play(rows, lambda request: "x", agents=(WRITER,))


def test_the_judge_may_be_behind_an_address(rows, monkeypatch):
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers["Authorization"], body))
            reply = {
                "choices": [{"message": {"content": "score: 5"}}],
                "usage": {"total_tokens": 9},
            }
            content = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OPENAI_API_KEY", "sk")
    url = f"http://127.0.0.1:{server.server_port}/v1"
    episodes, _ = play(rows, lambda request: "It is so.", agents=(WRITER,), url=url, url_model="m")
    server.shutdown()
    server.server_close()
    assert [episode.reward for episode in episodes] == [0.5, 0.5]
    assert _of_environment(episodes)["env/judge_tokens"] == 9
    path, key, body = asked[0]
    assert (path, key, body["model"]) == ("/v1/chat/completions", "Bearer sk", "m")
    assert "writer: It is so." in body["messages"][0]["content"]
    with pytest.raises(BadInput, match="--env.url: expected http"):
        make(Settings(data=rows, url="file:///etc/passwd"), "train")


def test_the_ready_made_team_has_a_judge_that_learns_nothing(repository):
    team = load_team(str(repository / "configs" / "teams" / "judged.yaml"))
    assert [(p.name, p.trainable) for p in team.agents] == [("writer", True), ("judge", False)]


def test_numbers_of_an_environment_of_ones_own_are_reported():
    infos = ({"metrics": {"words": 3}}, {"metrics": {"words": 5, "note": "x"}}, {"metrics": 7}, {})
    results = [SimpleNamespace(info=info) for info in infos]
    assert _of_environment([SimpleNamespace(results=results)]) == {"env/words": 4.0}  # pyright: ignore
