"""Rewards of turns: shaping, credit among the turns of a step, length penalty.

For step t of an episode with the team's reward R, shaped to R' = clip((R + bias)·scale, ±clip):

    last, equal     R' on the step's last turn
    step_discount   R'·d^(N−1−k) on turn k = 0 … N−1 of the step
    per_step, tree  f_k(turn, R, episode) on each turn, shaped like a reward

Rewards for single agents are added to the agent's last turn of the step, and the length penalty to
every turn. Each step is credited within its own turns; in a game those of each player for
themselves, as if it were alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from marft_jax.config import Algo
from marft_jax.errors import BadInput
from marft_jax.learning.step_rewards import StepReward, find_step_reward
from marft_jax.plugins import failure_of, shown
from marft_jax.team.prompts import Team
from marft_jax.types import Credit, Episode, Turn


def make_credit(algo: Algo, team: Team) -> Credit:
    """Makes the credit rule that the settings ask for.

    Raises:
        BadInput: ``per_step`` and an agent without a step reward, or one that cannot be loaded.
    """
    by_step = _pays_by_step(algo)
    functions = _step_rewards(algo, team) if by_step else ()

    def credit(episode: Episode) -> np.ndarray:
        rewards_K = np.zeros(len(episode.turns), np.float32)
        for step, result in enumerate(episode.results):
            so_far = [k for k, turn in enumerate(episode.turns) if turn.step <= step]
            if not so_far or episode.turns[so_far[-1]].step < step:
                continue
            for turns in _of_players(episode, step, so_far):
                if by_step:
                    for k in turns:
                        turn = episode.turns[k]
                        score = _score(functions[turn.agent], turn, result.reward, episode)
                        rewards_K[k] += shape_reward(score, algo)
                else:
                    discount = algo.credit_discount if algo.credit == "step_discount" else 0.0
                    for behind, k in enumerate(reversed(turns)):
                        if weight := discount**behind:  # 0 * infinity would be NaN
                            rewards_K[k] += weight * shape_reward(result.reward, algo)
            for k, reward in _own_rewards(episode, step, so_far):
                rewards_K[k] += shape_reward(reward, algo, bias=0.0)
        if algo.overlong_buffer:
            rewards_K -= [_length_penalty(turn, algo) for turn in episode.turns]
        return rewards_K

    return credit


def _pays_by_step(algo: Algo) -> bool:
    return str(algo.credit) in ("per_step", "tree")  # tree: of the algorithms with branches


def size_of(episode: Episode, algo: Algo) -> float:
    """Sum of the absolute values of all that an episode's rewards were added up from.

    What was added may cancel out: a reward of 0.3 and a bias of -0.3 leave a rounding of 0.3.
    """
    bias, limit = abs(algo.reward_bias), algo.reward_clip
    size = 0.0
    for result in episode.results:
        paid = 0.0 if _pays_by_step(algo) else result.reward
        for reward in (paid, *result.agent_rewards.values()):
            part = (abs(reward) + bias) * abs(algo.reward_scale)
            size += part if limit is None else min(part, limit)
    return size + (algo.overlong_penalty * len(episode.turns) if algo.overlong_buffer else 0.0)


def shape_reward(reward: float, algo: Algo, bias: float | None = None) -> float:
    """clip((reward + bias) · scale, ±clip)."""
    value = (reward + (algo.reward_bias if bias is None else bias)) * algo.reward_scale
    limit = algo.reward_clip
    return value if limit is None else min(max(value, -limit), limit)


def agent_reward(episode: Episode, rewards_K: np.ndarray, agent: int, how: str) -> float | None:
    """Sums an agent's rewards for the log; with credit ``equal`` it has the team's.

    None where it did not act.
    """
    how = "last" if episode.turns[0].player else how
    acted = [k for k, turn in enumerate(episode.turns) if turn.agent == agent]
    if not acted:
        return None
    return episode.reward if how == "equal" else float(rewards_K[acted].sum())


def _of_players(episode: Episode, step: int, so_far: Sequence[int]) -> list[list[int]]:
    """Turns of each player in a step; of one that did not act in it, the last one before."""
    found = []
    for player in dict.fromkeys(episode.turns[k].player for k in so_far):
        turns = [k for k in so_far if episode.turns[k].player == player]
        found.append([k for k in turns if episode.turns[k].step == step] or turns[-1:])
    return found


def _own_rewards(episode: Episode, step: int, so_far: Sequence[int]) -> list[tuple[int, float]]:
    """(turn, reward) for the rewards that the environment meant for single agents or players; who
    never acted in a game has no decision that earned it."""
    paid = []
    for name, reward in episode.results[step].agent_rewards.items():
        turns = [(k, episode.turns[k]) for k in so_far]
        acted = [k for k, t in turns if name in (t.name, t.player) and (t.player or t.step == step)]
        if not acted and turns[0][1].player:
            continue
        if not acted:
            raise ValueError(
                f"agent_rewards: expected names of agents that acted in step {step}, got "
                f"{name!r}; fix the environment"
            )
        paid.append((acted[-1], reward))
    return paid


def _length_penalty(turn: Turn, algo: Algo) -> float:
    """Penalty of an action that fills part of the last tokens before the limit it was sampled with.

    Source: soft overlong punishment, DAPO (Yu et al. 2025), equation 13.
    """
    if turn.limit is None:
        return 0.0
    filled = (len(turn.action) - turn.limit + algo.overlong_buffer) / algo.overlong_buffer
    return algo.overlong_penalty * min(max(filled, 0.0), 1.0)


def _step_rewards(algo: Algo, team: Team) -> list[StepReward]:
    """Finds the step reward of each agent."""
    functions = []
    for profile in team.profiles:
        name = profile.reward or algo.step_reward
        if name is None and algo.branches:
            name = "verifier"  # the team's reward of the step
        if name is None:
            raise BadInput(
                f"--algo.credit per_step: agent {profile.name!r} has no step reward; add "
                "`reward: ...` to its profile, or set --algo.step_reward"
            )
        functions.append(find_step_reward(name))
    return functions


def _score(function: StepReward, turn: Turn, reward: float, episode: Episode) -> float:
    """Calls a step reward, which may be a user's."""
    what = f"step reward of agent {turn.name!r}"
    try:
        score = function(turn, reward, episode)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit too: it must not end the run as if it were done
        raise BadInput(f"{what}: {failure_of(error).text}") from error
    if not (isinstance(score, (int, float, np.number)) and math.isfinite(score)):
        raise BadInput(f"{what}: expected a finite number, got {shown(score)}")
    return float(score)
