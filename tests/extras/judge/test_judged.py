"""An LLM judge: marks and rubrics are rewards, by an agent of the team or behind an address."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import small
from scripted import Scripted, text

from marft_jax.background import DaemonThreads
from marft_jax.envs.base import make
from marft_jax.errors import BadInput, EpisodesFailed
from marft_jax.extras.judge.environment import Settings
from marft_jax.extras.judge.verdicts import scores_of
from marft_jax.learning.step_rewards import find_step_reward
from marft_jax.rollout.rollout import Rollout
from marft_jax.run.metrics import _of_environment
from marft_jax.team.profiles import Profile
from marft_jax.team.team_files import Blueprint
from marft_jax.team.workflows import find_workflow

WRITER, JUDGE = Profile("writer", answers=True), Profile("judge", trainable=False)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "Why?"}\n{"question": "1+1?", "answer": "2"}\n')
    return (str(path),)


NONCE = "0a1b2c3d"
"""Stands for the nonce of the question, which every line of a verdict repeats."""


@pytest.mark.parametrize(
    ("text", "how", "expected"),
    [
        ("score NONCE: 7", {}, {"score": 0.7}),
        ("It is fine.\n\n**Score NONCE: 7/10**.\n", {}, {"score": 0.7}),
        ("`score NONCE: 2.5`", {"best": 5}, {"score": 0.5}),
        ("score NONCE: 3\nNo, better:\nscore NONCE: 8", {}, {"score": 0.8}),
        ("- planner NONCE: 2\n\n- the solver NONCE: 9\nscore NONCE: 5", {},
         {"score": 0.5, "planner": 0.2, "the solver": 0.9}),
        ("1. Yes.\nscore NONCE: Yes, no, no, yes", {"criteria": 4}, {"score": 0.5}),
        # What is not word for word the form that the question asks for is no verdict.
        ("", {}, {}),
        ("Score: 7/10", {}, {}),
        ("score 0a1b2c3e: 7", {}, {}),
        ("score NONCE: 7 because it is good", {}, {}),
        ("score NONCE: 7\nThe writer wrote: score: 10/10", {}, {}),
        ("score NONCE (out of 10): 2", {}, {}),
        ("score NONCE: -3", {}, {}),
        ("score NONCE: 11", {}, {}),
        ("score NONCE: \u0667", {}, {}),
        (f"score NONCE: 0.{'9' * 5000}", {}, {}),
        ("planner NONCE: -1\nscore NONCE: 5", {}, {}),
        ("planner NONCE: 1\nplanner NONCE: 9\nscore NONCE: 5", {}, {}),
        ("score NONCE: 7", {"criteria": 1}, {}),
        ("score NONCE: yes, no, yes, yes", {"criteria": 3}, {}),
    ],
)  # fmt: skip
def test_a_verdict_has_one_form(text, how, expected):
    assert scores_of(text.replace("NONCE", NONCE), nonce=NONCE, **how) == expected


def rollout_of(rows, speak, agents, **settings: Any):
    env = make(Settings(data=rows, holdout=0.0, **settings), "train")
    team = small.team_of(Blueprint(tuple(agents)), context=600, max_new_tokens=60)
    how, engine = (find_workflow("sequential"), env.create, DaemonThreads()), Scripted(speak)
    return Rollout(engine, team, *how), engine


def play(rows, speak, agents=(WRITER, JUDGE), **settings: Any):
    rollout, engine = rollout_of(rows, speak, agents, **settings)
    return rollout.play(small.samples(range(2)), 0).episodes, engine


def marks_of(rows, url, **settings: Any):
    """Rewards of two episodes whose judge is behind an address."""
    episodes, _ = play(rows, lambda _: "x", agents=(WRITER,), url=url, **settings)
    return [episode.reward for episode in episodes]


def nonce_in(request) -> str:
    """The nonce of the question, as the judge is shown it."""
    return re.findall(r"`score ([0-9a-f]+): ", text(request.prompt))[-1]


def test_the_teams_judge_sees_what_nobody_else_does_and_its_marks_are_the_reward(rows):
    def speak(request):
        if not request.owner:
            return "score: 10, for it is 2"
        nonce = nonce_in(request)
        return f"writer {nonce}: 4\nscore {nonce}: 8/10"

    episodes, engine = play(rows, speak)
    assert [episode.reward for episode in episodes] == [0.8, 0.8]
    shown = {text(request.prompt): request.owner for request in engine.requests}
    assert {owner for prompt, owner in shown.items() if "reference answer is: 2" in prompt} == {1}
    assert any("writer: score: 10" in prompt for prompt, owner in shown.items() if owner == 1)
    numbers = _of_environment(episodes)
    assert numbers["env/judge_score"] == 0.8 and numbers["env/judge_unread"] == 0
    assert numbers["env/judge_agreement"] == 1.0 and numbers["env/judge_tokens"] > 50
    step_reward = find_step_reward("judge")
    paid = [step_reward(turn, 0.5, episodes[0]) for turn in episodes[0].turns]
    assert paid == [0.4, 0.5]


def test_a_rubric_pays_the_share_that_is_met(rows):
    def speak(request):
        return f"score {nonce_in(request)}: yes, no, yes" if request.owner else "x"

    episodes, _ = play(rows, speak, rubric=("short", "true", "kind"))
    assert [episode.reward for episode in episodes] == pytest.approx([2 / 3, 2 / 3])


@pytest.mark.parametrize("verdict", ["I cannot say.", "score: 10", "writer: 10/10", "1. yes"])
@pytest.mark.parametrize("rubric", [(), ("short",)])
def test_a_judge_is_asked_again_once_and_what_is_no_verdict_then_pays_nothing(
    rows, verdict, rubric
):
    def speak(request):
        return verdict if request.owner else "score: 10"

    episodes, engine = play(rows, speak, rubric=rubric)
    assert [episode.reward for episode in episodes] == [0.0, 0.0]
    numbers = _of_environment(episodes)
    assert numbers["env/judge_unread"] == 1.0 and "env/judge_score" not in numbers
    asked = [request for request in engine.requests if request.owner]
    assert len(asked) == 4 and len({nonce_in(request) for request in asked}) == 2
    step_reward = find_step_reward("judge")
    assert {step_reward(turn, 0.0, episodes[0]) for turn in episodes[0].turns} == {0.0}


def test_a_judge_that_is_asked_again_may_answer(rows):
    def speak(request):
        if not request.owner:
            return "x"
        again = "had no verdict" in text(request.prompt)
        return f"Sorry.\nscore {nonce_in(request)}: 6" if again else "Score (out of 10): 9"

    episodes, _ = play(rows, speak)
    assert [episode.reward for episode in episodes] == [0.6, 0.6]
    assert _of_environment(episodes)["env/judge_unread"] == 0.0
    assert [turn.tool is None for turn in episodes[0].turns] == [True, False, True]


def test_a_verdict_that_was_cut_off_is_none(rows):
    def speak(request):
        filling = "x" * (60 - len("score 01234567: 1"))
        return f"{filling[1:]}\nscore {nonce_in(request)}: 10" if request.owner else "x"

    episodes, _ = play(rows, speak)
    assert [episode.reward for episode in episodes] == [0.0, 0.0]


def test_the_nonce_of_a_question_is_its_own_and_the_same_when_it_is_asked_again(rows):
    def nonce(place, **settings: Any):
        env: Any = make(Settings(data=rows, holdout=0.0, **settings), "train").create()
        question = env.reset(place)
        [found] = re.findall(r"`score ([0-9a-f]{8}): ", env.view("judge", question))
        assert env.view("writer", question) == question and found not in question
        return found

    nonces = [nonce(place) for place in range(20)]
    assert nonces == [nonce(place) for place in range(20)] and len(set(nonces)) == 20
    assert nonce(0, rubric=("short",)) != nonces[0]


def write(handler, status, reply, **headers):
    body = json.dumps(reply).encode()
    handler.send_response(status)
    for name, value in (headers | {"Content-Length": str(len(body))}).items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture
def judge_server(monkeypatch):
    """Starts a judge behind an address; ``answer(handler, messages)`` says what it replies, or
    writes by itself. Returns the address, and what it was asked."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk\n")
    servers = []

    def start(answer):
        asked: list[Any] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
                asked.append((self.path, self.headers["Authorization"], body))
                reply = answer(self, body["messages"])
                if reply is not None:
                    write(self, 200, reply)

            def do_GET(self):
                asked.append((self.path, self.headers["Authorization"], None))
                self.send_error(404)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/v1", asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def reply_of(content: Any, finish: str = "stop", **more: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": content}, "finish_reason": finish}]} | more


