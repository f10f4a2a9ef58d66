"""Credit: what each turn of an episode earns, and which further samples it is compared with.

For step t of an episode with the team's reward R, shaped to R' = clip((R + bias)·scale, ±clip), a
rule pays each of the N turns k = 0 … N−1 of the step

    d^(N−1−k) of R':             step_discount; last, equal, siblings, solo: d = 0, turn N−1 has all
    its own step reward, shaped: per_step, tree

Rewards for single agents are added to the agent's last turn of the step; the length penalty, and
the costs of its calls of tools, are subtracted from every turn. In a game each player is paid as if
its turns were the only ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from marft_jax.errors import BadInput
from marft_jax.learning.advantages import place_advantage, returns_to_go
from marft_jax.learning.chain import Chain, make_chain
from marft_jax.learning.siblings import sibling_advantage, solo_advantage
from marft_jax.learning.step_rewards import StepReward, find_step_reward
from marft_jax.plugins import called, number_of
from marft_jax.settings.config import Algo
from marft_jax.types import Credit, Episode, Turn

if TYPE_CHECKING:
    from marft_jax.team.prompts import Team


class CreditRule(NamedTuple):
    """An entry of the table of credits.

    Attributes:
        by_step: each turn earns its own step reward, and not a share of the step's reward.
        discounted: shares fall by ``algo.credit_discount``; otherwise the last turn has all.
        advantage: compares turns with further samples, in place of the algorithm's baseline; None
            where the rule needs no further samples.
        solo: the further samples are of each agent alone on the task, and not of single turns.
    """

    by_step: bool = False
    discounted: bool = False
    advantage: Callable[[Chain], np.ndarray] | None = None
    solo: bool = False


CREDITS = {
    **dict.fromkeys(("last", "equal"), CreditRule()),
    "step_discount": CreditRule(discounted=True),
    "per_step": CreditRule(by_step=True),
    "siblings": CreditRule(advantage=sibling_advantage),
    "tree": CreditRule(True, advantage=functools.partial(sibling_advantage, by_step=True)),
    "solo": CreditRule(advantage=solo_advantage, solo=True),
}
"""Value of ``algo.credit`` to its rule. ``equal`` is ``last``; only ``agent_reward`` tells them
apart."""


def make_credit(algo: Algo, team: Team) -> Credit:
    """Makes the credit that the settings ask for.

    Raises:
        BadInput: ``per_step`` and an agent without a step reward, or one that cannot be loaded.
    """
    rule = CREDITS[algo.credit]
    functions = _step_rewards(algo, team) if rule.by_step else ()
    discount = algo.credit_discount if rule.discounted else 0.0

    def earn(episode: Episode, by_step: bool) -> np.ndarray:
        rewards_K = np.zeros(len(episode.turns), np.float32)
        for step, result in enumerate(episode.results):
            so_far = [k for k, turn in enumerate(episode.turns) if turn.step <= step]
            if not so_far or episode.turns[so_far[-1]].step < step:
                continue
            for turns in _of_players(episode, step, so_far):
                for number, k in enumerate(turns, start=1):
                    turn, share = episode.turns[k], discount ** (len(turns) - number)
                    if by_step:
                        score = _score(functions[turn.agent], turn, result.reward, episode)
                        rewards_K[k] += shape_reward(score, algo)
                    elif share:  # 0 * infinity would be NaN
                        rewards_K[k] += share * shape_reward(result.reward, algo)
            for k, reward in _own_rewards(episode, step, so_far):
                rewards_K[k] += shape_reward(reward, algo, bias=0.0)
        return rewards_K

    def pay(episode: Episode) -> np.ndarray:
        rewards_K = earn(episode, rule.by_step)
        if algo.overlong_buffer:
            rewards_K -= [_length_penalty(turn, algo) for turn in episode.turns]
        rewards_K -= [_tool_cost(turn) for turn in episode.turns]
        return rewards_K

    return Credit(pay, functools.partial(earn, by_step=False), rule.by_step, rule.solo)


def groups_with_signal(episodes: Sequence[Episode], rewards: Sequence[np.ndarray]) -> set[int]:
    """Finds the groups in which turns that are compared differ in return-to-go.

    The other groups would teach nothing.

    Args:
        rewards: of the turns of each episode.
    """
    chain = make_chain(episodes, rewards, "action")
    differ_E = np.any(place_advantage(returns_to_go(chain), chain), axis=1)
    return {episodes[e].group for e in chain.origin.episode_E[differ_E]}


def shape_reward(reward: float, algo: Algo, bias: float | None = None) -> float:
    """clip((reward + bias) · scale, ±clip), in float32: 0.1 + 0.2 and 0.3 earn the same."""
    bias = algo.reward_bias if bias is None else bias
    value = float((np.float32(reward) + np.float32(bias)) * np.float32(algo.reward_scale))
    limit = algo.reward_clip
    return value if limit is None else min(max(value, -limit), limit)


def agent_reward(episode: Episode, rewards_K: np.ndarray, agent: int, credit: str) -> float | None:
    """Sums an agent's rewards for the log, with credit ``equal`` those of its team; None where the
    agent did not act."""
    acted = [k for k, turn in enumerate(episode.turns) if turn.agent == agent]
    if not acted:
        return None
    if credit == "equal" and not episode.turns[0].player:
        return episode.reward
    return float(rewards_K[acted].sum())


def _of_players(episode: Episode, step: int, so_far: Sequence[int]) -> list[list[int]]:
    """Turns of each player in a step; for a player that did not act in it, its last turn before."""
    by_player = []
    for player in dict.fromkeys(episode.turns[k].player for k in so_far):
        turns = [k for k in so_far if episode.turns[k].player == player]
        by_player.append([k for k in turns if episode.turns[k].step == step] or turns[-1:])
    return by_player


def _own_rewards(episode: Episode, step: int, so_far: Sequence[int]) -> list[tuple[int, float]]:
    """(turn, reward) for the rewards that the environment meant for single agents or players.

    A player that never acted in a game has no turn that earned its reward, so it is left out.
    """
    paid = []
    for name, reward in episode.results[step].agent_rewards.items():
        turns = [(k, episode.turns[k]) for k in so_far]
        acted = [k for k, t in turns if name in (t.name, t.player) and (t.player or t.step == step)]
        if acted:
            paid.append((acted[-1], reward))
    return paid


def _tool_cost(turn: Turn) -> float:
    return sum(call.cost for call in turn.calls)


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
        if name is None and CREDITS[algo.credit].advantage is not None:
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
    return number_of(what, called(what, function, turn, reward, episode))
