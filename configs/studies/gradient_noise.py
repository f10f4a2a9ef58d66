"""Variance of each agent's gradient on the relay with a member of no use, at equal tokens.

    python -m configs.studies.gradient_noise [SAMPLES]

Policies are tables of logits, so that nothing but the credit makes noise: the planner says the sum
of its digits, and the solver what is right after that message, each with probability 0.5; the
bystander says anything. ``last`` compares 8 samples of the task, 24 turns; ``siblings`` three
further samples of each turn, played on, 21 turns; a turn is a token.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from marft_jax.learning.advantages import (
    minus_place_mean,
    minus_siblings,
    returns_to_go,
    sizes,
)
from marft_jax.learning.batch import chain_of_turns
from marft_jax.types import Episode, Turn

AGENTS = ("planner", "bystander", "solver")
_WORDS, _RIGHT = (19, 19, 28), 0.5  # of each agent; how probable the right one is
_SUM, _LAST = 8, 9  # of the digits that the planner sees, and the other one


def probabilities(turn: int, before: Sequence[int]) -> np.ndarray:
    """The policy of a turn after these actions."""
    right = (_SUM, None, before[0] + _LAST if before else 0)[turn]
    others = (1 - _RIGHT) / (_WORDS[turn] - 1)
    words = np.arange(_WORDS[turn])
    return np.where(words == right, _RIGHT, 1 / len(words) if right is None else others)


def play(rng: np.random.Generator, before: Sequence[int] = ()) -> list[int]:
    """Actions of an episode that begins with these."""
    actions = list(before)
    while len(actions) < 3:
        turn = len(actions)
        actions.append(int(rng.choice(_WORDS[turn], p=probabilities(turn, actions))))
    return actions


def gradients(rng: np.random.Generator, branches: int) -> list[np.ndarray]:
    """Gradient of each agent's logits, the mean over its decisions; of 8 samples, or of one with
    so many branches of each turn."""
    first = play(rng)
    branched = [(t, n) for t in range(3) for n in range(1, branches + 1)]
    played = [first, *(play(rng, first[:t]) for t, _ in branched)]
    played += [] if branches else [play(rng) for _ in range(7)]
    paid = [float(actions[2] == _SUM + _LAST) for actions in played]
    kinds = [None, *branched] if branches else [None] * 8
    own = [range(3) if kind is None else [kind[0]] for kind in kinds]
    nothing = np.zeros(1, np.int32)
    episodes = [
        Episode(0, 0, 0 if branches else e, "", [
            Turn(t, AGENTS[t], 0, nothing, nothing, nothing, "", t == 2, (), False, 1.0, i)
            for i, t in enumerate(own[e])
        ], (), kind)
        for e, kind in enumerate(kinds)
    ]  # fmt: skip
    rewards = [np.float32([0] * (len(turns) - 1) + [r]) for turns, r in zip(own, paid, strict=True)]
    chain = chain_of_turns(episodes, rewards)
    compared = minus_place_mean(returns_to_go(chain), sizes(chain, None), chain)
    advantages_EJ = minus_siblings(chain) if branches else compared
    found = [np.zeros((_WORDS[0] if t == 2 else 1, _WORDS[t])) for t in range(3)]
    for actions, turns, advantages_J in zip(played, own, advantages_EJ, strict=True):
        for t, advantage in zip(turns, advantages_J, strict=False):
            score = -probabilities(t, actions[:t])
            score[actions[t]] += 1
            found[t][actions[0] if t == 2 else 0] += advantage * score
    return [g.ravel() / (1 + branches if branches else 8) for g in found]


def main(samples: int) -> None:
    for credit, branches, tokens in (("last", 0, 24), ("siblings", 3, 21)):
        rng = np.random.default_rng(0)
        drawn = [gradients(rng, branches) for _ in range(samples)]
        for agent, own in zip(AGENTS, zip(*drawn, strict=True), strict=True):
            spread, signal = (
                np.var(own, axis=0).sum() * tokens,
                np.square(np.mean(own, axis=0)).sum(),
            )
            print(
                f"{credit:9} {agent:10} variance x tokens {spread:.3f}, squared mean {signal:.4f}"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4000)