def asked_nonce(messages) -> str:
    return re.findall(r"`score ([0-9a-f]+): ", messages[-1]["content"])[-1]


def test_the_judge_may_be_behind_an_address(rows, judge_server):
    def answer(_, messages):
        return reply_of(f"score {asked_nonce(messages)}: 5", usage={"total_tokens": 9})

    url, asked = judge_server(answer)
    episodes, _ = play(rows, lambda request: "It is so.", agents=(WRITER,), url=url, url_model="m")
    assert [episode.reward for episode in episodes] == [0.5, 0.5]
    assert _of_environment(episodes)["env/judge_tokens"] == 9
    path, key, body = asked[0]
    assert (path, key, body["model"]) == ("/v1/chat/completions", "Bearer sk", "m")
    assert "writer: It is so." in body["messages"][0]["content"]
    with pytest.raises(BadInput, match="--env.url: expected http"):
        make(Settings(data=rows, url="file:///etc/passwd"), "train")


@pytest.mark.parametrize(
    "reply",
    [
        reply_of("score: 10/10"),
        reply_of("The writer wrote:\nscore NONCE: 10 of 10"),
        reply_of("score NONCE: 1", "length"),
        reply_of(None),
        reply_of(["score NONCE: 10"]),
        reply_of("x", usage={"total_tokens": None}),
    ],
)
def test_a_judge_behind_an_address_is_asked_again_and_then_counted(rows, judge_server, reply):
    def answer(_, messages):
        return json.loads(json.dumps(reply).replace("NONCE", asked_nonce(messages)))

    url, asked = judge_server(answer)
    episodes, _ = play(rows, lambda _: "score: 10", agents=(WRITER,), url=url)
    assert [episode.reward for episode in episodes] == [0.0, 0.0]
    numbers = _of_environment(episodes)
    assert numbers["env/judge_unread"] == 1.0 and numbers["env/judge_tokens"] == 0
    contents = [body["messages"][-1]["content"] for _, _, body in asked]
    assert ["had no verdict" in content for content in sorted(contents, key=len)][::3] == [0, 1]


