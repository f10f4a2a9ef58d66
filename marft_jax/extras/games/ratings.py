"""Shares of games won, drawn and lost, and Elo ratings."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from marft_jax.evaluation.scores import Z_95, Estimate, Record, estimate


class Outcomes(NamedTuple):
    """Games of an agent.

    Attributes:
        win, draw, loss: shares of its games.
        earned: mean return.
        failed: games without a result.
    """

    games: int
    win: Estimate
    draw: Estimate
    loss: Estimate
    earned: Estimate
    failed: int


def outcomes_of(records: Sequence[Record]) -> dict[str, Outcomes]:
    """Counts each agent's outcomes, which the last step of a game records (``seats.outcomes``)."""
    by_agent, failed = defaultdict[str, list[Record]](list), 0
    for record in records:
        outcomes = record["results"][-1]["info"].get("outcomes", {}) if record["results"] else {}
        failed += not outcomes
        for agent, outcome in outcomes.items():
            by_agent[agent].append(outcome)
    scored: dict[str, Outcomes] = {}
    for agent, outcomes in by_agent.items():
        kinds = [outcome["outcome"] for outcome in outcomes]
        win, draw, loss = (
            estimate([float(x == kind) for x in kinds]) for kind in ("win", "draw", "loss")
        )
        earned = estimate([outcome["return"] for outcome in outcomes])
        scored[agent] = Outcomes(len(kinds), win, draw, loss, earned, failed)
    return scored


def elo(points_XX: np.ndarray) -> list[Estimate]:
    """Computes Elo ratings from points: a win counts 1, a draw 1/2.

    The maximum-likelihood ratings r of the model in which i beats j with the probability
    1 / (1 + 10^((r_j − r_i) / 400)) (Bradley and Terry 1952; Elo), shifted to mean 0. A Gaussian
    prior with deviation 1000 keeps ratings finite; 95 % intervals come from the curvature.

    Args:
        points_XX: points of each player against each other player.
    """
    count, scale = len(points_XX), math.log(10) / 400
    games_XX, rating, prior = points_XX + points_XX.T, np.zeros(count), 1 / (1000 * scale) ** 2
    centre = np.eye(count) - 1 / count
    covariance = np.eye(count)
    for _ in range(50):  # Newton's method
        odds_XX = 1 / (1 + np.exp(rating - rating[:, None]))
        weight_XX = games_XX * odds_XX * odds_XX.T
        curve = np.diag(weight_XX.sum(1) + prior) - weight_XX
        covariance = np.linalg.inv(curve)
        slope = (points_XX - games_XX * odds_XX).sum(1) - prior * rating
        rating = rating + np.clip(covariance @ slope, -1, 1)
    margin = Z_95 * np.sqrt(np.diag(centre @ covariance @ centre))
    pairs = zip(centre @ rating / scale, margin / scale, strict=True)
    return [Estimate(float(r), float(r - m), float(r + m)) for r, m in pairs]
