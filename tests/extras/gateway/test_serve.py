"""A trained team behind an endpoint: a real server on a loopback port, and all kinds of callers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time

import bounds
import httpx
import numpy as np
import other_tokenizer
import pytest
from commands import code_of
from serving import KEY, events, saved_run, served

from marft_jax.engine.engine import Engine
from marft_jax.extras.gateway import answers, protocol, warm_up
from marft_jax.extras.gateway import command as serve
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.http import Limits
from marft_jax.extras.gateway.paths import READS
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer
from marft_jax.models.weights import tiny
from marft_jax.run.loaded_team import LoadedTeam
from marft_jax.run.metrics import Compilations

TASKS = [f"{a}+{b}+{a * b % 10}=?" for a, b in ((3, 4), (5, 9), (0, 7), (8, 8))]
LIMITS = Limits(body=4000, choices=6, read_seconds=3.0, seconds=60.0, idle_seconds=2)
_SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}}
FOREIGN = "ключ voilà"
BOUND = bounds.logprobs(tiny.CONFIG)


@pytest.fixture(scope="module")
def run(tmp_path_factory, one_device):
    """Two checkpoints with random adapters: each agent writes something of its own."""
    return saved_run(tmp_path_factory.mktemp("serve") / "run")


@pytest.fixture(scope="module")
def client(run):
    with served(run) as client:
        yield client


@pytest.fixture(scope="module")
def guarded(run):
    with served(run, keys=[KEY, "another", FOREIGN], limits=LIMITS) as client:
        yield client


def call(client, content=TASKS[0], model="solver", **fields):
    messages = [{"role": "user", "content": content}]
    body = {"model": model, "messages": messages, **fields}
    return client.post("/v1/chat/completions", json=body)


def answer(client, *args, **fields):
    reply = call(client, *args, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def text_of(body):
    return body["choices"][0]["message"]["content"]


@pytest.mark.release
def test_each_agent_writes_with_the_tokenizer_of_its_base(tmp_path, one_device):
    """Alone, in a stream and in a team whose answer is that of another base."""
    other = other_tokenizer.write(tmp_path / "other")
    file = tmp_path / "team.yaml"
    file.write_text(f"""
bases:
  other: {{model: {other}}}
agents:
  - {{name: planner, prompt: plan}}
  - {{name: solver, prompt: solve, answers: true, base: other}}
