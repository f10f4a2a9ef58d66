"""Agent programs of users: their calls as acts, their ids, their random numbers, their rewards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import socket
import subprocess
import sys
import threading
import time

import bounds
import httpx
import jax
import numpy as np
import openai
import pytest
import small
from commands import code_of
from programs import play, turns_of, user
from scripted import text

from marft_jax import cli, train
from marft_jax.background import users_loop
from marft_jax.errors import BadInput
from marft_jax.extras.gateway import channel as channels
from marft_jax.models.weights import tiny
from marft_jax.run.models import open_models
from marft_jax.run.states import restore_state
from marft_jax.team.team_files import load_team


def assistant(content):
    return {"role": "assistant", "content": content}


def said(reply):
    return reply.choices[0].message.content


def test_a_program_is_an_episode(monkeypatch):
    def run(task, client):
        plan = client.chat.completions.create(model="planner", messages=[user(f"t{task}")])
        answer = client.chat.completions.create(
            model="solver", messages=[user(f"t{task} {said(plan)}")], temperature=0.5, max_tokens=3
        )
        assert plan.usage.completion_tokens == len(said(plan)) + 1
        return len(said(answer)) + task / 10

    played, engine = play(run, monkeypatch, (5, 6, 7))
    for episode in played.episodes:
        plan, answer = episode.turns
        assert (plan.name, answer.name) == ("planner", "solver")
        assert text(plan.prompt) == f"<s>p<u>t{episode.index}<a>"
        assert text(answer.prompt) == f"<s>s<u>t{episode.index} {plan.text}<a>"
        assert episode.dependency.tolist() == [[False, False], [True, False]]
        assert (answer.temperature, answer.limit, answer.answers) == (0.5, 3, True)
        assert episode.reward == pytest.approx(len(answer.text) + episode.index / 10)
    assert [len(batch) for batch in engine.batches] == [3, 3]


def test_a_stop_text_ends_what_is_sampled_and_trained(monkeypatch):
    def run(task, client):
        ask = client.chat.completions.create
        first = ask(model="solver", messages=[user("a")], stop=["</x>", "z"])
        assert (said(first), first.choices[0].finish_reason) == ("1", "stop")
        messages = [user("a"), assistant(said(first)), user("more")]
        assert said(ask(model="solver", messages=messages)) == "1</x> 3"
        return 1.0

    [episode] = play(run, monkeypatch, speak=lambda request: "1</x> 3")[0].episodes
    first, second = episode.turns
    assert text(first.action) == "1</x>" and not first.truncated
    assert text(second.prompt) == "<s>s<u>a<a>1</x><e><u>more<a>"
    assert second.start == len(first.prompt) + len(first.action) + 1
    assert episode.reward == 1.0 and episode.results[0].info["rewritten"] == 0


def test_a_reward_for_each_agent(monkeypatch):
    def run(task, client):
        for name in ("planner", "solver"):
            client.chat.completions.create(model=name, messages=[user("a")])
        return {"planner": 1, "solver": -0.5}

    [episode] = play(run, monkeypatch)[0].episodes
    assert dict(episode.results[0].agent_rewards) == {"planner": 1.0, "solver": -0.5}
    assert [rewards.tolist() for rewards in small.paid([episode])] == [[1.0, -0.5]]


def test_a_conversation_that_goes_on_encodes_only_what_is_new(monkeypatch):
    def run(task, client):
        messages = [user("first")]
        for i in range(4):
            reply = client.chat.completions.create(model="solver", messages=messages)
            messages += [assistant(said(reply)), user(f"next {i}")]
        return 1.0

    # what is sampled cannot be had by encoding its text: it has spaces at its ends, and is cut off
    [episode] = play(run, monkeypatch, speak=lambda request: "  a long one  ")[0].episodes
    for before, turn in zip(episode.turns[:-1], episode.turns[1:], strict=True):
        known = [*before.prompt.tolist(), *before.action.tolist(), 257]
        assert turn.prompt[: turn.start].tolist() == known
        assert text(turn.prompt[turn.start :]) == f"<u>next {before.index}<a>"
    assert episode.results[0].info["rewritten"] == 0
    assert np.array_equal(episode.dependency, np.tri(4, k=-1, dtype=bool))


REWRITTEN = {
    "white space": [user("a"), assistant(" b1"), user("c")],
    "a system message": [{"role": "system", "content": "x"}, user("a"), assistant("b1"), user("c")],
    "another answer": [user("a"), assistant("other"), user("c")],
    "an empty answer": [user("a"), assistant(None), user("c")],
}


@pytest.mark.parametrize("messages", REWRITTEN.values(), ids=REWRITTEN)
def test_a_rewritten_conversation_starts_anew_and_is_counted(messages, monkeypatch):
    def run(task, client):
        client.chat.completions.create(model="solver", messages=[user("a")])
        client.chat.completions.create(model="solver", messages=messages)
        return 1.0

    [episode] = play(run, monkeypatch, speak=lambda request: "b1")[0].episodes
    assert episode.results[0].info["rewritten"] == 1
    assert episode.turns[1].start == 0


def delayed(seed):
    """Four branches side by side, of several calls each, with delays of their own."""

    async def branch(client, i, rng):
        messages = [user(f"branch {i % 2}")]  # those of two are asked the same
        for _ in range(1 + i % 3):
            await asyncio.sleep(rng.random() * 0.02)
            name = ("planner", "solver")[i % 2]
            async with asyncio.timeout(30):
                reply = await client.chat.completions.create(model=name, messages=messages)
            messages += [assistant(said(reply)), user("more")]
        return said(reply)

    async def run(task, client):
        rng = random.Random(seed + task) if seed else random.Random()
        parts = await asyncio.gather(*(branch(client, i, rng) for i in range(4)))
        last = [user(" ".join(sorted(parts)))]
        reply = await client.chat.completions.create(model="solver", messages=last, n=2)
        return float(int(reply.choices[1].message.content, 16) % 7)

    return run


def test_delays_change_nothing(monkeypatch):
    def seen(played):
        return turns_of(played), [episode.reward for episode in played.episodes]

    runs = [play(delayed(seed), monkeypatch, (1, 2, 3)) for seed in (0, 0, 7)]
    assert seen(runs[0][0]) == seen(runs[1][0]) == seen(runs[2][0])
    assert [e.results[0].info["rewritten"] for e in runs[0][0].episodes] == [0, 0, 0]
    keys = [request.key for request in runs[0][1].requests]
    assert len(set(keys)) == len(keys) == 3 * (1 + 2 + 3 + 1 + 2)


SEMAPHORE, LOCK = asyncio.Semaphore(2), asyncio.Lock()
EVENT, CONDITION = asyncio.Event(), asyncio.Condition()
HTTP = httpx.AsyncClient(verify=False)


@contextlib.asynccontextmanager
async def notified():
    async with CONDITION:
        CONDITION.notify_all()
    yield


@pytest.mark.parametrize("shared", [lambda: SEMAPHORE, lambda: LOCK, notified],
                         ids=["semaphore", "lock", "condition"])  # fmt: skip
def test_async_objects_of_a_module_are_shared_by_all_episodes(shared, monkeypatch):
    async def run(task, client):
        head = {"authorization": f"Bearer {client.api_key}"}

        async def ask(i):
            async with shared():
                await asyncio.sleep(random.random() * 0.01)
                body = {"model": "solver", "messages": [user(f"{task} {i}")]}
                if i != 3:
                    return said(await client.chat.completions.create(**body))
                url = f"{client.base_url}/chat/completions"
                reply = await HTTP.post(url, json=body, headers=head)
                return reply.json()["choices"][0]["message"]["content"]

        texts = await asyncio.gather(*map(ask, range(4)))
        return float(len("".join([*texts, await ask(" ".join(texts))])))

    runs = [play(run, monkeypatch, range(4)) for _ in range(3)]
    assert all(len(played.episodes) == 4 for played, _ in runs)
    batches = [[[r.key for _, r in batch] for batch in engine.batches] for _, engine in runs]
    assert batches[0] == batches[1] == batches[2]


@pytest.mark.parametrize("leave", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_what_an_async_program_raises_ends_its_episode_alone(leave, monkeypatch):
    async def run(task, client):
        await client.chat.completions.create(model="solver", messages=[user("a")])

        async def part():
            if task == 1:
                raise leave("mine")

        await asyncio.gather(part(), asyncio.sleep(0))
        return 1.0

    played, _ = play(run, monkeypatch, (0, 1, 2), max_failed=0.5)
    assert [e.index for e in played.episodes] == [0, 2]
    assert leave.__name__ in played.failed[0].why


def test_a_task_that_is_left_slows_nobody_down(monkeypatch):
    """It beats for ever, of an episode that is over."""
    beating = []

    async def beat():
        while True:
            await asyncio.sleep(0.01)

    async def run(task, client):
        for i in range(3):
            await client.chat.completions.create(model="solver", messages=[user(str(i))])
            if task == 0:
                beating.append(asyncio.create_task(beat()))
                return 1.0
        users_loop().call_soon(beating[0].cancel)
        return 1.0

    monkeypatch.setattr(channels, "_MOST_SECONDS", 30)
    played, _ = play(run, monkeypatch, (1, 0), step_seconds=20)
    assert [e.index for e in played.episodes] == [1, 0]


def test_an_answer_is_openais_and_may_be_a_message_of_the_next_call(monkeypatch):
    def run(task, client):
        reply = client.chat.completions.create(model="solver", messages=[user("a")])
        assert isinstance(reply, openai.types.chat.ChatCompletion) and reply.usage.total_tokens > 3
        message = reply.choices[0].message
        assert message.tool_calls is None and message.refusal is None
        dumped = json.loads(reply.model_dump_json())["choices"][0]["message"]["content"]
        assert dumped == message.content and reply.model_copy(update={"id": "x"}).id == "x"
        messages = [user("a"), message, user("b")]
        client.chat.completions.create(model="solver", messages=messages)
        return 1.0

    [episode] = play(run, monkeypatch)[0].episodes
    assert episode.turns[1].start > 0 and episode.results[0].info["rewritten"] == 0


def ask_raw(client, fields):
    raw = client.chat.completions.with_raw_response.create(**fields)
    return raw.status_code == 200 and raw.parse().choices[0].message.content


def stream(client, fields):
    chunks = list(client.chat.completions.create(stream=True, **fields))
    return "".join(c.choices[0].delta.content for c in chunks)


def stream_events(client, fields):
    with client.chat.completions.stream(**fields) as events:
        return events.get_final_completion().choices[0].message.content


def respond(client, fields):
    return client.responses.create(model=fields["model"], input=fields["messages"]).output_text


def stream_response(client, fields):
    told = {"model": fields["model"], "input": fields["messages"]}
    with client.responses.stream(**told) as events:
        return events.get_final_response().output_text


def continue_text(client, fields):
    reply = client.completions.create(model=fields["model"], prompt="<s>s<u>a<a>", max_tokens=9)
    return reply.choices[0].text


WAYS = {
    "raw": ask_raw,
    "stream": stream,
    "events": stream_events,
    "response": respond,
    "events of a response": stream_response,
    "completion": continue_text,
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_client_does_what_openais_does(way, monkeypatch):
    def run(task, client):
        assert way(client, {"model": "solver", "messages": [user("a")]})
        return 1.0

    [episode] = play(run, monkeypatch, speak=lambda request: "said")[0].episodes
    assert {turn.text for turn in episode.turns} == {"said"}


@pytest.mark.parametrize("is_async", [True, False])
def test_extra_fields_of_a_call_are_part_of_it(is_async, monkeypatch):
    more = {"max_tokens": 2, "top_k": 3, "return_token_ids": True}
    fields = {"model": "solver", "messages": [user("a")], "extra_body": more}

    async def run_async(task, client):
        assert isinstance(client, openai.AsyncOpenAI)
        return float(len((await client.chat.completions.create(**fields)).choices[0].token_ids))

    def run(task, client):
        return float(len(client.chat.completions.create(**fields).choices[0].token_ids))

    played, engine = play(run_async if is_async else run, monkeypatch)
    [request] = engine.requests
    assert (request.sampling.max_new_tokens, request.sampling.top_k) == (2, 3)
    assert played.episodes[0].reward == 2


def test_a_thread_that_works_on_is_waited_for_no_longer_than_that(monkeypatch):
    async def run(task, client):
        over = threading.Event()
        working = asyncio.create_task(asyncio.to_thread(over.wait, 30))
        await asyncio.sleep(0)
        await client.chat.completions.create(model="solver", messages=[user("a")])
        over.set()
        return float(await working)

    monkeypatch.setattr(channels, "_MOST_SECONDS", 0.1)
    assert play(run, monkeypatch)[0].episodes[0].reward == 1.0


@pytest.mark.parametrize("number", [1, 3])
def test_calls_from_other_event_loops_are_answered(number, monkeypatch):
    async def run(task, client):
        def ask(i):
            create = client.chat.completions.create
            return asyncio.run(create(model="solver", messages=[user(str(i))]))

        await asyncio.gather(*(asyncio.to_thread(ask, i) for i in range(number)))
        return 1.0

    assert [len(batch) for batch in play(run, monkeypatch)[1].batches] == [number]


def test_a_call_that_a_thread_prepares_is_waited_for(monkeypatch):
    async def run(task, client):
        async def ask(i):
            if i == 3:
                await asyncio.to_thread(time.sleep, 0.2)
            await client.chat.completions.create(model="solver", messages=[user(str(i))])

        await asyncio.gather(*map(ask, range(4)))
        return 1.0

    assert [len(batch) for batch in play(run, monkeypatch)[1].batches] == [4]


def test_a_program_that_is_never_idle_is_answered(monkeypatch):
    async def run(task, client):
        beats = 0

        async def beat():
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0.01)

        beating = asyncio.create_task(beat())
        reader, writer = socket.socketpair()  # and one that has a connection open
        asyncio.get_running_loop().add_reader(reader, lambda: None)
        ask = client.chat.completions.create
        for held in (True, False):
            beats = 0
            await ask(model="solver", messages=[user("a")])
            assert (beats > 5) == held
            beating.cancel()
            await asyncio.sleep(0)
        asyncio.get_running_loop().remove_reader(reader)
        reader.close(), writer.close()
        return 1.0

    monkeypatch.setattr(channels, "_MOST_SECONDS", 0.3)
    monkeypatch.setattr(channels, "_MOST_PASSES", 10)
    assert play(run, monkeypatch)[0].episodes[0].reward == 1.0


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"model": "nobody"}, 404), ({"stop": ""}, 400), ({"messages": [user("x" * 300)]}, 400),
     ({"model": "nobody", "stream": True}, 404)],
)  # fmt: skip
def test_a_call_that_is_refused_raises_in_the_program(fields, status, monkeypatch):
    def run(task, client):
        ask = client.chat.completions.create
        with pytest.raises(openai.APIStatusError) as refused:
            ask(**{"model": "solver", "messages": [user("a")], **fields})
        assert refused.value.status_code == status
        ask(model="solver", messages=[user("a")])
        return 1.0

    assert play(run, monkeypatch)[0].episodes[0].reward == 1.0


def ask_once(task, client):
    client.chat.completions.create(model="solver", messages=[user("a")])
    return 1.0


def test_a_program_that_fails_or_hangs_loses_its_episode_alone(monkeypatch):
    over = threading.Event()

    def fails(task, client):
        if task == 1:
            raise KeyError("mine")
        return ask_once(task, client)

    def hangs(task, client):
        ask_once(task, client)
        if task == 1:
            over.wait(60)
            ask_once(task, client)
        return 1.0

    played, _ = play(fails, monkeypatch, (0, 1, 2), max_failed=0.5)
    assert [e.index for e in played.episodes] == [0, 2]
    why = played.failed[0].why
    assert "KeyError: 'mine' (" in why and "test_program.py" in why
    played, _ = play(hangs, monkeypatch, (0, 1, 2), max_failed=0.5, over=over, step_seconds=2)
    assert [e.index for e in played.episodes] == [0, 2]
    assert "no answer after 2 s" in played.failed[0].why


HERE = r"\S*test_program.py:\d+"


def hides_a_refusal(task, client):
    with contextlib.suppress(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=[user("a")])
    return 1.0


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda task, client: 1.0, "before an agent answered a call$"),
        (hides_a_refusal, "its last call was refused: model: expected one of .*nobody"),
        (lambda task, client: ask_once(task, client) and "much", "expected a number, got 'much'"),
        (lambda task, client: ask_once(task, client) and {"a": 1}, rf"got 'a' \({HERE}\)$"),
        (lambda task, client: ask_once(task, client) and math.nan, rf"got nan \({HERE}\)$"),
        (lambda task, client: ask_once(task, client) and None, rf"got None \({HERE}\)$"),
    ],
)
def test_what_a_program_does_wrong_is_said(function, named, monkeypatch):
    with pytest.raises(BadInput, match=named):
        play(function, monkeypatch)


def test_a_program_may_call_over_http_with_its_own_token(monkeypatch):
    tokens = {}

    def run(task, client):
        tokens[task] = client.api_key
        head = {"authorization": f"Bearer {client.api_key}"}
        body = {"model": "solver", "messages": [user(f"t{task}")], "return_token_ids": True}
        url = f"{client.base_url}/chat/completions"
        with httpx.Client(headers=head) as http:
            reply = http.post(url, json=body).json()
            streamed = http.post(url, json={**body, "stream": True}).text.split("\n\n")
            wrong = http.post(url, json=body, headers={"authorization": "Bearer x"})
            refused = http.post(url, json={**body, "model": "nobody"})
        assert (wrong.status_code, refused.status_code) == (401, 404)
        assert streamed[-2] == "data: [DONE]" and '"finish_reason": "stop"' in streamed[0]
        return float(len(reply["choices"][0]["token_ids"]))

    played, _ = play(run, monkeypatch, (1, 2, 3))
    assert [len(e.turns) for e in played.episodes] == [2, 2, 2]
    assert [e.reward for e in played.episodes] == [len(e.turns[0].action) for e in played.episodes]
    assert len(set(tokens.values())) == 3


ANOTHER = """
import json, os, sys, urllib.request

