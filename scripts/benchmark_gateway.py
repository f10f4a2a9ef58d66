"""Figures of the gateway: its part of a rollout, and of serving.

python scripts/benchmark_gateway.py rollout --rounds 3
python scripts/benchmark_gateway.py serve --requests 2000 --clients 64 --rollout.slots 32
python scripts/benchmark_gateway.py rollout --model.base models/SmolLM2-135M-Instruct.Q4_1.gguf
python scripts/benchmark_gateway.py clients --port 8000 --requests 200  # of any server

Further flags are those of a run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

TASKS = 64


def question_of(task: int) -> str:
    return "+".join(str(task // 10**i % 10) for i in range(3)) + "=?"


async def ask(where: tuple[str, int, str], key: str, body: dict[str, Any], line: Any = None) -> Any:
    """Asks over HTTP, with little work of the client's own; returns the answer and the line."""
    host, port, path = where
    reader, writer = line or await asyncio.open_connection(host, port)
    sent = json.dumps(body).encode()
    head = (
        f"POST {path}/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\n"
    )
    head += f"content-type: application/json\r\ncontent-length: {len(sent)}\r\n\r\n"
    writer.write(head.encode() + sent)
    received = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(received.partition("content-length: ")[2].partition("\r\n")[0])
    answer = json.loads(await reader.readexactly(length))
    return answer, (reader, writer)


async def team_of(asked: Any, task: int) -> float:
    plan = await asked("planner", question_of(task))
    return float(len(await asked("solver", f"{question_of(task)}\nplanner: {plan}")))


async def in_process(task: int, client: Any) -> float:
    async def asked(agent: str, text: str) -> str:
        messages = [{"role": "user", "content": text}]
        reply = await client.chat.completions.create(model=agent, messages=messages)
        return reply.choices[0].message.content

    return await team_of(asked, task)


async def over_http(task: int, client: Any) -> float:
    host, _, port = client.base_url.split("/")[2].partition(":")
    where, lines = (host, int(port), "/" + client.base_url.split("/", 3)[3]), [None]

    async def asked(agent: str, text: str) -> str:
        body = {"model": agent, "messages": [{"role": "user", "content": text}]}
        reply, lines[0] = await ask(where, client.api_key, body, lines[0])
        return reply["choices"][0]["message"]["content"]

    reward = await team_of(asked, task)
    lines[0][1].close()
    return reward


async def over_openai(task: int, client: Any) -> float:
    import openai

    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as own:
        return await in_process(task, own)


_LENGTHS = ["--model.context=256", "--team.max_new_tokens=24"]  # on any base, to be compared


def rollout(rounds: int, flags: list[str]) -> None:
    """Plays the same team as its own workflow and as a program, in turn."""
    from marft_jax import cli
    from marft_jax.background import DaemonThreads
    from marft_jax.envs.base import open_source
    from marft_jax.run.models import open_models
    from marft_jax.run.playing import PlaySetup, make_player
    from marft_jax.run.samplers import open_sampler
    from marft_jax.team.team_files import load_team
    from marft_jax.types import Sample

    ways = {"own workflow": [], "client": ["in_process"], "HTTP": ["over_http"]}
    with contextlib.suppress(ImportError):
        import openai  # noqa: F401

        ways["openai"] = ["over_openai"]
    sys.modules["benchmark_gateway"] = sys.modules[__name__]
    threads, took = DaemonThreads(), {way: list[Any]() for way in ways}
    with contextlib.ExitStack() as stack:
        players = {}
        for way, names in ways.items():
            own_flags = [f"--env.name=benchmark_gateway:{name}" for name in names]
            own_flags += ["--team.workflow=program"] if names else []
            config = cli.parse([*_LENGTHS, *flags, *own_flags])
            if not players:
                models = stack.enter_context(open_models(config, load_team(None)))
                sampler = stack.enter_context(open_sampler(models))
                sampler.load(_adapters(models), "")
            team = models.team._replace(workflow="program" if names else "sequential")
            playing = PlaySetup(config, team, sampler, threads)
            source = stack.enter_context(open_source(config.env, "train"))
            players[way] = make_player(playing, source)
        for i in range(rounds + 1):
            for way, player in players.items():
                samples = [Sample(task, task) for task in range(i * TASKS, (i + 1) * TASKS)]
                began, cpu = time.perf_counter(), time.process_time()
                turns = [turn for e in player.play(samples, i).episodes for turn in e.turns]
                row = (time.perf_counter() - began) / sum(len(turn.action) for turn in turns)
                took[way] += [(row, (time.process_time() - cpu) / len(turns))] if i else []
    own = np.array(took["own workflow"])
    for way, rows in took.items():
        wall, cpu = np.median(np.array(rows) / own, axis=0)
        speed, more = np.median(1 / np.array(rows)[:, 0]), np.median((np.array(rows) - own)[:, 1])
        words = f"{wall:.2f} of its time, {cpu:.2f} of its CPU time: {more * 1000:+.1f} ms per call"
        print(f"{way:14} {speed:6.0f} tokens/s  {words}")