""")
    run = saved_run(tmp_path / "run", str(file))
    turns = LoadedTeam(run).ask(TASKS[0]).turns
    with served(run) as client:
        [choice] = answer(client, TASKS[0], "team", logprobs=True)["choices"]
        assert [turn["content"] for turn in choice["turns"]] == [turn.text for turn in turns]
        [alone] = answer(client, TASKS[1], "solver", logprobs=True, temperature=0)["choices"]
        for own in (choice, alone):
            pieces = "".join(row["token"] for row in own["logprobs"]["content"])
            assert pieces.startswith(own["message"]["content"])
        sent = events(call(client, TASKS[1], "solver", stream=True, temperature=0))
        texts = [event["choices"][0]["delta"].get("content") or "" for event in sent]
        assert "".join(texts) == alone["message"]["content"]


@pytest.fixture(scope="module")
def said(run):
    """What ``chat`` answers: the turns of each task."""
    team = LoadedTeam(run)
    return {task: team.ask(task).turns for task in TASKS}


def test_a_team_answers_as_in_chat(client, said):
    for task, turns in said.items():
        body = answer(client, task, "team")
        [choice] = body["choices"]
        assert choice["message"]["content"] == turns[-1].text
        found = [(t["agent"], t["content"], t["sees"]) for t in choice["turns"]]
        assert found == [(t.name, t.text, [*range(i)]) for i, t in enumerate(turns)]
        read, written = sum(len(t.prompt) for t in turns), sum(len(t.action) for t in turns)
        counts = {"prompt_tokens": read, "completion_tokens": written}
        assert body["usage"] == counts | {"total_tokens": read + written}


def test_an_agent_answers_as_in_chat_with_its_own_system_prompt(client, said):
    for task, turns in said.items():
        body = answer(client, task, "planner", return_token_ids=True, logprobs=True)
        [choice] = body["choices"]
        assert choice["message"]["content"] == turns[0].text
        assert body["prompt_token_ids"] == turns[0].prompt.tolist()
        assert choice["token_ids"] == turns[0].action.tolist()
        logprobs = [row["logprob"] for row in choice["logprobs"]["content"]]
        assert logprobs == pytest.approx(turns[0].logprobs.tolist(), abs=BOUND)
        assert choice["finish_reason"] == "stop"
    assert len({turns[0].text for turns in said.values()}) > 1


def test_messages_of_a_conversation_are_read(client):
    messages = [
        {"role": "developer", "content": "solve"},
        {"role": "user", "content": [{"type": "text", "text": text} for text in ("1+", "2")]},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "4\ud800"},
    ]
    body = json.dumps({"model": "solver", "messages": messages, "return_token_ids": True})
    head = {"content-type": "application/json"}
    reply = client.post("/v1/chat/completions", content=body, headers=head).json()
    ids = [258, *b"solve", 259, *b"1+2", 260, *b"3", 257, 259, *"4\ufffd".encode(), 260]
    assert reply["prompt_token_ids"] == ids


def test_choices_are_samples_that_a_seed_repeats(client):
    fields = dict(n=8, temperature=1.5, max_tokens=5, return_token_ids=True)
    first = answer(client, seed=1, **fields)["choices"]
    assert first == answer(client, seed=1, **fields)["choices"]
    assert first != answer(client, seed=2, **fields)["choices"]
    assert answer(client, **fields)["choices"] != answer(client, **fields)["choices"]
    assert len({str(choice["token_ids"]) for choice in first}) > 1
    assert max(len(choice["token_ids"]) for choice in first) == 5
    cut = [choice for choice in first if choice["token_ids"][-1] != 257]
    assert cut and all(choice["finish_reason"] == "length" for choice in cut)
    played = answer(client, "1+2+3=?", "team", seed=1, **fields)["choices"]
    assert len({str(choice["turns"]) for choice in played}) > 1


@pytest.mark.parametrize("model", ["solver", "team"])
def test_a_stream_adds_up_to_the_answer(client, model):
    fields = dict(n=3, temperature=1.0, seed=5, return_token_ids=True, logprobs=True)
    whole = answer(client, model=model, **fields)
    options = dict(stream=True, stream_options={"include_usage": True})
    *chunks, last = events(call(client, model=model, **fields, **options))
    assert last["usage"] == whole["usage"] and last["choices"] == []
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        text = "".join(chunk["delta"]["content"] for chunk in own)
        assert text == choice["message"]["content"]
        ended = {k: v for k, v in own[-1].items() if k != "delta"}
        both = (one["logprobs"]["content"] for one in (ended, choice))
        found, alone = ([row.pop("logprob") for row in rows] for rows in both)
        assert found == pytest.approx(alone, abs=BOUND)  # others shared the batch
        assert ended == {k: v for k, v in choice.items() if k != "message"}


def test_text_streams_before_its_end(client):
    """Chunks of 16 tokens are decoded between two looks."""
    chunks = events(call(client, n=8, temperature=5.0, top_k=255, seed=3, stream=True))
    assert len(chunks) > 8 and chunks[0]["choices"][0]["finish_reason"] is None
    begun = set()
    for [choice] in (chunk["choices"] for chunk in chunks):
        roles = {} if choice["index"] in begun else {"role": "assistant"}
        assert {k: v for k, v in choice["delta"].items() if k == "role"} == roles
        begun.add(choice["index"])


def test_a_stop_string_ends_an_answer(client):
    fields = dict(temperature=1.5, seed=4, return_token_ids=True)
    text = text_of(whole := answer(client, **fields))
    stop = text[2]
    [choice] = answer(client, **fields, stop=[stop, "never there"])["choices"]
    assert choice["message"]["content"] == text.partition(stop)[0]
    ids = whole["choices"][0]["token_ids"]
    assert choice["token_ids"] == ids[: len(choice["token_ids"])] and choice["token_ids"] != ids
    assert choice["finish_reason"] == "stop"
    streamed = events(call(client, **fields, stop=stop, stream=True))
    pieces = [chunk["choices"][0]["delta"]["content"] for chunk in streamed]
    assert "".join(pieces) == choice["message"]["content"]


@pytest.mark.parametrize(
    ("text", "stops", "sent"),
    [("one a", ["ab", "abc"], "one"), ("one ab", ["abc", "b!"], "one"), ("aab", ["aac"], "aab"),
     ("one abab", ["ababc"], "one"), ("one abc two", ["abc"], "one "), ("one", ["one"], ""),
     ("one two \ufffd", [], "one two"), ("  one ", ["x" * 1000], "one")],
)  # fmt: skip
def test_what_may_become_a_stop_string_is_held_back(text, stops, sent):
    assert answers.settled(text, stops) == sent


@pytest.mark.slow
def test_64_callers_get_each_their_own(client):
    def ask(i: int):
        model = ("planner", "solver", "team")[i % 3]
        task = f"{i % 10}+{i // 10}+{i * 7 % 10}=?"
        return answer(client, task, model, temperature=1.0, seed=i, n=1 + i % 2)["choices"]

    alone = {i: ask(i) for i in range(0, 64, 16)}
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        together = list(pool.map(ask, range(64)))
    assert {i: together[i] for i in alone} == alone
    assert [len(choices) for choices in together] == [1 + i % 2 for i in range(64)]
    assert all(("turns" in choices[0]) == (i % 3 == 2) for i, choices in enumerate(together))


CALLS = {
    "a question": {},
    "a long question": {"content": "Which days of a week are there, and why so many? " * 2},
    "a schema": FORM,
    "tools": {"tools": [{"type": "function", "function": {"name": "look_up", "parameters": {
        "type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}}}]},
    "an answer after others": {"before": ["How?", "So.", "Why?", "Because."]},
    "many tokens": {"temperature": 5.0, "seed": 3},
    "a team": {"model": "team"},
}  # fmt: skip


@pytest.mark.release
def test_what_a_call_needs_is_compiled_before_calls_are_taken(run):
    with served(run, warm=True) as client, Compilations() as compilations:
        for number, (what, fields) in enumerate(CALLS.items()):
            talk = [*fields.get("before", []), fields.get("content", "Which days are there?")]
            messages = [{"role": ("user", "assistant")[i % 2], "content": text}
                        for i, text in enumerate(talk)]  # fmt: skip
            more = {k: v for k, v in fields.items() if k not in ("before", "content")}
            body = {"model": "solver", "messages": messages, "stream": number % 2 == 1, **more}
            reply = client.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
            assert compilations.metrics()["device/compiled"] == 0, what


def test_models_health_and_metrics(client):
    before = client.get("/metrics").text
    names = [model["id"] for model in client.get("/v1/models").json()["data"]]
    assert names == ["team", "planner", "solver"]
    assert client.get("/v1/models/solver").json() == client.get("/v1/models").json()["data"][2]
    for unknown in ("nobody", "solver/x", "Solver"):
        reply = client.get(f"/v1/models/{unknown}")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert client.get("/health").json() == {"status": "ok"}
    used = answer(client)["usage"]
    texts = before, client.get("/metrics").text
    counts = [dict(row.rsplit(" ", 1) for row in text.splitlines()) for text in texts]

    def grown(name: str) -> float:
        return float(counts[1][name]) - float(counts[0].get(name, 0))

    assert grown('marft_calls_total{status="200"}') == 1
    assert grown('marft_tokens_total{kind="completion"}') == used["completion_tokens"]
    assert grown('marft_call_seconds_bucket{le="+Inf"}') == grown("marft_call_seconds_count") == 1
    assert counts[1]["marft_choices_open"] == counts[1]["marft_requests_unanswered"] == "0"


def test_a_new_checkpoint_is_taken_up_without_dropping_a_call_and_a_failed_engine_is_said(
    run, monkeypatch
):
    with served(run, step="1") as client, concurrent.futures.ThreadPoolExecutor(16) as pool:
        fields = dict(n=4, temperature=1.0, seed=1, return_token_ids=True)
        old = answer(client, **fields)["choices"]
        going = [pool.submit(answer, client, **fields) for _ in range(20)]
        reply = client.post("/reload", json={})
        assert reply.json() == {"loaded": 3}
        new = answer(client, **fields)["choices"]
        assert new != old
        assert all(call.result()["choices"] in (old, new) for call in going)
        with monkeypatch.context() as patch:
            patch.delattr(Engine, "step")
            assert call(client).status_code == 503
        assert client.get("/health").status_code == 503
        assert call(client).status_code == 503


def body_of(**fields):
    messages = [{"role": "user", "content": "1+2=?"}]
    return {"model": "solver", "messages": messages, "max_tokens": 2, **fields}


LONG = [{"role": "user", "content": "1" * 400}]
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
REFUSED = {
    "broken JSON": (b"{", 400),
    "deep nesting": (b"[" * 3000, 400),
    "a deep field": (b'{"a":' * 100 + b"1" + b"}" * 100, 400),
    "a number of thousands of digits": (b'{"n": 1' + b"0" * 3900 + b"}", 400),
    "a huge body": (b" " * 5000, 413),
    "an infinite temperature": (b'{"temperature": Infinity}', 400),
    "a share that overflows": (json.dumps(body_of())[:-1].encode() + b', "top_p": 1e999}', 400),
    "no number, in a field that nobody knows": (b'{"a": NaN}', 400),
    "no number, within lists": (b'{"a": [[-Infinity]]}', 400),
    "no model": ({"messages": body_of()["messages"]}, 404),
    "too long a prompt": (body_of(messages=LONG), 400),
    "more choices than may wait": (body_of(n=7), 429),
    "tools for a team": (body_of(model="team", tools=[FUNCTION]), 400),
    "no constraint": (body_of(tool_choice="required", tools=[FUNCTION]), 400),
    "a stream that is refused": (body_of(model="nobody", stream=True), 404),
}


@pytest.mark.parametrize(("body", "status"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_is_refused_in_the_format_of_the_api(guarded, body, status):
    content = body if isinstance(body, bytes) else json.dumps(body)
    head = {"content-type": "application/json"}
    reply = guarded.post("/v1/chat/completions", content=content, headers=head)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["message"] and set(error) == {"message", "type", "param", "code"}
    assert ("retry-after" in reply.headers) == (status == 429)
    assert_undisturbed(guarded)


def assert_undisturbed(client):
    """The next caller is answered, and nothing is left of those before."""
    assert answer(client, max_tokens=2)["usage"]["completion_tokens"] <= 2
    deadline = time.monotonic() + 60
    while True:
        rows = dict(row.rsplit(" ", 1) for row in client.get("/metrics").text.splitlines())
        if rows["marft_choices_open"] == rows["marft_requests_unanswered"] == "0":
            return
        assert time.monotonic() < deadline, rows
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("given", "sampling"),
    [
        ({"top_k": -1, "max_tokens": -1, "seed": -1}, {"top_k": 0}),
        ({"max_tokens": None, "max_completion_tokens": 5}, {"max_new_tokens": 5}),
        ({"max_tokens": 7, "max_completion_tokens": -1}, {"max_new_tokens": 7}),
        (dict.fromkeys(("top_k", "top_p", "min_p", "temperature", "stop", "logit_bias", "n", "seed",
                        "stream", "logprobs", "presence_penalty", "top_logprobs", "tools",
                        "tool_choice", "response_format", "functions")), {}),
        ({"stop": [], "stop_token_ids": [], "min_tokens": 0, "repetition_penalty": 1.0,
          "user": "me", "store": True, "unknown": {"a": 1}, "tools": [], "logit_bias": {},
          "frequency_penalty": 0.0, "response_format": {"type": "text"}, "top_logprobs": 0}, {}),
    ],
)  # fmt: skip
def test_values_that_ask_for_nothing_and_unknown_fields_are_ignored(given, sampling):
    body = body_of(**{"max_tokens": None, **given})
    read = READS["/chat/completions"](json.dumps(body).encode()).call
    assert (read.sampling, read.seed, read.n, read.stream) == (sampling, None, 1, False)


def said_by(role, content):
    return {"messages": [{"role": role, "content": content}]}


@pytest.mark.parametrize(
    "fields",
    [
        {"model": ["solver"]}, {"messages": []}, {"messages": [None]}, said_by("king", "a"),
        said_by("user", [{"type": "image_url"}]), said_by("user", 3), {"n": 0}, {"n": 10**6},
        {"n": True}, {"temperature": -1}, {"temperature": 1e39}, {"temperature": 1e-38},
        {"temperature": "hot"}, {"top_k": -2}, {"top_k": 1.5}, {"top_p": 0}, {"min_p": -1},
        {"max_tokens": -2}, {"max_tokens": 0}, {"max_completion_tokens": 0.5}, {"stop": ""},
        {"stop": ["a"] * 100}, {"stop": [1]}, {"stop": ["a", "b" * 2000]}, {"seed": -1.5},
        {"stream": "yes"}, {"stream_options": [1]}, {"stream_options": {"include_usage": True}},
        {"tools": [{"type": "function"}]}, {"tool_choice": "required"}, {"audio": {"voice": "a"}},
        {"functions": [{"name": "f"}]}, {"response_format": {"type": "yaml"}}, {"logit_bias": {
         "5": 1}}, {"response_format": {"type": "json_schema", "json_schema": {"schema": {
         "type": "objekt"}}}}, {"presence_penalty": 1}, {"top_logprobs": 3}, {"min_tokens": 2},
        {"structured_outputs": {"choice": ["a"]}}, {"repetition_penalty": 1.5},
    ],
    ids=lambda fields: str(fields)[:40],
)  # fmt: skip
def test_fields_that_cannot_be_or_are_not_offered_are_refused_by_name(fields):
    name = next(iter(fields))
    with pytest.raises(ApiError, match=name) as error:
        READS["/chat/completions"](json.dumps(body_of(**fields)).encode())
    assert (error.value.status, error.value.param) == (400, name)


@pytest.mark.parametrize(
    ("written", "text"),
    [("aé€😀b".encode(), "aé€😀b"), (b" \n a ", "a"), (b"a\xe2\x82", "a"), (b"", ""),
     (b"a\xe2b", "a\ufffdb"), ("a€, b".encode(), "a€")],
)  # fmt: skip
def test_the_bytes_of_the_log_probs_are_those_of_the_text(written, text):
    ids = np.array([*written, ByteTokenizer.END])
    choice = answers.Choice(text, ids, ids * -0.5, False, ids, ByteTokenizer().decode)
    asked = protocol.Call("solver", (), logprobs=True)
    [body] = answers.Answer(asked).whole([choice])["choices"]
    rows = body["logprobs"]["content"]
    assert bytes(b for row in rows for b in row["bytes"]).decode() == text
    assert [row["logprob"] for row in rows] == (ids * -0.5).tolist()


@pytest.mark.parametrize(
    ("text", "thought", "said"),
    [("<think>a</think>\n\nb", "a", "b"), ("<think>cut", "cut", ""), ("b", None, "b"),
     ("opened</think>b", "opened", "b"), ("b<think>a</think>c<think>d", "ad", "bc")],
)  # fmt: skip
def test_a_message_has_thoughts_of_its_own(text, thought, said):
    ids = np.array([*text.encode(), ByteTokenizer.END])
    message = answers.Choice(text, ids, ids * -0.5, False, ids, ByteTokenizer().decode).message
    assert (message.get("reasoning_content"), message["content"]) == (thought, said)


def test_a_stream_has_whole_characters_alone(client, monkeypatch):
    written = [*" é€😀 ä".encode(), 0xE2, 0x82]

    def decode(self, ids, special=False):
        return bytes(written[: len(ids)]).decode(errors="replace")

    monkeypatch.setattr(ByteTokenizer, "decode", decode)
    fields = dict(max_tokens=len(written), temperature=5.0, seed=1, logprobs=True)
    chunks = events(call(client, **fields, stream=True))
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    whole = answer(client, **fields)
    used = whole["usage"]["completion_tokens"]
    shown = bytes(written[:used]).decode(errors="ignore").strip()
    assert "".join(texts) == shown == text_of(whole) and "\ufffd" not in "".join(texts)


HEADS = {
    "no key": ({"authorization": ""}, 401),
    "another scheme": ({"authorization": f"Basic {KEY}"}, 401),
    "a wrong key": ({"authorization": "Bearer a kez"}, 401),
    "bytes": ({"authorization": b"Bearer \xff\xfe"}, 401),
    "a form": ({"content-type": "application/x-www-form-urlencoded"}, 415),
}


@pytest.mark.parametrize(("head", "status"), HEADS.values(), ids=HEADS)
def test_callers_without_a_key_and_pages_in_a_browser_are_refused(guarded, head, status):
    head = {"content-type": "application/json", **head}
    for path in ("/v1/chat/completions", "/reload"):
        reply = guarded.post(path, content=json.dumps(body_of()), headers=head)
        assert reply.status_code == status and reply.json()["error"]["message"]
    if status == 401:
        assert guarded.get("/metrics", headers=head).status_code == 401
        assert guarded.get("/v1/models", headers=head).status_code == 401
        assert guarded.get("/health", headers=head).status_code == 200
        foreign = {"authorization": f"Bearer {FOREIGN}".encode()}  # a key may be of any script
        assert guarded.get("/v1/models", headers=foreign).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/chat/completions", 405), ("POST", "/v1/embeddings", 404), ("GET", "/", 404),
     ("DELETE", "/v1/models", 405), ("GET", "/v1/../../etc/passwd", 404)],
)  # fmt: skip
def test_other_places_are_refused(guarded, method, path, status):
    reply = guarded.request(method, path)
    assert reply.status_code == status and reply.json()["error"]["type"] == "invalid_request_error"


POST = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"
JSON = POST + "content-type: application/json\r\n"
RAW = {
    "half a body": (f'{JSON}content-length: 100\r\n\r\n{{"model"'.encode(), b"408"),
    "half a chunk": (f"{JSON}transfer-encoding: chunked\r\n\r\n20\r\nab".encode(), b"408"),
    "not HTTP": (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"400"),
    "a huge head": (POST.encode() + b"a: " + b"b" * 100_000, b"400"),
    "two lengths": (f"{JSON}content-length: 3\r\ncontent-length: 4\r\n\r\nabc".encode(), b"400"),
    "a NUL in the head": (POST.encode() + b"a: \x00\r\n\r\n", b"400"),
}


@pytest.fixture(scope="module")
def received(guarded):
    """Answers to all of them, who come at the same time."""

    def speak(sent):
        with socket.create_connection(("127.0.0.1", guarded.base_url.port), timeout=20) as raw:
            raw.sendall(sent)
            received = b""
            with contextlib.suppress(ConnectionError):
                while part := raw.recv(1 << 16):
                    received += part
        return received

    with concurrent.futures.ThreadPoolExecutor(len(RAW)) as pool:
        going = {name: pool.submit(speak, sent) for name, (sent, _) in RAW.items()}
        assert_undisturbed(guarded)
        return {name: future.result() for name, future in going.items()}


@pytest.mark.parametrize("name", RAW)
def test_slow_and_broken_connections_are_answered_and_closed(received, name):
    """Within the seconds that a call may take to come; and the others go on meanwhile."""
    status = RAW[name][1]
    assert received[name].split(b" ", 2)[1:2] == ([status] if status else [])


@pytest.mark.parametrize(("model", "stream"), [("solver", True), ("team", False)])
def test_a_client_that_leaves_leaves_nothing_behind(guarded, model, stream):
    fields = body_of(model=model, stream=stream, n=5, temperature=9.0, top_k=255, max_tokens=24)
    body = json.dumps(fields).encode()
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", guarded.base_url.port)) as raw:
            raw.sendall(f"{JSON}content-length: {len(body)}\r\n\r\n".encode() + body)
            time.sleep(0.01)
        assert_undisturbed(guarded)


def test_more_calls_than_may_wait_are_told_to_come_again(guarded):
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        fields = dict(n=2, temperature=9.0, top_k=255)
        replies = list(pool.map(lambda _: call(guarded, **fields), range(80)))
    statuses = {reply.status_code for reply in replies}
    assert statuses == {200, 429}
    assert_undisturbed(guarded)


def test_a_call_that_takes_too_long_is_given_up(run):
    with served(run, limits=Limits(seconds=0.001)) as client:
        assert call(client).json()["error"]["code"] == "timeout"
        assert call(client, model="team").status_code == 504
        assert call(client, stream=True).status_code == 504


KNOWN = {
    "localhost": True, "LOCALHOST:1": True, "127.0.0.1:8000": True, "[::1]:8000": True,
    "a.example": True, "B.example.:80": True, "c.example:443": True, "d.example": False,
    "localhost.d.example": False, "a.example.d": False, "a.example@d.example": False,
    "192.168.0.1": False, "": False,
}  # fmt: skip


LARGE = """
import signal, socket
from starlette.responses import Response
from starlette.routing import Route
from marft_jax.extras.gateway import http
from marft_jax.models.weights import tiny