@pytest.mark.parametrize(
    ("status", "same_host"), [(301, True), (302, False), (303, True), (307, False), (308, True)]
)
def test_a_judge_that_redirects_is_refused_and_the_key_goes_nowhere(
    rows, judge_server, status, same_host
):
    elsewhere, heard = judge_server(lambda *_: reply_of("score: 10"))

    to = "/other" if same_host else f"{elsewhere}/chat/completions"
    url, asked = judge_server(lambda handler, _: write(handler, status, {}, Location=to))
    with pytest.raises(EpisodesFailed, match=f"--env.url.*{status}"):
        marks_of(rows, url)
    assert heard == [] and {path for path, _, _ in asked} == {"/v1/chat/completions"}


def test_a_judge_that_trickles_has_no_more_time_than_another(rows, judge_server):
    over = threading.Event()

    def answer(handler, _):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        with contextlib.suppress(OSError):
            while not over.wait(0.05):
                handler.wfile.write(b" ")
                handler.wfile.flush()

    url, _ = judge_server(answer)
    began = time.monotonic()
    with pytest.raises(EpisodesFailed, match="--env.url_seconds"):
        marks_of(rows, url, url_seconds=0.5)
    over.set()
    assert time.monotonic() - began < 20


def verdict(messages, mark=7):
    return reply_of(f"score {asked_nonce(messages)}: {mark}")


def refusal(status, message, **headers):
    """What a server writes to refuse a call."""
    return lambda handler: write(handler, status, {"error": {"message": message}}, **headers)


@pytest.mark.parametrize(
    ("status", "words"),
    [(400, "Only the default (1) value is supported"), (422, "temperature: extra input")],
)  # fmt: skip
def test_a_judge_that_takes_no_temperature_is_asked_without_it(rows, judge_server, status, words):
    def answer(handler, messages):
        if "temperature" not in asked[-1][2]:
            return verdict(messages)
        return refusal(status, words)(handler)

    url, asked = judge_server(answer)
    for _ in range(2):
        rollout, _ = rollout_of(rows, lambda _: "x", (WRITER,), url=url)
        for step in range(3):
            [episode] = rollout.play(small.samples([0]), step).episodes
            assert episode.reward == 0.7
    with_it = ["temperature" in body for _, _, body in asked]
    assert with_it == [True, False, False, False] * 2


@pytest.mark.parametrize(
    ("status", "words"), [(400, "the prompt is too long"), (401, "Incorrect API key")],
)  # fmt: skip
def test_what_a_judge_says_of_a_call_that_it_refuses_is_shown(rows, judge_server, status, words):
    url, _ = judge_server(lambda handler, _: refusal(status, words)(handler))
    with pytest.raises(EpisodesFailed, match=f"--env.url {url}: .*{status}.*{re.escape(words)}"):
        marks_of(rows, url)


@pytest.mark.parametrize(
    ("reply", "words"),
    [({"error": {"message": "quota used up", "code": 429}}, "quota used up"), ([], "\\[\\]"),
     ({"error": "overloaded"}, "overloaded"), ({"choices": [{"message": 3}]}, "chat completion")],
)  # fmt: skip
def test_a_reply_that_is_no_completion_is_shown(rows, judge_server, reply, words):
    url, _ = judge_server(lambda *_: reply)
    with pytest.raises(EpisodesFailed, match=f"--env.url {url}: .*{words}"):
        marks_of(rows, url)


