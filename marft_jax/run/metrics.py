"""Computes the metrics of a training step; the README lists their names."""

from __future__ import annotations

import contextlib
import difflib
import resource
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from marft_jax.errors import BadInput
from marft_jax.learning.batch import Batch
from marft_jax.learning.credit import agent_reward
from marft_jax.policy.packing import known_before
from marft_jax.rollout.collect import Collected
from marft_jax.rollout.tool_health import Called
from marft_jax.settings.config import Algo, Branching, Config
from marft_jax.team.prompts import Team
from marft_jax.types import AnsweredCall, Episode, Turn


def check_best_metric(name: str | None, known: Collection[str]) -> None:
    """Raises ``BadInput`` if no step will have the metric ``run.best_metric``.

    Args:
        known: metrics of a step, without those of an environment (``env/``); or, before the first
            step, metrics of evaluations.
    """
    if name is None or name in known or name.startswith("env/"):
        return
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    meant = f"did you mean {near[0]!r}? " if near else ""
    raise BadInput(
        f"--run.best_metric: expected a metric of this run, or none, got {name!r}; {meant}those "
        "of eval/ need --eval.every"
    )


def metrics_of(
    done: int,
    collected: Collected,
    batch: Batch,
    learned: Mapping[str, Any],
    seconds: Mapping[str, float],
    team: Team,
    config: Config,
) -> dict[str, float]:
    """Computes the numbers of one training step.

    Args:
        done: number of updates, with this step's.
        collected: the episodes; numbers of episodes count every episode that was played.
        learned: the arrays that the learner reports.
        seconds: seconds of each part of the step, and of the whole step as ``step_s``.
    """
    algo, episodes = config.algo, collected.played
    trunks = [episode for episode in episodes if episode.branch is None]
    returns = [episode.reward for episode in trunks]
    turns = [turn for episode in episodes for turn in episode.turns if not turn.replayed]
    prompt, action = sum(len(t.prompt) for t in turns), sum(len(t.action) for t in turns)
    read = sum(len(t.prompt) + len(t.action) for e in collected.episodes for t in e.turns)
    numbers: dict[str, Any] = {
        "reward/mean": np.mean(returns),
        "reward/std": np.std(returns),
        "episode/turns": sum(len(episode.turns) for episode in trunks) / len(trunks),
        "episode/truncated": np.mean([_is_truncated(episode) for episode in episodes]),
        "episode/capped": np.mean(["turns" in _cuts(episode) for episode in episodes]),
        "episode/failed": collected.failed,
        "tokens/prompt": prompt,
        "tokens/action": action,
        "tokens/prefix_cached": 0,
        "tokens/prefix_shared": batch.prefix_shared,
        "throughput/update_tokens_per_s": read / seconds["update_s"],
        "device/peak_bytes": peak_bytes(),
    }
    numbers |= collected.stats
    numbers |= {f"time/{part}": took_s for part, took_s in seconds.items()}
    if not algo.recorded:
        numbers["throughput/action_tokens_per_s"] = action / seconds["rollout_s"]
    if algo.part(Branching).branches:
        replayed = [t for e in episodes for t in e.turns if t.replayed]
        numbers |= _once(turns, collected, batch, team)
        numbers["episode/branches"] = len(episodes) - len(trunks)
        numbers["tokens/replayed"] = sum(len(t.prompt) + len(t.action) for t in replayed)
    if algo.part(Algo).dynamic_sampling:
        numbers["episode/dropped_groups"] = collected.dropped_groups
    if config.rollout.lag:
        numbers["rollout/version"] = collected.updates
        numbers["rollout/lag"] = done - 1 - collected.updates
    if config.team.workflow == "program":
        numbers["episode/rewritten"] = np.mean([_rewritten(episode) for episode in episodes])
    if config.env.curriculum is not None:
        numbers["curriculum/level"] = collected.level
    for agent, name in enumerate(team.names):
        means = _of_agent(collected, agent, algo.part(Algo).credit)
        numbers |= {f"agent/{name}/{what}": value for what, value in means.items()}
    numbers |= _of_tools(collected.calls, team)
    numbers |= _of_environment(trunks)
    numbers |= _of_learner(learned, team, algo.recorded)
    return {key: float(value) for key, value in numbers.items()}


def _once(
    sampled: Sequence[Turn], collected: Collected, batch: Batch, team: Team
) -> dict[str, float]:
    """Computes the shares of tokens that engine and update had to compute: each sampled token, and
    each token of a common prefix once."""
    owners = list(zip(team.bases, team.owners, strict=True))
    whole = [(owners[t.agent], np.concatenate([t.prompt, t.action])) for t in sampled]
    prompts, action = [len(t.prompt) for t in sampled], sum(len(t.action) for t in sampled)
    needed = np.maximum(np.asarray(prompts) - known_before(whole), 0).sum() + action
    learned = [turn for episode in collected.episodes for turn in episode.turns]
    read = [(owners[t.agent], np.concatenate([t.prompt, t.action[:-1]])) for t in learned]
    computed = sum(part.rows.read for part in batch.parts.values())
    new = sum(len(ids) for _, ids in read) - known_before(read).sum()
    copied = collected.stats.get("tokens/prefix_cached", 0)
    return {
        "tokens/once_engine": needed / (sum(prompts) + action - copied),
        "tokens/once_update": new / computed,
    }


