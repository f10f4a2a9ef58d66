"""Variance of each agent's gradient on the relay with a member of no use, and what it learns.

    python -m configs.studies.gradient_noise [SAMPLES]

Policies are tables of logits, so that nothing but the credit makes noise: the planner says the sum
of its digits, and the solver what is right after that message, each with probability 0.5; the
bystander says anything. ``last`` compares 8 samples of the task, 24 turns; ``siblings`` three
further samples of each turn, played on, 21 turns; a turn is a token. Learning begins at 0.2, so
with a success of 0.05, and takes plain gradient steps; its success is exact.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from marft_jax.learning.advantages import place_advantage, returns_to_go
from marft_jax.learning.chain import make_chain
from marft_jax.learning.siblings import sibling_advantage
from marft_jax.types import Episode, Turn

AGENTS = ("planner", "bystander", "solver")
_WORDS = (19, 19, 28)  # of each agent
_SUM, _LAST = 8, 9  # of the digits that the planner sees, and the other one
_BUDGET, _SEEDS = 1200, 40  # tokens of a run that learns, and how many runs
Tables = list[np.ndarray]  # logits of each agent's words, after each of the messages it is shown


def tables(right: float) -> Tables:
    """Logits of policies in which the right word has this probability."""
    planner, solver = np.zeros((1, _WORDS[0])), np.zeros((_WORDS[0], _WORDS[2]))
    for logits, words in ((planner, [_SUM]), (solver, range(_LAST, _LAST + _WORDS[0]))):
        logits[range(len(words)), words] = np.log(right / (1 - right) * (logits.shape[1] - 1))
    return [planner, np.zeros((1, _WORDS[1])), solver]


def shares(logits: np.ndarray) -> np.ndarray:
    """Probabilities of words, row by row."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def success(policy: Tables) -> float:
    """Exact probability that the solver gives the right answer."""
    planner, _, solver = map(shares, policy)
    return float(planner[0] @ solver[:, _SUM + _LAST])


def _row(turn: int, actions: Sequence[int]) -> int:
    return actions[0] if turn == 2 else 0


def play(rng: np.random.Generator, policy: Tables, before: Sequence[int] = ()) -> list[int]:
    """Actions of an episode that begins with these."""
    actions = list(before)
    while len(actions) < 3:
        turn = len(actions)
        words = shares(policy[turn][_row(turn, actions)])
        actions.append(int(rng.choice(len(words), p=words)))
    return actions


def gradients(rng: np.random.Generator, branches: int, policy: Tables) -> Tables:
    """Gradient of each agent's logits, the mean over its decisions; of 8 samples, or of one with
    so many branches of each turn."""
    first = play(rng, policy)
    branched = [(t, n) for t in range(3) for n in range(1, branches + 1)]
    played = [first, *(play(rng, policy, first[:t]) for t, _ in branched)]
    played += [] if branches else [play(rng, policy) for _ in range(7)]
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
    chain = make_chain(episodes, rewards, "action")
    compared = place_advantage(returns_to_go(chain), chain)
    advantages_EJ = sibling_advantage(chain) if branches else compared
    found = [np.zeros_like(logits) for logits in policy]
    for actions, turns, advantages_J in zip(played, own, advantages_EJ, strict=True):
        for t, advantage in zip(turns, advantages_J, strict=False):
            row = _row(t, actions)
            score = -shares(policy[t][row])
            score[actions[t]] += 1
            found[t][row] += advantage * score
    return [g / (1 + branches if branches else 8) for g in found]


def learn(rng: np.random.Generator, branches: int, tokens: int, rate: float) -> float:
    """Success after a budget of tokens, where a step costs so many."""
    policy = tables(0.2)
    for _ in range(_BUDGET // tokens):
        steps = gradients(rng, branches, policy)
        policy = [x + rate * step for x, step in zip(policy, steps, strict=True)]
    return success(policy)


def main(samples: int) -> None:
    for credit, branches, tokens in (("last", 0, 24), ("siblings", 3, 21)):
        rng = np.random.default_rng(0)
        drawn = [gradients(rng, branches, tables(0.5)) for _ in range(samples)]
        for agent, own in zip(AGENTS, zip(*drawn, strict=True), strict=True):
            spread, signal = (
                np.var(own, axis=0).sum() * tokens,
                np.square(np.mean(own, axis=0)).sum(),
            )
            print(
                f"{credit:9} {agent:10} variance x tokens {spread:.3f}, squared mean {signal:.4f}"
            )
        for rate in (1.0, 3.0, 10.0, 30.0):
            rng = np.random.default_rng(1)
            ends = np.array([learn(rng, branches, tokens, rate) for _ in range(_SEEDS)])
            half = 2.02 * ends.std(ddof=1) / _SEEDS**0.5  # Student's t, 39 degrees
            print(
                f"{credit:9} rate {rate:g}: success {ends.mean():.3f} ± {half:.3f} after {_BUDGET} "
                f"tokens, below 0.5 in {np.mean(ends < 0.5):.2f} of {_SEEDS} runs"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4000)