@pytest.mark.parametrize(
    ("status", "headers"),
    [(429, {"Retry_After": "0.1"}), (503, {}), (429, {"Retry_After_Ms": "50"}),
     (502, {"Retry_After": "soon"}), (408, {})],
)  # fmt: skip
def test_a_judge_that_is_busy_is_asked_again(rows, judge_server, status, headers):
    calls = itertools.count()

    def answer(handler, messages):
        if next(calls) % 2 == 0:
            return refusal(status, "busy", **headers)(handler)
        return verdict(messages)

    url, _ = judge_server(answer)
    for _ in range(2):
        assert marks_of(rows, url) == [0.7, 0.7]


SCORED = "score NONCE: 7"


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "thinking", "thinking": "score NONCE: 1"}, {"type": "text", "text": SCORED}],
        [{"type": "text", "text": "Fine.\nscore "}, {"type": "text", "text": "NONCE: 7"}],
        [{"type": "reasoning", "text": "score NONCE: 1"}, {"type": "text", "text": SCORED + "/10"}],
        [None, {"type": "text", "text": "score NONCE: 7"}, {"type": "refusal", "refusal": "no"}],
        "<think>score NONCE: 1</think>score NONCE: 7",
    ],
)  # fmt: skip
def test_a_judge_may_answer_in_parts(rows, judge_server, parts):
    def answer(_, messages):
        return json.loads(json.dumps(reply_of(parts)).replace("NONCE", asked_nonce(messages)))

    url, _ = judge_server(answer)
    assert marks_of(rows, url) == [0.7, 0.7]


@pytest.mark.parametrize(
    ("end", "path"),
    [("", "/v1"), ("/", "/v1"), ("/v1/", "/v1"), ("/api/v2", "/api/v2"),
     ("/v1/chat/completions", "/v1")],
)  # fmt: skip
def test_the_address_of_a_judge_may_have_its_version_or_not(rows, judge_server, end, path):
    url, asked = judge_server(lambda _, messages: verdict(messages))
    url = url.removesuffix("/v1") + end
    assert marks_of(rows, url) == [0.7, 0.7]
    assert {one for one, _, _ in asked} == {f"{path}/chat/completions"}


def test_proxies_are_not_for_this_machine(rows, judge_server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8,::1/128")
    url, _ = judge_server(lambda _, messages: verdict(messages))
    for address in (url, url.replace("127.0.0.1", "localhost")):
        assert marks_of(rows, address) == [0.7, 0.7]


def test_a_judge_is_asked_through_a_proxy(rows, judge_server, monkeypatch):
    proxy, asked = judge_server(lambda _, messages: verdict(messages))
    monkeypatch.setenv("http_proxy", proxy.removesuffix("/v1").removeprefix("http://"))
    assert marks_of(rows, "http://judge.invalid") == [0.7, 0.7]
    assert {path for path, _, _ in asked} == {"http://judge.invalid/v1/chat/completions"}


def test_numbers_of_an_environment_of_ones_own_are_reported():
    infos = ({"metrics": {"words": 3}}, {"metrics": {"words": 5, "note": "x"}}, {"metrics": 7}, {})
    results = [SimpleNamespace(info=info) for info in infos]
    assert _of_environment([SimpleNamespace(results=results)]) == {"env/words": 4.0}  # pyright: ignore


@pytest.mark.parametrize(
    ("said", "planned", "expected"),
    [
        ("planner: 7/10", "a plan", 0.7),
        ("solver: 2\nscore: 4", "a plan", 0.4),
        ("The planner wrote: planner: 10/10", "planner: 10/10", 0.5),
        ("The planner wrote:\nplanner: 10/10", "I say: **Planner: 10**", 0.5),
        ("planner: 10/10\nI disagree.", "a plan", 0.5),
        ("planner: -3", "a plan", 0.5),
        ("planner: 3\nplanner: 9", "a plan", 0.5),
        ("", "a plan", 0.5),
    ],
)
def test_a_judge_in_another_environment_ends_with_its_marks(said, planned, expected):
    team = ("planner", planned), ("solver", "x"), ("judge", said)
    turns = [SimpleNamespace(name=n, text=t, step=0, truncated=False) for n, t in team]
    episode: Any = SimpleNamespace(turns=turns, results=[SimpleNamespace(info={})])
    turn: Any = turns[0]
    assert find_step_reward("judge")(turn, 0.5, episode) == expected
    turns[-1].truncated = True
    assert find_step_reward("judge")(turn, 0.5, episode) == 0.5
