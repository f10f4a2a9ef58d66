"""Figures of an evaluation, from saved records, against results by hand and by counting."""

import itertools
import math

import pytest

from marft_jax.scores import estimate, is_solved, pass_at, score


def record(index, sample, reward, right=None, tokens=3):
    verdict = [] if right is None else [{"agent": "solver", "verdict": "right" if right else "x"}]
    turns = [
        {"agent": "planner", "tokens": [0, 2], "truncated": True, "answers": False},
        {"agent": "solver", "tokens": [2, 2 + tokens], "truncated": False, "answers": True},
    ]
    results = [{"reward": reward, "done": True, "info": {"verdicts": verdict}}]
    return {"index": index, "sample": sample, "reward": reward, "turns": turns, "results": results}


@pytest.mark.parametrize("samples, solved", [(4, 1), (5, 0), (5, 5), (6, 3), (8, 2)])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_solved_answer(samples, solved):
    right = [i < solved for i in range(samples)]
    for k in range(1, samples + 1):
        draws = list(itertools.combinations(right, k))
        assert pass_at(k, samples, solved) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_the_margin_is_that_of_independent_tasks():
    mean, margin = estimate([0.0, 1.0, 1.0, 0.0])
    assert mean == 0.5 and margin == pytest.approx(1.96 * math.sqrt((1 / 3) / 4))
    assert estimate([1.0, 1.0, 1.0]) == (1.0, 0.0)
    assert math.isnan(estimate([1.0]).margin)


def test_a_score_counts_tasks_samples_and_agents():
    records = [
        record(i, s, float(i == s), right=i == s, tokens=i) for i in range(3) for s in (0, 1)
    ]
    found = score(records)
    assert (found.tasks, found.samples, found.failed) == (3, 2, 0)
    assert found.accuracy.mean == pytest.approx(1 / 3)
    assert found.passed[1].mean == pytest.approx(1 / 3)
    assert found.passed[2].mean == pytest.approx(2 / 3)
    solver, planner = found.agents["solver"], found.agents["planner"]
    assert solver == (6, 1.0, 0.0, pytest.approx(1 / 3))
    assert planner == (6, 2.0, 1.0, None)
    assert found.metrics("m") == {
        "eval/m/accuracy": pytest.approx(1 / 3), "eval/m/pass@2": pytest.approx(2 / 3)
    }  # fmt: skip
    assert "(3 tasks x 2 samples), pass@2 0.6667" in str(found)


def test_part_of_the_reward_is_no_solution_where_there_is_a_verdict():
    assert not is_solved(record(0, 0, 0.4, right=False))
    assert is_solved(record(0, 0, 1.4, right=True))
    assert is_solved(record(0, 0, 0.4)) and not is_solved(record(0, 0, 0.0))


def test_a_failed_episode_counts_as_wrong():
    lost = record(1, 0, 0.0) | {"turns": []}
    found = score([record(0, 0, 1.0, right=True), lost])
    assert (found.failed, found.accuracy.mean) == (1, 0.5)
    assert str(found).endswith("(2 tasks), 1 episodes failed")
