"""Exercises an environment and says what is wrong with it, before a run finds out.

python -m marft_jax.envs.check my_module:MyEnv [--episodes 20] [--steps 8]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from marft_jax.envs.base import Env, from_class, load_class
from marft_jax.types import StepResult, Turn

SLOW_RESET, SLOW_STEP = 1.0, 10.0
"""Seconds above which the check warns."""
_TEXTS = ("", "42", "The answer is \\boxed{7}.", "no idea", "yes", "x" * 2000, "答案是 3 🙂\n")


def check(create: Callable[..., Any], episodes: int = 20, steps: int = 8) -> tuple[list, list]:
    """Plays episodes with made-up turns.

    Args:
        create: the environment's class (or anything else that makes one without arguments).
        episodes: seeds to play, each of them twice.
        steps: after so many steps an episode that is not done is left.

    Returns:
        Errors (a run would fail or learn nonsense) and remarks, one line each.
    """
    problems: list[str] = []
    remarks: list[str] = []
    create = from_class(create, "train").create
    played = []
    for seed in range(episodes):
        first = _play(create, seed, steps, problems)
        again = _play(create, seed, steps, problems)
        if first is None or again is None:
            break
        if first[:2] != again[:2]:
            what = "task" if first[0] != again[0] else "rewards"
            problems.append(f"seed {seed}: the same seed and turns gave another {what}")
        played.append(first)
    if played:
        _summarise(played, steps, remarks)
    return list(dict.fromkeys(problems)), remarks


def _play(
    create: Callable[..., Any], seed: int, steps: int, problems: list[str]
) -> tuple[str, list[float], bool, float, float] | None:
    """Task, rewards, whether it ended, seconds of reset and of the slowest step; None on error."""
    where = "creating it"
    slowest = 0.0
    try:
        env: Env = create()
        where, start = f"reset({seed})", time.perf_counter()
        task = env.reset(seed)
        reset_seconds = time.perf_counter() - start
        if not isinstance(task, str) or not task.strip():
            problems.append(f"{where}: expected a text that is not empty, got {task!r:.80}")
            return None
        rewards: list[float] = []
        done = False
        while not done and len(rewards) < steps:
            where, start = f"seed {seed}, step {len(rewards)}", time.perf_counter()
            result = env.step(_turns(seed, len(rewards)))
            slowest = max(slowest, time.perf_counter() - start)
            wrong = _wrong_result(result)
            if wrong:
                problems.append(f"{where}: {wrong}")
                return None
            rewards.append(result.reward)
            done = result.done
    except Exception as error:
        problems.append(f"{where}: {type(error).__name__}: {error}")
        return None
    return task, rewards, done, reset_seconds, slowest


def _turns(seed: int, step: int) -> list[Turn]:
    """A planner that is not graded and a solver that is, saying something."""
    nothing = np.zeros(0, np.int32)
    texts = (_TEXTS[(seed + step) % len(_TEXTS)], _TEXTS[(seed + 2 * step + 1) % len(_TEXTS)])
    members = (("planner", False), ("solver", True))
    return [
        Turn(index, name, step, nothing, nothing, nothing, text, answers, (), False, 1.0)
        for index, ((name, answers), text) in enumerate(zip(members, texts, strict=True))
    ]


def _wrong_result(result: Any) -> str | None:
    if not isinstance(result, StepResult):
        return f"expected a marft_jax.types.StepResult, got {type(result).__name__}"
    rewards = {"reward": result.reward}
    if not isinstance(result.agent_rewards, Mapping):
        return f"agent_rewards: expected names to floats, got {result.agent_rewards!r:.60}"
    rewards |= {f"agent_rewards[{name!r}]": value for name, value in result.agent_rewards.items()}
    for name, value in rewards.items():
        number = isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            return f"{name}: expected a finite float, got {value!r:.60}"
    if not isinstance(result.done, (bool, np.bool_)):
        return f"done: expected True or False, got {result.done!r:.60}"
    if not isinstance(result.observation, str):
        return f"observation: expected a text, got {type(result.observation).__name__}"
    if not isinstance(result.feedback, str):
        return f"feedback: expected a text, got {type(result.feedback).__name__}"
    if not result.done and not result.observation.strip():
        return "observation: expected a text while the episode goes on, got an empty one"
    try:
        json.dumps(dict(result.info))
    except (TypeError, ValueError) as error:
        return f"info: expected what JSON can hold (it goes into transcripts): {error}"
    return None


def _summarise(played: Sequence[tuple], steps: int, remarks: list[str]) -> None:
    tasks = {task for task, *_ in played}
    rewards = [reward for _, given, *_ in played for reward in given]
    unfinished = sum(not done for _, _, done, *_ in played)
    reset, step = max(item[3] for item in played), max(item[4] for item in played)
    remarks.append(f"{len(played)} episodes, {len(tasks)} distinct tasks")
    remarks.append(f"rewards from {min(rewards):g} to {max(rewards):g} for made-up answers")
    remarks.append(f"slowest reset {reset:.3f} s, slowest step {step:.3f} s")
    if len(tasks) == 1 < len(played):
        remarks.append("warning: every seed gave the same task")
    if len(set(rewards)) == 1 and rewards[0] > 0:
        remarks.append("warning: every answer got the same positive reward: nothing to learn")
    if unfinished:
        remarks.append(f"warning: {unfinished} episodes were not done after {steps} steps")
    if reset > SLOW_RESET or step > SLOW_STEP:
        remarks.append("warning: slow; episodes wait for it")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if the environment is sound, 1 if not, 2 if it cannot be found."""
    parser = argparse.ArgumentParser(prog="python -m marft_jax.envs.check", description=__doc__)
    parser.add_argument("name", help="package.module:Class")
    parser.add_argument("--episodes", type=int, default=20, help="seeds to play")
    parser.add_argument("--steps", type=int, default=8, help="steps after which to leave one")
    arguments = parser.parse_args(argv)
    try:
        factory = load_class(arguments.name)
    except ValueError as error:
        print(f"marft_jax: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    problems, remarks = check(factory, arguments.episodes, arguments.steps)
    for remark in remarks:
        print(remark)
    for problem in problems:
        print(f"wrong: {' '.join(problem.split())}")
    print(f"{arguments.name}: " + (f"{len(problems)} things are wrong" if problems else "sound"))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
