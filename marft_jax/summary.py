"""From a training step to its metrics and transcripts; the names are those of the README."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from marft_jax.batch import Batch
from marft_jax.learner import Prepared
from marft_jax.team.context import Team
from marft_jax.transcripts import TurnNumbers
from marft_jax.types import Episode


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
    episodes: Sequence[Episode],
    rewards: Sequence[np.ndarray],
    learned: Mapping[str, jax.Array],
    team: Team,
    clock: Clock,
) -> dict[str, float]:
    """All numbers of one training step."""
    returns = np.array([episode.reward for episode in episodes])
    turns = [turn for episode in episodes for turn in episode.turns]
    prompt, action = sum(len(t.prompt) for t in turns), sum(len(t.action) for t in turns)
    numbers = {
        "reward/mean": returns.mean(),
        "reward/std": returns.std(),
        "episode/turns": len(turns) / len(episodes),
        "episode/truncated": np.mean([_truncated(episode) for episode in episodes]),
        "tokens/prompt": prompt,
        "tokens/action": action,
        "throughput/action_tokens_per_s": action / clock.seconds["rollout_s"],
        "throughput/update_tokens_per_s": (prompt + action) / clock.seconds["update_s"],
        "device/peak_bytes": peak_bytes(),
    }
    for agent, name in enumerate(team.names):
        own = [turn for turn in turns if turn.agent == agent]
        numbers[f"agent/{name}/tokens"] = np.mean([len(t.action) for t in own]) if own else 0.0
        numbers[f"agent/{name}/reward"] = np.mean(
            [_agent_reward(e, r, agent) for e, r in zip(episodes, rewards, strict=True)]
        )
    numbers |= _named(learned, team) | clock.metrics()
    return {key: float(value) for key, value in numbers.items()}


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
    episodes: Sequence[Episode], rewards: Sequence[np.ndarray], batch: Batch, prepared: Prepared
) -> TurnNumbers:
    """What the learner made of each turn: its value (at a token level the first token's), and its
    advantage (the mean over its tokens)."""
    values_UBX, advantages_UBX = jax.device_get((prepared.values_UBX, prepared.advantages_UBX))
    values, advantages = [], []
    for e, episode in enumerate(episodes):
        links = int(batch.chain.mask_EJ[e].sum())
        units = batch.chain.unit_EJ[e, :links]
        lengths = [len(turn.action) for turn in episode.turns]
        level = "token" if links == sum(lengths) else "action"
        starts = np.cumsum([0, *lengths[:-1]]) if level == "token" else np.arange(links)
        own_values, own_advantages = (
            values_UBX.reshape(-1)[units],
            advantages_UBX.reshape(-1)[units],
        )
        counts = np.diff(starts, append=links)
        values.append(own_values[starts].tolist())
        advantages.append((np.add.reduceat(own_advantages, starts) / counts).tolist())
    return TurnNumbers([r.tolist() for r in rewards], values, advantages)


def peak_bytes() -> int:
    """The most memory used so far: of the first device, or of this process where there is none."""
    stats: dict[str, Any] = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _truncated(episode: Episode) -> bool:
    """Whether an action hit its token limit, or a prompt left no room."""
    return any(turn.truncated for turn in episode.turns) or any(
        "truncated" in result.info for result in episode.results
    )


def _agent_reward(episode: Episode, rewards_K: np.ndarray, agent: int) -> float:
    return sum(float(rewards_K[k]) for k, t in enumerate(episode.turns) if t.agent == agent)