def post(path, body):
    head = {"content-type": "application/json"}
    head["authorization"] = "Bearer " + os.environ["OPENAI_API_KEY"]
    url = os.environ["OPENAI_BASE_URL"] + path
    call = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(call) as reply:
        return json.load(reply)

messages = [{"role": "user", "content": "a"}]
for agent in ("planner", "solver"):
    post("/chat/completions", {"model": agent, "messages": messages})
post("/reward", 9)
post("/reward", [0.5, {"planner": 1, "solver": -0.5}][int(sys.argv[1])])
"""


def test_another_process_may_be_the_program_and_send_the_reward(monkeypatch):
    def run(task, client):
        head = {"authorization": f"Bearer {client.api_key}"}
        for wrong in ([1], {}, "much", {"planner": True}):
            reply = httpx.post(f"{client.base_url}/reward", json=wrong, headers=head)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "reward")
        given = {"OPENAI_BASE_URL": client.base_url, "OPENAI_API_KEY": client.api_key}
        command = [sys.executable, "-c", ANOTHER, str(task)]
        subprocess.run(command, env=os.environ | given, check=True, timeout=60)

    first, second = play(run, monkeypatch, (0, 1))[0].episodes
    assert first.reward == 0.5 and len(first.turns) == 2
    assert dict(second.results[0].agent_rewards) == {"planner": 1.0, "solver": -0.5}


def test_one_episodes_token_does_not_speak_for_another(monkeypatch):
    found, both = {}, threading.Barrier(2)

    def run(task, client):
        found[task] = client.base_url
        both.wait(60)
        head = {"authorization": f"Bearer {client.api_key}"}
        body = {"model": "solver", "messages": [user("a")]}
        for path, sent in (("chat/completions", body), ("reward", 1)):
            reply = httpx.post(f"{found[1 - task]}/{path}", json=sent, headers=head)
            assert reply.status_code == 401
        return float(len(said(client.chat.completions.create(**body))))

    assert len(play(run, monkeypatch, (0, 1))[0].episodes) == 2


PLAY = """
import asyncio, random, httpx