def _of_agent(collected: Collected, agent: int, credit: str) -> dict[str, float]:
    """Computes an agent's means over its turns and episodes; 0 for an agent that did not act."""
    both = zip(collected.played, collected.played_rewards, strict=True)
    played = [(episode, paid) for episode, paid in both if episode.branch is None]
    turns = [turn for episode, _ in played for turn in episode.turns if turn.agent == agent]
    rewards = [agent_reward(episode, paid, agent, credit) for episode, paid in played]
    lengths = [len(turn.action) for turn in turns]
    known = [(len(t.action), t.filtered_mass) for t in turns if t.filtered_mass is not None]
    tokens = sum(n for n, _ in known)
    return {
        "reward": np.mean([r for r in rewards if r is not None] or [0.0]).item(),
        "tokens": np.mean(lengths or [0.0]).item(),
        "truncated": np.mean([turn.truncated for turn in turns] or [0.0]).item(),
        "turns": len(turns) / len(played),
    } | ({"kept": sum(n * mass for n, mass in known) / tokens} if tokens else {})


def _of_tools(calls: Sequence[Called], team: Team) -> dict[str, float]:
    """Computes the numbers of each tool, and of each agent that has tools. Calls of an unknown tool
    count for the agent alone."""
    stats: dict[str, float] = {}
    for name in dict.fromkeys(tool.name for box in team.tools for tool in box.tools):
        pairs = [(agent, call) for agent, call in calls if call.name == name]
        lengths = [len(team.tokenizers[agent].encode(call.answer)) for agent, call in pairs]
        stats |= {f"tool/{name}/{key}": n for key, n in _of_calls([c for _, c in pairs]).items()}
        stats[f"tool/{name}/seconds"] = sum(call.seconds for _, call in pairs) / max(1, len(pairs))
        stats[f"tool/{name}/tokens"] = sum(lengths) / max(1, len(pairs))
    for agent, box in enumerate(team.tools):
        if box.sources:
            counts = _of_calls([call for who, call in calls if who == agent])
            stats |= {f"agent/{team.names[agent]}/tool_{key}": n for key, n in counts.items()}
    return stats


def _of_calls(calls: Sequence[AnsweredCall]) -> dict[str, float]:
    """Counts calls, and computes the shares of them that were wrong or failed."""
    shares = {
        verdict: sum(call.verdict == verdict for call in calls) / max(1, len(calls))
        for verdict in ("wrong", "failed")
    }
    return {"calls": len(calls), **shares}


def _of_environment(episodes: Sequence[Episode]) -> dict[str, float]:
    """Computes the means of the numbers that an environment puts into ``info["metrics"]``."""
    by_name: dict[str, list[float]] = {}
    for info in (result.info for episode in episodes for result in episode.results):
        reported = info.get("metrics")
        for name, value in reported.items() if isinstance(reported, Mapping) else ():
            if isinstance(value, int | float):
                by_name.setdefault(f"env/{name}", []).append(value)
    return {name: float(np.mean(values)) for name, values in by_name.items()}


def _of_learner(learned: Mapping[str, Any], team: Team, recorded: bool) -> dict[str, float]:
    """Names the learner's arrays by agent, ``agent/<name>/...``; its scalars keep their names.

    The behaviour log-prob of recorded actions is 0, so their ``logprob_gap`` is the cross-entropy
    per token: the loss. Agents on a base on which nobody learns have no such numbers.
    """
    named = {}
    learning = [i for i, base in enumerate(team.bases) if base in team.learning_bases]
    for key, value in jax.device_get(dict(learned)).items():
        if key == "nonfinite" or recorded and key == "approx_kl":
            continue
        if np.ndim(value) == 0:
            named[key] = value
        else:
            key = "loss" if recorded and key == "logprob_gap" else key
            named |= {f"agent/{team.names[i]}/{key}": value[i] for i in learning}
    return named


def _cuts(episode: Episode) -> list[Any]:
    """Returns the reasons why steps of the episode were cut short."""
    return [r.info["truncated"] for r in episode.results if "truncated" in r.info]


def _rewritten(episode: Episode) -> float:
    """Counts the calls in which a program changed an agent's text."""
    return sum(r.info.get("rewritten", 0) for r in episode.results)


def _is_truncated(episode: Episode) -> bool:
    """True if an action reached its token limit, or a prompt left no room."""
    return bool(_cuts(episode)) or any(turn.truncated for turn in episode.turns)


def peak_bytes() -> int:
    """Returns the peak memory in bytes: of the first device, or else of this process."""
    stats: dict[str, Any] = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Clock:
    """Measures the wall seconds of the parts of a step.

    >>> clock = Clock()
    >>> with clock("rollout_s"):
    ...     pass
    >>> sorted(clock.seconds)
    ['rollout_s']
    """

    def __init__(self, **seconds: float) -> None:
        self._started = time.perf_counter()
        self.seconds = dict(seconds)

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - started

    @property
    def total_s(self) -> float:
        """Seconds since the clock was created."""
        return time.perf_counter() - self._started


class Compilations:
    """Counts programs that JAX compiles or loads from the cache on disk.

    After the first steps there should be none, as shapes come from short ladders.
    """

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def __enter__(self) -> Self:
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._note)

    def _note(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self._seconds.append(duration_secs)

    def metrics(self) -> dict[str, float]:
        """Returns the number of programs and their seconds since the last call."""
        seconds, self._seconds = self._seconds, []
        return {"device/compiled": float(len(seconds)), "time/compile_s": sum(seconds)}
