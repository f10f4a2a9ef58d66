"""Which turn gets which reward."""

from __future__ import annotations

import numpy as np

from marft_jax.types import Episode


def last(episode: Episode) -> np.ndarray:
    """The team's reward of each step on that step's last turn; others get 0 (MARFT-A, MARFT-T).

    Rewards that the environment meant for single agents are added to their last turn of the step.

    Returns:
        float32 ``[turns]``.
    """
    rewards_K = np.zeros(len(episode.turns), np.float32)
    for step, result in enumerate(episode.results):
        turns = [k for k, turn in enumerate(episode.turns) if turn.step == step]
        if not turns:
            continue
        rewards_K[turns[-1]] += result.reward
        for name, reward in result.agent_rewards.items():
            own = [k for k in turns if episode.turns[k].name == name]
            if not own:
                raise ValueError(
                    f"agent_rewards: expected names of agents that acted in step {step}, got "
                    f"{name!r}; fix the environment"
                )
            rewards_K[own[-1]] += reward
    return rewards_K
