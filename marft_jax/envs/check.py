"""Plays an environment with made-up turns and lists what is wrong with it, before a run does.

The command is ``python -m marft_jax.check``.
"""

from __future__ import annotations

import json
import runpy
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from marft_jax.envs.base import from_class
from marft_jax.envs.threads import Calls, DaemonThreads
from marft_jax.errors import BadInput
from marft_jax.plugins import failure_of, result_of, shown, text_of
from marft_jax.types import StepResult, Turn

AGENTS = ("planner", "solver")
_TEXTS = ("", "42", "The answer is \\boxed{7}.", "no idea", "yes", "x" * 2000, "答案是 3 🙂\n")


class _Played(NamedTuple):
    """An episode: what happened, as pairs of a kind and a value; and whether the environment was
    restored from its own snapshot after each step."""

    events: list[tuple[str, Any]]
    restored: bool

    def of(self, kind: str) -> list[Any]:
        return [value for name, value in self.events if name == kind]


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
    end, problems, played = time.monotonic() + seconds, list[str](), list[_Played]()
    create = from_class(create, "train").create

    def play(seed: int, restores: bool) -> _Played:
        patience = max(end - time.monotonic(), seconds / 2)  # for one that begins late
        calls = Calls(DaemonThreads(), None)
        call = calls.start(f"seed {seed}", _play, create, seed, steps, agents, restores)
        calls.wait(patience)
        call.give_up(f"no answer after {patience:.1f} s (see --seconds)")
        if call.failure is not None:
            raise BadInput(call.failure.text)
        return call.value

    try:
        for seed in range(episodes):
            if time.monotonic() >= end:
                break
            first, again = play(seed, False), play(seed, True)
            pairs = zip(first.events, again.events, strict=False)
            if other := next((now[0] for now, then in pairs if now != then), ""):
                same = "seed, turns and snapshots" if again.restored else "seed and turns"
                problems.append(f"seed {seed}: the same {same} gave another {other}")
            played.append(first)
    except BadInput as wrong:
        problems.append(str(wrong))
    if not played and not problems:
        problems.append("not one episode was over when the time was up")
    elif played and not any(any(episode.of("end")) for episode in played):
        problems.append(f"no episode was done after {steps} steps: a run cuts them off, as endless")
    return list(dict.fromkeys(problems)), _remarks(played, episodes, steps)


def _call(where: str, method: Callable[..., Any], *args: Any) -> Any:
    """Calls a user's method; whatever it raises becomes a ``BadInput`` that names the call."""
    try:
        return method(*args)
    except BaseException as error:  # sys.exit too
        text = failure_of(error).text
        raise BadInput(text if where in text else f"{where}: {text}") from None


def _play(
    create: Callable[[], Any], seed: int, steps: int, agents: Sequence[str], restores: bool
) -> _Played:
    """Plays an episode.

    ``restores``: after each step, replaces an environment that offers snapshots by a fresh one that
    is restored from the last snapshot."""
    env, players = _call("creating it", create), dict[str, str]()
    state = _call(f"reset({seed})", _task, env, seed)
    if getattr(env, "players", None) is not None:
        players = _call("players", env.players, agents)
    events: list[tuple[str, Any]] = [("task", state)]
    step, is_done = 0, False
    restores = restores and hasattr(env, "snapshot")
    while not is_done and step < steps:
        where, acting = f"seed {seed}, step {step}", agents
        if players:
            acting = _call(f"{where}, acting", env.acting)
            events.append(("acting", acting))
        turns = _turns(step, seed, acting)
        if getattr(env, "view", None) is not None:
            views = (_call(f"{where}, view", _view, env, name, state) for name in acting)
            events += [("view", view) for view in views]
        if getattr(env, "tool", None) is not None:
            answers = (_call(f"{where}, tool", _tool_answer, env, turn) for turn in turns)
            events += [("tool", answer) for answer in answers]
        result = _call(where, _result, env, turns, [*agents, *players.values()])
        events += [("reward", result.reward), ("end", result.done)]
        state, is_done, step = result.observation, result.done, step + 1
        if restores:
            value = json.loads(json.dumps(_call(f"{where}, snapshot", env.snapshot)))
            env = _call("creating it", create)
            _call(f"reset({seed})", _task, env, seed)
            _call(f"{where}, restore", env.restore, value)
    return _Played(events, restores)


def _turns(step: int, seed: int, agents: Sequence[str]) -> list[Turn]:
    """Makes up a turn for each agent; the last turn is graded."""
    nothing, turns = np.zeros(0, np.int32), []
    for index, name in enumerate(agents):
        text = _TEXTS[(seed + (index + 1) * step + index) % len(_TEXTS)]
        turns.append(Turn(index, name, step, nothing, nothing, nothing, text,
                          index == len(agents) - 1, (), False, 1.0, index))  # fmt: skip
    return turns


def _task(env: Any, seed: int) -> str:
    task = env.reset(seed)
    if not isinstance(task, str) or not task.strip():
        raise BadInput(f"expected a text that is not empty, got {shown(task)}")
    return text_of("task", task)


def _view(env: Any, agent: str, state: str) -> str:
    return text_of("answer", env.view(agent, state))


def _tool_answer(env: Any, turn: Turn) -> str | None:
    return None if (answer := env.tool(turn)) is None else text_of("answer", answer)


def _result(env: Any, turns: Sequence[Turn], agents: Sequence[str]) -> StepResult:
    """Checks a result as a run does, and more strictly: what a run accepts may be a mistake."""
    result = env.step(turns)
    checked = result_of(result, agents)
    rewards = {"reward": result.reward}
    rewards |= {f"agent_rewards[{name!r}]": value for name, value in result.agent_rewards.items()}
    for name, value in rewards.items():
        if isinstance(value, (bool, np.bool_)):
            raise BadInput(f"{name}: expected a finite float, got {value!r:.60}")
    shown = hasattr(env, "players") or checked.observation.strip()  # a game has views
    if not checked.done and not shown:
        raise BadInput("observation: expected a text while the episode goes on, got an empty one")
    try:
        json.dumps(dict(result.info)).encode()
    except (TypeError, ValueError) as error:
        raise BadInput(f"info: expected what JSON can hold, for transcripts: {error}") from error
    return checked


def _remarks(played: Sequence[_Played], episodes: int, steps: int) -> list[str]:
    rewards = [reward for episode in played for reward in episode.of("reward")]
    if not rewards:
        return []
    tasks = {episode.of("task")[0] for episode in played}
    unfinished = sum(not any(episode.of("end")) for episode in played)
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


if __name__ == "__main__":  # the name of the command in earlier releases
    runpy.run_module("marft_jax.check", run_name="__main__")
