"""Completions and responses: read, answered and trained as chat completions are."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest
from programs import play
from serving import KEY, events, saved_run, served

from marft_jax.extras.gateway import completions, responses
from marft_jax.extras.gateway.answers import Choice, settled
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.paths import READS
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer

TASK = "1+2+3=?"
TOOL = {"name": "add", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def client(tmp_path_factory, one_device):
    with served(saved_run(tmp_path_factory.mktemp("paths") / "run"), keys=[KEY]) as client:
        yield client


def post(client, path, **fields):
    reply = client.post(f"/v1/{path}", json={"model": "solver", **fields})
    assert reply.status_code == 200, reply.text
    return reply


def test_a_chat_a_completion_of_its_prompt_and_a_response_have_the_same_text(client):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": TASK}]
    chat = post(client, "chat/completions", messages=messages, return_token_ids=True).json()
    ids, limit = chat["prompt_token_ids"], {"max_tokens": 24}
    text = ByteTokenizer().decode(ids, special=True)
    message = chat["choices"][0]["message"]["content"]
    for prompt in (ids, text, [text], [ids]):
        body = post(client, "completions", prompt=prompt, **limit).json()
        assert body["choices"][0]["text"].strip() == message and body["usage"] == chat["usage"]
    body = post(client, "responses", input=TASK, instructions="s").json()
    [item] = body["output"]
    assert item["content"][0]["text"] == message
    why = {"stop": "completed", "length": "incomplete"}[chat["choices"][0]["finish_reason"]]
    assert body["status"] == item["status"] == why
    assert body["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]


def test_a_completion_keeps_the_white_space_around_it_and_each_prompt_has_its_choices(
    client, monkeypatch
):
    written = [*b" \n a b \n"]
    decode = lambda self, ids, special=False: bytes(written[: len(ids)]).decode()  # noqa: E731
    monkeypatch.setattr(ByteTokenizer, "decode", decode)
    fields = dict(prompt=[[49], [50, 51]], n=2, max_tokens=8, temperature=5.0, top_k=255, seed=1)
    body = post(client, "completions", logprobs=0, **fields).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 3
    chunks = events(post(client, "completions", stream=True, **fields))
    for choice in body["choices"]:
        assert choice["text"].startswith(" \n a"[: len(choice["text"])])
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        own = [c["text"] for e in chunks for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(own) == choice["text"]


def test_the_events_of_a_response_add_up_to_it(client):
    fields = dict(input=TASK, temperature=1.0, seed=3)
    whole = post(client, "responses", **fields).json()
    lines = post(client, "responses", stream=True, **fields).text.split("\n\n")[:-1]
    found = [json.loads(line.partition("\ndata: ")[2]) for line in lines]
    assert [f"event: {event['type']}" for event in found] == [x.split("\n")[0] for x in lines]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    last = found[-1]["response"]
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    text = "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta")
    assert text == whole["output"][0]["content"][0]["text"]


def test_thoughts_text_and_calls_of_a_response_are_items_of_their_own():
    body = json.dumps({"model": "solver", "input": "a", "include": None}).encode()
    answer, ids = responses.read(body), np.array([ByteTokenizer.END])
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    text = "<think>so</think> It is"
    choice = Choice(text, ids, ids * 1.0, True, ids, ByteTokenizer().decode, calls=(call,))
    found = [*answer.more(0, "<think>s"), *answer.ends([choice])]
    last = found[-1]["response"]
    assert [item["type"] for item in last["output"]] == ["reasoning", "message", "function_call"]
    assert last["output"][0]["content"] == [{"type": "reasoning_text", "text": "so"}]
    assert last["output"][2]["call_id"] == "c" and last["output"][2]["arguments"] == "{}"
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in last["output"]] == ["completed"] * 2 + ["incomplete"]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == last["output"]


UNOPENED = {
    "a thought": ["Hmm, 5.", "Hmm, 5. </think>It", "Hmm, 5. </think>It is 7."],
    "nothing after it yet": ["Hmm, 5.", "Hmm, 5.</think>", "Hmm, 5.</think>\n\nIt is 7."],
    "before any text": ["", "</think>", "</think> It is 7."],
    "a thought of two lines": ["Hmm,\n", "Hmm,\n5.\n</think>\nIt", "Hmm,\n5.\n</think>\nIt is 7."],
    "an answer that repeats it": ["It is", "It is 7?</think>It is 7."],
    "nothing": ["", "It is 7."],
    "opened": ["<think>Hmm", "<think>Hmm</think>", "<think>Hmm</think>It is 7."],
}  # fmt: skip


@pytest.mark.parametrize("texts", UNOPENED.values(), ids=UNOPENED)
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_stream_ends_with_the_answer_though_its_thought_was_never_opened(texts, is_cut):
    ids = np.array([ByteTokenizer.END])
    choice = Choice(texts[-1], ids, ids * 1.0, is_cut, ids, ByteTokenizer().decode)

    def bodies(path, **fields):
        answer = READS[path](json.dumps({"model": "solver", "stream": True, **fields}).encode())
        sent = [settled(text, ()) for text in texts[:-1]]
        found = [body for text in sent for body in answer.more(0, text)]
        return [*found, *answer.ends([choice])]

    chunks = bodies("/chat/completions", messages=[{"role": "user", "content": "a"}])
    pieces = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert "".join(pieces).endswith("It is 7.")
    assert [chunk["choices"][0]["finish_reason"] is None for chunk in chunks][-1:] == [False]
    found = bodies("/responses", input="a")
    answer = responses.read(b'{"model": "solver", "input": "a"}').whole([choice])
    now = found[-1]["response"]
    for name in ("type", "status", "content"):
        assert [item[name] for item in now["output"]] == [o[name] for o in answer["output"]]
    assert now["status"] == now["output"][-1]["status"] == ("incomplete" if is_cut else "completed")


def test_the_calls_of_a_streamed_chat_are_complete_before_the_chunk_with_its_end():
    ids = np.array([ByteTokenizer.END])
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    choice = Choice("a", ids, ids * 1.0, False, ids, ByteTokenizer().decode, calls=(call,))
    body = json.dumps({"model": "solver", "messages": [{"role": "user"}], "stream": True}).encode()
    called, end = [one["choices"][0] for one in READS["/chat/completions"](body).ends([choice])]
    assert called["finish_reason"] is None
    assert called["delta"]["tool_calls"] == [{"index": 0, **call}]
    assert end["finish_reason"] == "tool_calls" and "tool_calls" not in end["delta"]


def test_items_of_a_response_are_messages_of_a_chat():
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "let me"}]}
    runs = [{"type": "function_call", "call_id": i, "name": "add", "arguments": "{}"} for i in "ab"]
    ran = [{"type": "function_call_output", "call_id": i, "output": i} for i in "ab"]
    items = [{"role": "user", "content": "x"}, {"type": "reasoning"}, said, *runs, *ran]
    fields = {"instructions": "be", "tools": [{"type": "function", **TOOL}], "input": items}
    fields |= {"tool_choice": {"type": "function", "name": "add"}, "max_output_tokens": 5}
    call = responses.read(json.dumps({"model": "solver", **fields}).encode()).call
    assert [m["role"] for m in call.messages] == ["system", "user", "assistant", "tool", "tool"]
    assert call.messages[2]["content"] == "let me" and len(call.messages[2]["tool_calls"]) == 2
    assert call.tools == ({"type": "function", "function": TOOL},)
    assert call.required == ("add",) and call.sampling["max_new_tokens"] == 5


@pytest.mark.parametrize(
    ("path", "given", "named"),
    [
        (completions, {"prompt": []}, "prompt"),
        (completions, {"prompt": [True]}, "prompt"),
        (completions, {"prompt": "a", "echo": True}, "echo"),
        (completions, {"prompt": "a", "logprobs": 3}, "logprobs"),
        (responses, {"input": [{"type": "computer_call"}]}, "input"),
        (responses, {"input": "a", "tools": [{"type": "web_search"}]}, "tools"),
        (responses, {"input": "a", "text": "json"}, "text"),
        (responses, {"input": "a", "previous_response_id": "r"}, "previous_response_id"),
        (responses, {"input": "a", "max_output_tokens": 0}, "^max_output_tokens"),
        (responses, {}, "^input"),
        (responses, {"input": [{"role": "nobody", "content": "a"}]}, "^input"),
        (responses, {"input": [{"role": "user", "content": 3}]}, "^input"),
        (responses, {"input": "a", "text": {"format": {"type": "xml"}}}, "^text.format"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)).rpartition(".")[2],
)
def test_what_is_wrong_or_not_offered_is_named(path, given, named):
    with pytest.raises(ApiError, match=named) as error:
        path.read(json.dumps({"model": "solver", **given}).encode())
    assert error.value.status == 400
    assert str(error.value.param).split(".")[0] in given or not given.get("input")


@pytest.mark.parametrize("prompt", ["", [300], [-1], [255, 5000]], ids=str)
def test_a_prompt_of_ids_without_a_token_is_refused(client, prompt):
    reply = client.post("/v1/completions", json={"model": "solver", "prompt": prompt})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "prompt"
    reply = client.post("/v1/completions", json={"model": "team", "prompt": "a"})
    assert reply.status_code == 400


def test_a_program_may_use_each_path_and_a_conversation_goes_on_by_its_ids(monkeypatch):
    def run(task, client):
        head = {"authorization": f"Bearer {client.api_key}"}
        with httpx.Client(headers=head, base_url=client.base_url) as http:
            first = {"role": "user", "content": f"t{task}"}
            body = http.post("responses", json={"model": "solver", "input": [first]}).json()
            text = body["output"][0]["content"][0]["text"]
            later = [first, *body["output"], {"role": "user", "content": "so?"}]
            http.post("responses", json={"model": "solver", "input": later, "stream": True})
            fields = {"model": "planner", "prompt": [f"of {text}", [5, 6]], "n": 2}
            http.post("completions", json=fields)
        return 1.0

    played, _ = play(run, monkeypatch, (1, 2))
    for episode in played.episodes:
        assert [turn.name for turn in episode.turns] == ["solver"] * 2 + ["planner"] * 4
        begun, later, *continued = episode.turns
        assert later.start == len(begun.prompt) + len(begun.action) and later.sees == (0,)
        assert continued[0].sees and not continued[3].sees
        assert continued[3].prompt.tolist() == [5, 6]
        assert episode.results[0].info["rewritten"] == 0
