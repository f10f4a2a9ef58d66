"""Exercises an environment and says what is wrong with it, before a run finds out.

python -m marft_jax.envs.check my_module:MyEnv [--options most=20] [--episodes 20] [--steps 128]
    [--seconds 120]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from marft_jax.envs.base import bad_input, from_class, load_class
from marft_jax.envs.threads import Call, DaemonThreads
from marft_jax.types import StepResult, Turn
from marft_jax.user_code import result_of, shown, text_of

SLOW_RESET, SLOW_STEP = 1.0, 10.0
"""Seconds above which the check warns."""
AGENTS = ("planner", "solver")
_TEXTS = ("", "42", "The answer is \\boxed{7}.", "no idea", "yes", "x" * 2000, "答案是 3 🙂\n")


class _Wrong(Exception):
    """A fault of the environment, on one line."""


class _OutOfTime(Exception):
    """The time of the check is up, between two calls."""


class _Played(NamedTuple):
    """An episode: everything that was said in it, how long that took, and how often its tool was
    asked and answered."""

    task: str
    rewards: list[float]
    said: list[Any]
    is_done: bool
    reset_seconds: float
    step_seconds: float
    asked: int = 0
    tools: int = 0


def check(
    create: Callable[..., Any],
    episodes: int = 20,
    steps: int = 128,
    seconds: float = 120.0,
    agents: Sequence[str] = AGENTS,
) -> tuple[list[str], list[str]]:
    """Plays episodes with made-up turns.

    Args:
        create: the environment's class (or anything else that makes one without arguments).
        episodes: seeds to play, each of them twice.
        steps: after so many steps an episode that is not done is left.
        seconds: for all of it; a call that has not returned by then, or after half of them, hangs.
        agents: names of those who act; the last one is graded.

    Returns:
        Errors (a run would fail or learn nonsense) and remarks, one line each.
    """
    watch, problems, played = _Watch(seconds), [], []
    create = from_class(create, "train").create
    try:
        for seed in range(episodes):
            first, again = (_play(watch, create, seed, steps, agents) for _ in range(2))
            for what in ("task", "rewards", "said"):
                if getattr(first, what) != getattr(again, what):
                    what = "view or tool" if what == "said" else what
                    problems.append(f"seed {seed}: the same seed and turns gave another {what}")
                    break
            played.append(first)
    except _Wrong as wrong:
        problems.append(str(wrong))
    except _OutOfTime:
        problems += [] if played else ["not one episode was over when the time was up"]
    if played and not any(episode.is_done for episode in played):
        problems.append(f"no episode was done after {steps} steps: a run cuts them off, as endless")
    return list(dict.fromkeys(problems)), _remarks(played, episodes, steps)


class _Watch:
    """Makes calls in a thread, for as long as there is time."""

    def __init__(self, seconds: float):
        self._seconds, self._end = seconds, time.monotonic() + seconds
        self._threads = DaemonThreads()

    def __call__(self, where: str, run: Callable[..., Any], *args: Any) -> tuple[Any, float]:
        """Returns what the call returns, and the seconds that it took.

        Raises:
            _Wrong: it raised, or hangs.
            _OutOfTime: it was not even made.
        """
        begin = time.monotonic()
        if begin >= self._end:
            raise _OutOfTime
        over, call = threading.Event(), Call(where, lambda: run(*args))
        self._threads.submit(lambda: (call.run(), over.set()))
        patience = max(self._end - begin, self._seconds / 2)  # for one that begins late
        over.wait(patience)
        call.give_up(f"no answer after {patience:.1f} s (see --seconds)")
        if call.failure is not None:
            text = call.failure.text
            raise _Wrong(text if where in text else f"{where}: {text}")
        return call.value, time.monotonic() - begin


def _play(
    watch: _Watch, create: Callable[[], Any], seed: int, steps: int, agents: Sequence[str]
) -> _Played:
    """Plays an episode.

    Raises:
        _Wrong, _OutOfTime: see ``_Watch``.
    """
    env, _ = watch("creating it", create)
    task, reset_seconds = watch(f"reset({seed})", _task, env, seed)
    view, _ = watch("its view", getattr, env, "view", None)
    tool, _ = watch("its tool", getattr, env, "tool", None)
    played = _Played(task, [], [], False, reset_seconds, 0.0)
    state = task
    while not played.is_done and len(played.rewards) < steps:
        where, turns = f"seed {seed}, step {len(played.rewards)}", _turns(played, seed, agents)
        for name in agents if view is not None else ():
            played.said.append(watch(f"{where}, view", _view, view, name, state)[0])
        for turn in turns if tool is not None else ():
            answer, _ = watch(f"{where}, tool", _answer, tool, turn)
            played.said.append(answer)
            called = played.tools + (answer is not None)
            played = played._replace(asked=played.asked + 1, tools=called)
        result, took = watch(where, _result, env, turns, agents)
        played.rewards.append(result.reward)
        state = result.observation
        slowest = max(played.step_seconds, took)
        played = played._replace(is_done=result.done, step_seconds=slowest)
    return played


def _turns(played: _Played, seed: int, agents: Sequence[str]) -> list[Turn]:
    """Turns, one of each agent, that say something; the last is graded."""
    nothing, step = np.zeros(0, np.int32), len(played.rewards)
    turns = []
    for index, name in enumerate(agents):
        text = _TEXTS[(seed + (index + 1) * step + index) % len(_TEXTS)]
        graded = index == len(agents) - 1
        turns.append(Turn(index, name, step, nothing, nothing, nothing, text, graded, (), False,
                          1.0, index))  # fmt: skip
    return turns


def _task(env: Any, seed: int) -> str:
    task = env.reset(seed)
    if not isinstance(task, str) or not task.strip():
        raise bad_input(f"expected a text that is not empty, got {shown(task)}")
    return text_of("task", task)


def _view(view: Callable[..., Any], name: str, state: str) -> str:
    return text_of("answer", view(name, state))


def _answer(tool: Callable[..., Any], turn: Turn) -> str | None:
    said = tool(turn)
    return None if said is None else text_of("answer", said)


def _result(env: Any, turns: Sequence[Turn], agents: Sequence[str]) -> StepResult:
    """Checks as a run does, and stricter: what a run survives may still be a mistake."""
    result = env.step(turns)
    checked = result_of(result, agents)
    rewards = {"reward": result.reward}
    rewards |= {f"agent_rewards[{name!r}]": value for name, value in result.agent_rewards.items()}
    for name, value in rewards.items():
        if isinstance(value, (bool, np.bool_)) or not math.isfinite(value):
            raise bad_input(f"{name}: expected a finite float, got {value!r:.60}")
    if not checked.done and not checked.observation.strip():
        raise bad_input("observation: expected a text while the episode goes on, got an empty one")
    try:
        json.dumps(dict(result.info)).encode()
    except (TypeError, ValueError) as error:
        raise bad_input(f"info: expected what JSON can hold, for transcripts: {error}") from error
    return checked


def _remarks(played: Sequence[_Played], episodes: int, steps: int) -> list[str]:
    if not played:
        return []
    tasks = {episode.task for episode in played}
    rewards = [reward for episode in played for reward in episode.rewards]
    unfinished = sum(not episode.is_done for episode in played)
    reset = max(episode.reset_seconds for episode in played)
    step = max(episode.step_seconds for episode in played)
    remarks = [
        f"{len(played)} episodes, {len(tasks)} distinct tasks",
        f"rewards from {min(rewards):g} to {max(rewards):g} for made-up answers",
        f"slowest reset {reset:.3f} s, slowest step {step:.3f} s",
    ]
    if len(played) < episodes:
        remarks.append(f"warning: only {len(played)} of {episodes} episodes were played")
    if len(tasks) == 1 < len(played):
        remarks.append("warning: every seed gave the same task")
    if len(set(rewards)) == 1 and rewards[0] > 0:
        remarks.append("warning: every answer got the same positive reward: nothing to learn")
    if unfinished:
        remarks.append(f"warning: {unfinished} episodes were not done after {steps} steps")
    if reset > SLOW_RESET or step > SLOW_STEP:
        remarks.append("warning: slow; episodes wait for it")
    if all(episode.tools and episode.tools == episode.asked for episode in played):
        remarks.append("warning: its tool answers whatever is said, and so again and again")
    return remarks


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if the environment is sound, 1 if not, 2 if it cannot be found."""
    parser = argparse.ArgumentParser(prog="python -m marft_jax.envs.check", description=__doc__)
    parser.add_argument("name", help="package.module:Class")
    parser.add_argument("--options", nargs="+", default=(), help="its own, as name=value")
    parser.add_argument("--episodes", type=int, default=20, help="seeds to play")
    parser.add_argument("--steps", type=int, default=128, help="steps after which to leave one")
    parser.add_argument("--seconds", type=float, default=120.0, help="for all of it")
    parser.add_argument("--agents", nargs="+", default=AGENTS, help="who acts; the last is graded")
    own = parser.parse_args(argv)
    try:
        factory = load_class(own.name, own.options)
    except ValueError as error:
        print(f"marft_jax: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    problems, remarks = check(factory, own.episodes, own.steps, own.seconds, own.agents)
    for remark in remarks:
        print(remark)
    for problem in problems:
        print(f"wrong: {' '.join(problem.split())}")
    print(f"{own.name}: " + (f"{len(problems)} things are wrong" if problems else "sound"))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
