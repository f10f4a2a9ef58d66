"""From a training step to its metrics and transcripts; the names are those of the README."""

from __future__ import annotations

import contextlib
import logging
import resource
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from marft_jax.config import Algo, Config
from marft_jax.learning.batch import Batch, Level
from marft_jax.learning.credit import agent_reward
from marft_jax.learning.estimates import Estimates
from marft_jax.rollout.collect import Collected
from marft_jax.run.transcripts import TurnNumbers
from marft_jax.team.prompts import Team
from marft_jax.types import Episode

LOGGER = logging.getLogger("marft_jax")


class Compilations:
    """Counts the programs that are compiled or fetched from the cache on disk, by JAX's own events.

    After the first steps there should be none: shapes come from short ladders.
    """

    def __init__(self) -> None:
        self._count, self._seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self._count, self._seconds = self._count + 1, self._seconds + duration_secs

    def metrics(self) -> dict[str, float]:
        """Since the last call: how many, and the seconds they took."""
        numbers = {"device/compiled": float(self._count), "time/compile_s": self._seconds}
        self._count, self._seconds = 0, 0.0
        return numbers


class Clock:
    """Wall seconds of the parts of a step.

    >>> clock = Clock()
    >>> with clock("rollout_s"):
    ...     pass
    >>> sorted(clock.metrics())
    ['time/rollout_s', 'time/step_s']
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        """``time/<part>`` for each part, and ``time/step_s`` since the clock was made."""
        parts = {f"time/{part}": seconds for part, seconds in self.seconds.items()}
        return parts | {"time/step_s": time.perf_counter() - self._started}


def metrics_of(
    collected: Collected,
    learned: Mapping[str, jax.Array],
    team: Team,
    clock: Clock,
    algo: Algo,
) -> dict[str, float]:
    """All numbers of one training step; those of episodes count every one that was played."""
    episodes = collected.played
    returns = np.array([episode.reward for episode in episodes])
    turns = [turn for episode in episodes for turn in episode.turns]
    prompt, action = sum(len(t.prompt) for t in turns), sum(len(t.action) for t in turns)
    read = sum(len(t.prompt) + len(t.action) for e in collected.episodes for t in e.turns)
    numbers = {
        "reward/mean": returns.mean(),
        "reward/std": returns.std(),
        "episode/turns": len(turns) / len(episodes),
        "episode/truncated": np.mean([_truncated(episode) for episode in episodes]),
        "episode/capped": np.mean([_capped(episode) for episode in episodes]),
        "tokens/prompt": prompt,
        "tokens/action": action,
        "throughput/update_tokens_per_s": read / clock.seconds["update_s"],
        "device/peak_bytes": peak_bytes(),
    }
    numbers["episode/failed"] = collected.failed
    if "rollout_s" in clock.seconds:
        numbers["throughput/action_tokens_per_s"] = action / clock.seconds["rollout_s"]
    if algo.dynamic_sampling:
        numbers["episode/dropped_groups"] = collected.dropped_groups
    for agent, name in enumerate(team.names):
        own = [turn for turn in turns if turn.agent == agent]
        numbers[f"agent/{name}/turns"] = len(own) / len(collected.played)
        numbers[f"agent/{name}/tokens"] = np.mean([len(t.action) for t in own]) if own else 0.0
        numbers[f"agent/{name}/truncated"] = np.mean([t.truncated for t in own]) if own else 0.0
        paid = [
            agent_reward(e, r, agent, algo.credit)
            for e, r in zip(episodes, collected.played_rewards, strict=True)
        ]
        paid = [reward for reward in paid if reward is not None]
        numbers[f"agent/{name}/reward"] = np.mean(paid) if paid else 0.0
    numbers |= _named(learned, team) | clock.metrics()
    return {key: float(value) for key, value in numbers.items()}


class Evaluation(Protocol):
    """An evaluation that is to be played; it knows the metrics that it will report."""

    @property
    def metric_names(self) -> Collection[str]: ...


def metric_names(
    config: Config, agents: Sequence[str], evaluations: Iterable[Evaluation]
) -> set[str]:
    """The names of all metrics that a run with these (settled) settings reports."""
    algo, critic = config.algo, config.critic.mode != "none"
    own = "reward turns tokens truncated entropy approx_kl clip_fraction logprob_gap grad_norm"
    if algo.name == "imitation":
        own = "reward turns tokens truncated entropy loss grad_norm"
    own += " ref_kl" * (algo.kl_coef > 0) + " correction_weight" * (algo.correction != "none")
    names = {f"agent/{agent}/{what}" for agent in agents for what in own.split()}
    names |= set(_ALWAYS.split()) | set(_WITH_CRITIC.split() if critic else ())
    names |= {"episode/dropped_groups"} if algo.dynamic_sampling else set()
    names |= {"curriculum/level"} if config.env.curriculum is not None else set()
    names -= set(_OF_SAMPLING.split()) if algo.name == "imitation" else set()
    return names.union(*(evaluation.metric_names for evaluation in evaluations))


_ALWAYS = """
reward/mean reward/std episode/turns episode/truncated episode/capped episode/failed tokens/prompt
tokens/action tokens/reused tokens/joined
throughput/action_tokens_per_s throughput/update_tokens_per_s
time/rollout_s time/reward_s time/update_s time/checkpoint_s time/step_s time/compile_s
device/peak_bytes device/compiled guard/skipped guard/findings guard/rollbacks guard/lr_scale
"""
_OF_SAMPLING = "throughput/action_tokens_per_s time/rollout_s time/reward_s"
_WITH_CRITIC = "critic/loss critic/explained_variance critic/grad_norm"


class CutOff:
    """Warns when most of what an agent writes is cut at its limit, or most conversations find no
    room: once, and again only after it was over."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._said: set[str] = set()

    def look(self, step: int, episodes: Sequence[Episode], metrics: Mapping[str, float]) -> None:
        """Says so in the log, from the numbers of a step."""
        for name, sampling in zip(self._team.names, self._team.sampling, strict=True):
            self._note(
                f"step {step}: %.0f %% of {name}'s actions were cut at their limit of "
                f"{sampling.max_new_tokens} tokens, or where the context was full; raise "
                "max_new_tokens or --model.context",
                metrics[f"agent/{name}/truncated"],
                name,
            )
        full = ["truncated" in result.info for e in episodes for result in e.results[-1:]]
        self._note(
            f"step {step}: %.0f %% of the episodes ended because their conversation filled the "
            f"context of {self._team.context} tokens; raise --model.context",
            sum(full) / max(len(full), 1),
            "",
        )

    def _note(self, text: str, share: float, who: str) -> None:
        if share > 0.5 and who not in self._said:
            LOGGER.warning(text, 100 * share)
        self._said = self._said | {who} if share > 0.5 else self._said - {who}