async def large(request):
    return Response(bytes(20_000_000))

async def small(request):
    return Response()

app = http.make_app([Route("/large", large), Route("/small", small)], lambda status: None)
signal.signal(signal.SIGTERM, lambda *given: None)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
http.make_server(app, http.Limits(grace_seconds=2.0)).run([listener])
"""


@pytest.mark.slow
def test_a_signal_ends_the_server_while_clients_are_silent_or_do_not_read():
    command = [sys.executable, "-c", LARGE]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with process, contextlib.ExitStack() as opened:
        port = int(process.stdout.readline())

        def send(text):
            raw = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            raw.sendall(text)
            return raw

        head = b"GET /%s HTTP/1.1\r\nhost: localhost\r\n"
        try:
            for text in (b"", head % b"small", head % b"large" + b"\r\n"):
                for _ in range(20):
                    send(text)
            send(head % b"small" + b"\r\n").recv(100)  # it has read those before
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


@pytest.fixture
def unhandled():
    """Signals that would have ended a process; handlers are after the test what they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    yield ended
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_command_serves_until_a_signal_and_ends_what_is_begun(
    host, run, tmp_path, unhandled, monkeypatch
):
    """In this process, which has the programs."""
    keys = tmp_path / "keys"
    keys.write_text(f"\ufeff\n{KEY}\n")
    flags = ["--run", str(run), "--port", "0", "--api_key_file", str(keys), "--host", host]
    monkeypatch.setattr(warm_up, "warm_up", lambda team: None)
    flags += ["--allow_host", "a.example,b.example", "--allow_host", "c.example"]
    said = queue.Queue[str]()  # another stderr would let absl, when uvicorn starts, close pytest's
    monkeypatch.setattr(serve, "print", lambda line, **_: said.put(line), raising=False)

    def use():
        url = said.get(timeout=120).split()[-1]
        head = {"authorization": f"Bearer {KEY}"}
        how = dict(base_url=url.removesuffix("/v1"), headers=head, timeout=120)
        with httpx.Client(**how) as client, concurrent.futures.ThreadPoolExecutor(1) as pool:
            try:
                assert client.get("/health").status_code == 200
                seen = {name: client.get("/health", headers={"host": name}) for name in KNOWN}
                assert {name: reply.status_code == 200 for name, reply in seen.items()} == KNOWN
                going = pool.submit(answer, client, n=16, temperature=9.0, top_k=255)
                while not going.done() and " 16" not in client.get("/metrics").text:
                    pass
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
            return len(going.result()["choices"])

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        using = pool.submit(use)
        with pytest.raises(SystemExit) as left:
            serve.main(flags)
        assert (left.value.code, using.result(), unhandled) == (0, 16, [])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--port", "99999999"], "--port 99999999"),
        (["--host", "203.0.113.1"], "--host 203.0.113.1"),
        (["--api_key_file", "nowhere"], "--api_key_file nowhere"),
        (["--api_key_file", os.devnull], "expected keys"),
        (["--allow_host", "*"], "--allow_host: expected the name of a host"),
    ],
)
def test_what_cannot_be_served_is_said_at_the_start(run, capsys, flags, named):
    assert code_of(serve.main, "--run", run, *flags) == 2
    assert named in capsys.readouterr().err