async def play(task, client):
    rng = random.Random()
    a, b = task % 7, task // 7 % 7

    async def ask(name, text):
        await asyncio.sleep(rng.random() * 0.01)
        body = {"model": name, "messages": [{"role": "user", "content": text}]}
        reply = await http.post("chat/completions", json=body)
        return reply.json()["choices"][0]["message"]["content"]

    head = {"authorization": f"Bearer {client.api_key}"}
    given = dict(headers=head, base_url=client.base_url, timeout=60, verify=False)
    async with httpx.AsyncClient(**given) as http:
        parts = await asyncio.gather(*(ask("planner", f"{a}+{b}") for _ in range(3)))
        answer = await ask("solver", f"{a}+{b}=? {' '.join(parts)}")
        messages = [{"role": "user", "content": f"{a}+{b}=? {' '.join(parts)}"}]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "so"}]
        reply = await client.chat.completions.create(model="solver", messages=messages)
    text = reply.choices[0].message.content
    return float(len(text) % 3)
"""


@pytest.mark.slow
def test_a_run_with_a_program_repeats_whatever_its_delays_and_goes_on(
    tmp_path, monkeypatch, one_device
):
    (tmp_path / "sums_program.py").write_text(PLAY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    flags = """--team.workflow program --env.name sums_program:play --algo.episodes 8
        --run.loggers none --algo.name reinforce --lora.targets q --team.max_new_tokens 8"""

    def run(name, steps):
        assert code_of(train.main, "--run.dir", name, "--run.steps", steps, *flags.split()) == 0
        rows = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        clocks = ("time/", "throughput/", "device/")
        return [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in rows]

    whole = run("one", 2)
    assert run("two", 1) == whole[:1]
    assert run("two", 2) == whole
    assert whole[0]["episode/turns"] == 5 and whole[0]["episode/rewritten"] == 0
    assert whole[1]["reward/std"] > 0
    with open_models(cli.configure_run("one"), load_team(None)) as models:
        one, two = (restore_state(models, name).adapters for name in ("one", "two"))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert whole[1]["agent/planner/logprob_gap"] < bounds.logprobs(tiny.CONFIG)
