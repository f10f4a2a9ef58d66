"""Environments of the package ``verifiers``, each episode played as an agent program.

``--env.name verifiers --env.taskset ID --team.workflow program``. An episode is one
``Env.run_episode`` of verifiers. Its seats call the address of the episode, where the team's agents
answer; the rewards on its traces are those of the agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import queue
import re
import secrets
import threading
from concurrent.futures import Future, InvalidStateError, wait
from typing import Any

from marft_jax.background import Background
from marft_jax.envs.base import EnvSource, Split, held_out
from marft_jax.errors import BadInput, described, reason
from marft_jax.plugins import load_extra
from marft_jax.settings.config import EnvSettings
from marft_jax.settings.setting import Count, Fraction
from marft_jax.types import StepResult

_SEAT = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
"""A seat by default: a chat, in a process of this machine. The package's own default runtime needs
an account, and most harnesses run what a model writes."""
_START_SECONDS, _CLOSE_SECONDS = 600.0, 60.0


@dataclasses.dataclass(frozen=True)
class Settings(EnvSettings):
    """Settings of an environment of verifiers."""

    name: str = "verifiers"
    taskset: str = ""
    """Id of the taskset: the name of an installed package, or of a module in this folder."""
    args: str = "{}"
    """Configuration of the environment as JSON, such as {"id": "user-sim", "agent": {"max_turns":
    4}}. A seat without a runtime gets a process of this machine; without a harness, a plain
    chat."""
    tasks: Count | None = None
    """First tasks of the taskset that are used; none: all. Needed for an endless taskset."""
    holdout: Fraction = 0.1
    """Share of the tasks that only evaluations use."""


def source(env: Settings, split: Split) -> EnvSource:
    """Makes episodes of the environment; a share ``env.holdout`` of the tasks is for evaluation.

    Raises:
        BadInput: the package is missing, there is no such taskset, or it refuses ``env.args``.
    """
    if importlib.util.find_spec("verifiers") is None:
        raise BadInput('--env.name verifiers: needs that package: pip install -e ".[verifiers]"')
    try:
        version = importlib.metadata.version("verifiers")
        if [*map(int, re.findall(r"\d+", version)[:2])] < [0, 4]:
            raise ImportError(f"it is {version}")
        for name in ("utils.loaders", "clients", "configs.agent"):
            _module(name)
    except Exception as error:  # its own packages may be of other versions than it wants
        what = 'verifiers 0.4 or newer: pip install -U -e ".[verifiers]", without [programs]'
        raise BadInput(f"--env.name verifiers: expected {what} ({described(error)})") from error
    played = _Played(env, split)
    inner: EnvSource = load_extra("program.source")(played.play, "train", len(played.seats) > 1)

    def close() -> None:
        inner.close()
        played.close()

    return inner._replace(close=close, size=len(played.tasks) if split == "eval" else None)


class _Played:
    """The environment, whose servers run in the event loop of a thread.

    Attributes:
        tasks: those of the split.
        seats: their names.
    """

    def __init__(self, env: Settings, split: Split) -> None:
        loaders = _module("utils.loaders")
        try:
            config, self.seats = _config(env)
            self._env: Any = loaders.load_environment(config)
            taskset = self._env.taskset
            if env.tasks is None and not taskset.bounded:
                raise BadInput("--env.tasks: expected a number, as this taskset has no end")
            tasks = list(itertools.islice(iter(taskset), env.tasks))
        except BadInput:
            raise
        except Exception as error:  # a taskset is a program
            raise BadInput(f"--env.taskset {env.taskset or 'none'}: {reason(error)}") from error
        is_eval = split == "eval"
        self.tasks = [task for task in tasks if held_out(task.key, env.holdout) == is_eval]
        if not self.tasks:
            raise BadInput(
                f"--env.holdout {env.holdout}: expected tasks of both kinds, got {len(tasks)} in "
                f"all and none for {split}; change it, or --env.tasks"
            )
        self._names: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._lock, self._background = threading.Lock(), Background("verifiers")
        self._over = asyncio.Event()
        self._served: Future[None] | None = None
        self._ready: Future[None] = Future()

    def play(self, task: int, client: Any) -> StepResult:
        """Plays an episode, and pays each agent what stands on its traces."""
        clients = _module("clients")
        self._start()
        try:  # verifiers keeps a connection pool for each address, so addresses are used again
            name = self._names.get_nowait()
        except queue.Empty:
            name = secrets.token_hex(8), secrets.token_urlsafe()
        client.enter(*name)
        headers = {"X-Api-Key": client.api_key}
        at = clients.EvalClientConfig(
            base_url=client.base_url, api_key_var="MARFT_NONE", headers=headers
        )
        context = clients.ModelContext(model="agent", client=at)
        chosen = self.tasks[task % len(self.tasks)]
        episode = self._background.run(self._env.run_episode(chosen, context))
        self._names.put(name)  # not after an exception, when its callers may be left
        if not episode.ok:
            errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
            raise RuntimeError(f"verifiers: {errors[-1].message if errors else 'a trace failed'}")
        return _paid(episode, len(self.seats))

    def close(self) -> None:
        """Ends the servers."""
        if self._served is not None:
            self._background.loop.call_soon_threadsafe(self._over.set)
            wait([self._served], _CLOSE_SECONDS)
        self._background.close()

    def _start(self) -> None:
        with self._lock:
            if self._served is None:
                self._served = self._background.start(self._serve())
        try:
            self._ready.result(_START_SECONDS)
        except Exception as error:
            why = f"verifiers: its servers did not start: {reason(error)}"
            raise RuntimeError(why) from error

    async def _serve(self) -> None:
        try:
            async with self._env.serving():
                self._ready.set_result(None)
                await self._over.wait()
        except Exception as error:
            with contextlib.suppress(InvalidStateError):  # they had started
                self._ready.set_exception(error)


def _module(name: str) -> Any:
    """Imports a module of the package."""
    return importlib.import_module(f"verifiers.v1.{name}")


def _config(env: Settings) -> tuple[Any, list[str]]:
    """The configuration of the environment, with our defaults of its seats, and their names."""
    loaders, seat_type = _module("utils.loaders"), _module("configs.agent").AgentConfig
    args: Any = None
    with contextlib.suppress(json.JSONDecodeError):
        args = json.loads(env.args)
    if not isinstance(args, dict):
        raise BadInput(f"--env.args: expected a JSON object, got {env.args:.60}")
    kind = loaders.env_config_type(env.taskset, args.get("id", ""))
    seats = [n for n, f in kind.model_fields.items() if isinstance(f.default, seat_type)]
    taskset = {"id": env.taskset, **args.get("taskset", {})}
    seated = {seat: {**_SEAT, "model": seat, **args.get(seat, {})} for seat in seats}
    return loaders.resolve_env_config({**args, **seated, "taskset": taskset}), seats


def _paid(episode: Any, seats: int) -> StepResult:
    """The rewards of an episode: those of each agent; of an only seat, the mean over its traces."""
    paid, parts = dict[str, float](), dict[str, Any]()
    for trace in episode.traces:
        rewards = {name: r.value for name, r in trace.rewards.items() if r is not None}
        parts.setdefault(trace.agent.name, []).append(rewards | trace.metrics)
        if trace.agent.trainable:
            paid[trace.agent.name] = paid.get(trace.agent.name, 0.0) + sum(rewards.values())
    info = {"verifiers": parts}
    if seats == 1:
        return StepResult("", sum(paid.values()) / len(episode.traces), True, info)
    return StepResult("", 0.0, True, info, paid)
