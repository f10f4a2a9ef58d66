"""Plays an environment with made-up turns and lists what is wrong with it, before a run does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from marft_jax.background import DaemonThreads
from marft_jax.envs.base import from_class
from marft_jax.envs.threads import Calls
from marft_jax.errors import BadInput
from marft_jax.plugins import result_of, shown, text_of
from marft_jax.types import Turn

AGENTS = ("planner", "solver")
_TEXTS = ("", "42", "The answer is \\boxed{7}.", "no idea", "yes", "x" * 2000, "答案是 3 🙂\n")

_Events = list[tuple[str, Any]]
"""What happened in an episode: pairs of a kind and a value."""


def check(
    create: Callable[..., Any],
    episodes: int = 20,
    steps: int = 128,
    seconds: float = 120.0,
    agents: Sequence[str] = AGENTS,
) -> tuple[list[str], list[str]]:
    """Plays episodes with made-up turns.

    Args:
        create: the environment's class, or another function without arguments that makes one.
        episodes: number of seeds to play, each of them twice.
        steps: most steps of an episode.
        seconds: time limit for all episodes; an episode has at least half of it.
        agents: names of the agents that act; the last one is graded.

    Returns:
        Errors (with these a run would fail or learn nonsense) and remarks, one line each.
    """
    end, problems, played = time.monotonic() + seconds, list[str](), list[_Events]()
    create = from_class(create, "train").create

    def play(seed: int, restores: bool) -> _Events:
        patience = max(end - time.monotonic(), seconds / 2)  # for one that begins late
        calls = Calls(DaemonThreads(), None)
        call = calls.start("the environment", _play, create, seed, steps, agents, restores)
        calls.wait(patience)
        call.give_up(f"no answer after {patience:.1f} s (see --seconds)")
        if call.failure is not None:
            raise BadInput(f"seed {seed}: {call.failure.text}")
        return call.value

    try:
        for seed in range(episodes):
            if time.monotonic() >= end:
                break
            first, again = play(seed, False), play(seed, True)
            pairs = zip(first, again, strict=False)
            if other := next((now[0] for now, then in pairs if now != then), ""):
                problems.append(
                    f"seed {seed}: the same seed and turns gave another {other} (a snapshot, where "
                    "there is one, is restored after each step)"
                )
            played.append(first)
    except BadInput as wrong:
        problems.append(str(wrong))
    if not played and not problems:
        problems.append("not one episode was over when the time was up")
    elif played and not any(("end", True) in events for events in played):
        problems.append(f"no episode was done after {steps} steps: a run cuts them off, as endless")
    return problems, _remarks(played, episodes, steps)


def _play(
    create: Callable[[], Any], seed: int, steps: int, agents: Sequence[str], restores: bool
) -> _Events:
    """Plays an episode.

    ``restores``: after each step, replaces an environment that offers snapshots by a fresh one that
    is restored from the last snapshot."""
    env = create()
    state = env.reset(seed)
    if not isinstance(state, str) or not state.strip():
        raise BadInput(f"reset({seed}): expected a text that is not empty, got {shown(state)}")
    is_game = getattr(env, "players", None) is not None
    players = env.players(agents) if is_game else {}
    events: _Events = [("task", state)]
    for step in range(steps):
        acting = env.acting() if is_game else agents
        turns = _turns(step, seed, acting)
        events.append(("acting", acting))
        if getattr(env, "view", None) is not None:
            events += [("view", text_of("view", env.view(name, state))) for name in acting]
        if getattr(env, "tool", None) is not None:
            answers = (env.tool(turn) for turn in turns)
            events += [("tool", text_of("tool", text)) for text in answers if text is not None]
        result = result_of(env.step(turns), [*agents, *players.values()])
        events += [("reward", result.reward), ("end", result.done)]
        state = result.observation
        if result.done:
            break
        if not is_game and not state.strip():
            raise BadInput("observation: expected a text while the episode goes on, got none")
        if restores and hasattr(env, "snapshot"):
            value = json.loads(json.dumps(env.snapshot()))
            env = create()
            env.reset(seed)
            env.restore(value)
    return events


def _turns(step: int, seed: int, agents: Sequence[str]) -> list[Turn]:
    """Makes up a turn for each agent; the last turn is graded."""
    nothing, turns = np.zeros(0, np.int32), []
    for index, name in enumerate(agents):
        text = _TEXTS[(seed + (index + 1) * step + index) % len(_TEXTS)]
        turns.append(Turn(index, name, step, nothing, nothing, nothing, text,
                          index == len(agents) - 1, (), False, 1.0, index))  # fmt: skip
    return turns


def _remarks(played: Sequence[_Events], episodes: int, steps: int) -> list[str]:
    rewards = [value for events in played for kind, value in events if kind == "reward"]
    if not rewards:
        return []
    tasks = {events[0] for events in played}
    unfinished = sum(("end", True) not in events for events in played)
    warnings = {
        f"only {len(played)} of {episodes} episodes were played": len(played) < episodes,
        "every seed gave the same task": len(tasks) == 1 < len(played),
        "every answer got the same positive reward: nothing to learn": len(set(rewards)) == 1
        and rewards[0] > 0,
        f"{unfinished} episodes were not done after {steps} steps": unfinished > 0,
    }
    return [
        f"{len(played)} episodes, {len(tasks)} distinct tasks",
        f"rewards from {min(rewards):g} to {max(rewards):g} for made-up answers",
        *(f"warning: {warning}" for warning, is_so in warnings.items() if is_so),
    ]