def _named(learned: Mapping[str, jax.Array], team: Team) -> dict[str, float]:
    """The learner's arrays by agent as ``agent/<name>/...``; its scalars as they are."""
    named = {}
    for key, value in jax.device_get(dict(learned)).items():
        if key == "grad_norm":  # one per adapter: agents that share one report the same
            value = value[np.asarray(team.owners)]
        if np.ndim(value) == 0:
            named[key] = value
        else:
            named |= {f"agent/{n}/{key}": value[i] for i, n in enumerate(team.names)}
    return named


def turn_numbers(
    collected: Collected, batch: Batch, estimates: Estimates, level: Level
) -> TurnNumbers:
    """The learner's numbers of each turn: its value (at a token level the first token's; None
    without a critic), and its advantage (the mean over its tokens)."""
    values, advantages = [], []
    for e, episode in enumerate(collected.episodes):
        lengths = [len(turn.action) if level == "token" else 1 for turn in episode.turns]
        starts = np.cumsum([0, *lengths[:-1]])
        own_J = estimates.advantages_EJ[e, : sum(lengths)]
        advantages.append((np.add.reduceat(own_J, starts) / lengths).tolist())
        if estimates.values_EJ is None:
            values.append([None] * len(lengths))
        else:
            values.append(estimates.values_EJ[e, starts].tolist())
    return TurnNumbers([r.tolist() for r in collected.rewards], values, advantages)


def peak_bytes() -> int:
    """The most memory used so far: of the first device, or of this process where there is none."""
    stats: dict[str, Any] = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _truncated(episode: Episode) -> bool:
    """True when an action hit its token limit, or a prompt left no room."""
    return any(turn.truncated for turn in episode.turns) or any(
        "truncated" in result.info for result in episode.results
    )


def _capped(episode: Episode) -> bool:
    """True when it was ended at the most turns that an episode may have."""
    return any(result.info.get("truncated") == "turns" for result in episode.results)
