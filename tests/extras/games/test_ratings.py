"""Outcomes of games, and ratings of who played them."""

from __future__ import annotations

import numpy as np
import pytest

from marft_jax.extras.games.ratings import elo, outcomes_of


def test_elo_is_the_rating_whose_odds_are_the_shares_of_points():
    points = np.array([[0, 640, 849], [360, 0, 760], [151, 240, 0]])  # odds of 100 and 200 apart
    low, mid, high = sorted(elo(points), key=lambda rating: rating.mean)
    steps = high.mean - mid.mean, mid.mean - low.mean
    assert steps == pytest.approx((100, 200), abs=2)  # points are whole
    assert high.mean + mid.mean + low.mean == pytest.approx(0, abs=1e-6)  # of hundreds, in float64
    few = max(elo(points / 100), key=lambda rating: rating.mean)
    wider = (few.high - few.low) / (high.high - high.low)
    assert wider == pytest.approx(10, rel=0.1)  # √100, but for the prior
    assert elo(np.array([[0, 9], [0, 0]]))[0].mean < 2000  # who always wins has a rating


def test_outcomes_are_counted_with_their_intervals():
    def game(outcome, earned):
        info = {"outcomes": {"a": {"seat": 0, "return": earned, "outcome": outcome}}}
        return {"results": [{"info": {}}, {"info": info}]}

    rows = [game("win", 1.0)] * 6 + [game("draw", 0.0)] * 2 + [game("loss", -1.0)] * 2
    found = outcomes_of([*rows, {"results": []}])["a"]
    assert (found.games, found.failed) == (10, 1)
    assert (found.win.mean, found.draw.mean, found.loss.mean) == (0.6, 0.2, 0.2)
    assert (found.win.low, found.win.high) == pytest.approx((0.3127, 0.8318), abs=1e-3)  # Wilson's
    assert found.earned.mean == pytest.approx(0.4)