def _adapters(models: Any) -> Any:
    from marft_jax.run.states import restore_state

    return restore_state(models, None).adapters


def serve(requests: int, clients: int, flags: list[str]) -> None:
    """Serves a team to clients in another process, and does the same work with the engine."""
    from marft_jax import cli
    from marft_jax.extras.gateway.command import open_app
    from marft_jax.extras.gateway.http import make_server
    from marft_jax.random_keys import Stream
    from marft_jax.run.models import open_models
    from marft_jax.run.samplers import open_sampler
    from marft_jax.sampling.protocol import Request
    from marft_jax.team.team_files import load_team

    config = cli.parse([*_LENGTHS, *flags])
    stack = contextlib.ExitStack()  # closed with the process
    models = stack.enter_context(open_models(config, load_team(None)))
    sampler = stack.enter_context(open_sampler(models, at_once=sys.maxsize))
    sampler.load(_adapters(models), "")
    team = models.team
    works = []
    for i in range(requests):
        messages = [{"role": "system", "content": team.profiles[1].prompt}]
        messages += [{"role": "user", "content": question_of(i)}]
        prompt = np.asarray(team.tokenizers[1].chat(messages), np.int32)
        key = (Stream.EVALUATION, 0, i, 0, 1)
        works.append(Request(prompt, team.owners[1], team.sampling[1], key))

    def alone() -> tuple[float, list[list[int]]]:
        began, done = time.perf_counter(), {}
        tickets = [sampler.submit(work) for work in works]
        while sampler.busy:
            done |= dict(sampler.step())
        return time.perf_counter() - began, [done[t].ids.tolist() for t in tickets]

    with open_app(None, config) as app, socket.create_server(("127.0.0.1", 0)) as listener:
        server = make_server(app)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        port = listener.getsockname()[1]
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            for i in range(3):  # the first one compiles
                seconds, own = alone()
                given = (port, requests, clients, {"return_token_ids": True})
                total, latencies, answers = pool.apply(run_clients, given)
                found = [answer["choices"][0]["token_ids"] for answer in answers]
                lost = sum(a != b for a, b in zip(own, found, strict=True))
                tokens = sum(map(len, own))
                if i:
                    print(f"engine {tokens / seconds:.0f} tokens/s, served {tokens / total:.0f} "
                          f"({seconds / total:.2f}); wrong {lost} of {requests}; "
                          f"{in_words(latencies)}")  # fmt: skip
        server.should_exit = True
        thread.join()


def in_words(latencies: list[float]) -> str:
    p50, p95, p99 = np.percentile(latencies, [50, 95, 99])
    return f"seconds p50 {p50:.2f} p95 {p95:.2f} p99 {p99:.2f}"


def ask_any(port: int, requests: int, clients: int, model: str, system: str) -> None:
    """Asks a server that runs already, twice: the first time it may compile."""
    for _ in range(2):
        fields = {"model": model, "temperature": 0.0, "max_tokens": 16}
        fields |= {"system": system} if system else {}
        total, latencies, answers = run_clients(port, requests, clients, fields)
        tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
        print(f"{requests / total:.1f} calls/s, {tokens / total:.0f} tokens/s; "
              f"{in_words(latencies)}")  # fmt: skip


def run_clients(port: int, requests: int, clients: int, fields: dict[str, Any]) -> Any:
    """Asks from so many connections; seconds, those of each call, and what was answered."""
    left, latencies, answers = (
        iter(range(requests)),
        [0.0] * requests,
        [dict[str, Any]()] * requests,
    )

    async def client() -> None:
        line = None
        for i in left:
            body = {"model": "solver", "messages": [{"role": "user", "content": question_of(i)}]}
            body |= {"seed": i, "temperature": 1.0} | fields
            if system := body.pop("system", None):
                body["messages"] = [{"role": "system", "content": system}, *body["messages"]]
            began = time.perf_counter()
            answers[i], line = await ask(("127.0.0.1", port, "/v1"), "none", body, line)
            latencies[i] = time.perf_counter() - began

    async def run() -> None:
        await asyncio.gather(*(client() for _ in range(clients)))

    began = time.perf_counter()
    asyncio.run(run())
    return time.perf_counter() - began, latencies, answers


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=["rollout", "serve", "clients"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", default="solver")
    parser.add_argument("--system", default="", help="the prompt that ours gives an agent itself")
    given, flags = parser.parse_known_args()
    if given.work == "rollout":
        rollout(given.rounds, flags)
    elif given.work == "clients":
        ask_any(given.port, given.requests, given.clients, given.model, given.system)
    else:
        serve(given.requests, given.clients, flags)
