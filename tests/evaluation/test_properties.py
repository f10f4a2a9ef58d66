"""Statistics by what must hold of any: order, scale, doubling, and equal values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from marft_jax.evaluation.scores import Score, are_equal, estimate, pass_at, score, share
from marft_jax.extras.games.ratings import elo, outcomes_of

quick = settings(max_examples=60, deadline=None)
rewards = st.lists(st.integers(-50, 50).map(lambda n: n / 8), min_size=2, max_size=30)
shares = st.lists(st.integers(0, 8).map(lambda n: n / 8), min_size=1, max_size=30)


def close(found, wanted, size=1.0):
    return np.allclose(found, wanted, rtol=1e-9, atol=1e-9 * size, equal_nan=True)


@pytest.mark.parametrize("value", [0.3, -1.0, 0.1, 1 / 3, -0.05, 1e-9, 2.5e6, 7.0])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 1000])
def test_equal_rewards_have_no_interval_and_the_words_say_so(value, count):
    found = estimate([value] * count)
    assert found.mean == pytest.approx(value) and math.isnan(found.low) and math.isnan(found.high)
    assert "all equal" in str(found) and "nan" not in str(found)


@pytest.mark.parametrize(
    "values",
    [[0.1 + 0.2, 0.3], [0.3, 0.1 * 3], [sum([0.1] * 10) - 2, -1.0], [1e16, 1e16 + 2],
     [(0.1 + 0.7) * 10, 8.0, 8]],
)  # fmt: skip
def test_values_that_differ_by_rounding_are_equal(values):
    assert are_equal(values) and math.isnan(estimate(values).low)
    assert not are_equal([*values, values[0] * (1 + 1e-9)])


def test_equal_shares_have_the_interval_of_their_tasks_whatever_their_rounding():
    for value in (0.3, 0.1 + 0.2, 0.7, 1 / 3):
        found = share([value] * 10)
        assert close(found[1:], stats.binomtest(0, 10).proportion_ci(method="wilson")) or (
            found.low < value < found.high and 0.4 < found.high - found.low < 0.6
        )
    assert close(share([0.1 + 0.2] * 10), share([0.3] * 10))


@quick
@given(st.integers(1, 40), st.integers(0, 40))
def test_right_and_wrong_have_wilsons_interval(tasks, right):
    right = min(right, tasks)
    found = estimate([1.0] * right + [0] * (tasks - right))
    wanted = stats.binomtest(right, tasks).proportion_ci(method="wilson")
    assert close(found, (right / tasks, *wanted))


@quick
@given(rewards)
def test_rewards_have_students_interval(values):
    if not are_equal(values) and not set(values) <= {0, 1}:
        wanted = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert close(estimate(values), (np.mean(values), *wanted), 10)


@quick
@given(shares, st.randoms())
def test_wrong_for_right_and_another_order_turn_a_share_around(values, random):
    found, wrong = share(values), [1 - value for value in values]
    random.shuffle(wrong)
    turned = share(wrong)
    assert close((turned.mean, turned.high, turned.low), [1 - x for x in found])
    assert 0 <= found.low <= found.mean <= found.high <= 1


@quick
@given(shares)
def test_twice_the_tasks_tell_more(values):
    once, twice = share(values), share([*values, *values])
    assert close(once.mean, twice.mean) and twice.high - twice.low < once.high - once.low


@quick
@given(st.integers(1, 30), st.data())
def test_pass_at_k_rises_with_samples_drawn_and_answers_solved(samples, data):
    solved = data.draw(st.integers(0, samples))
    found = [pass_at(k, samples, solved) for k in range(1, samples + 1)]
    assert found == sorted(found) and close(found[0], solved / samples)
    assert found[-1] == (solved > 0) and all(0 <= p <= 1 for p in found)
    if solved < samples:
        assert all(pass_at(k, samples, solved + 1) >= p for k, p in enumerate(found, 1))


def record(index, sample, reward, **more):
    return {"index": index, "sample": sample, "reward": reward, "turns": [], "results": []} | more


TURN = {"agent": "a", "tokens": [0, 1], "truncated": False}


@quick
@given(st.lists(st.lists(st.sampled_from([-0.5, 0.0, 0.25, 1.0]), min_size=2, max_size=4),
                min_size=2, max_size=8), st.randoms())  # fmt: skip
def test_a_score_does_not_depend_on_the_order_of_records(tasks, random):
    rows = [
        record(i, s, reward, turns=[TURN])
        for i, t in enumerate(tasks)
        for s, reward in enumerate(t)
    ]
    mixed = random.sample(rows, len(rows))
    one, other = score(rows), score(mixed)
    assert str(one) == str(other) and one.metrics("x") == other.metrics("x")


@pytest.mark.parametrize(
    "rewards, verdict, words, without",
    [([-0.1, -0.06], None, "mean reward -0.0800 (-0.334 to 0.174)", "accuracy"),
     ([-1.0, -1.0], None, "mean reward -1.0000 (all equal)", "accuracy"),
     ([0.5, 0.7], None, "mean reward 0.6000", "accuracy"),
     ([1.0, 0.0], None, "accuracy 0.5000", "reward"),
     ([1, 0, 1], None, "accuracy 0.6667", "reward"),
     ([1.0, 0.0], "right", "accuracy 1.0000 (0.342 to 1.000), mean reward 0.5000", "nan"),
     ([0.9, 0.2], "wrong", "accuracy 0.0000", "nan")],
)  # fmt: skip
def test_a_mean_reward_is_called_so_and_accuracy_is_of_right_and_wrong(
    rewards, verdict, words, without
):
    info = {"verdicts": [{"agent": "a", "verdict": verdict}]} if verdict else {}
    rows = [record(i, 0, r, turns=[TURN], results=[{"info": info}]) for i, r in enumerate(rewards)]
    found = score(rows)
    assert isinstance(found, Score) and words in str(found) and without not in str(found)
    assert found.metrics("x")["eval/x/reward"] == pytest.approx(sum(rewards) / len(rewards))


def test_ratings_do_not_depend_on_the_order_of_players_and_are_surer_with_more_games():
    points = np.array([[0.0, 6, 8], [4, 0, 7], [2, 3, 0]])
    order = [2, 0, 1]
    turned = elo(points[np.ix_(order, order)])
    assert close(turned, [elo(points)[i] for i in order], 1000)
    for once, twice in zip(elo(points), elo(2 * points), strict=True):
        assert twice.high - twice.low < once.high - once.low


def test_equal_returns_of_games_have_no_interval():
    info = {"outcomes": {"a": {"seat": 0, "return": 0.3, "outcome": "win"}}}
    found = outcomes_of([{"results": [{"info": info}]}] * 10)["a"]
    assert "all equal" in str(found.earned) and found.win == estimate([1.0] * 10)
