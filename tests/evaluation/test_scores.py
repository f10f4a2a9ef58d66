"""Figures of an evaluation, from saved records, against results by hand and by counting."""

import itertools
import math

import pytest
from rich.console import Console

from marft_jax.evaluation import tables
from marft_jax.evaluation.scores import estimate, is_solved, pass_at, score, share


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


@pytest.mark.parametrize(
    "right, of, low, high",  # as published tables of Wilson's interval have them
    [(0, 4, 0.0, 0.4899), (4, 4, 0.5101, 1.0), (117, 117, 0.9682, 1.0), (2, 64, 0.0086, 0.1070),
     (5, 10, 0.2366, 0.7634), (1, 1, 0.2065, 1.0)],
)  # fmt: skip
def test_the_interval_of_right_and_wrong_is_wilsons(right, of, low, high):
    found = estimate([1.0] * right + [0.0] * (of - right))
    assert found == pytest.approx((right / of, low, high), abs=2e-4)


def test_several_answers_to_a_task_tell_more_than_one_and_less_than_as_many_tasks():
    per_task = [0.0, 0.25, 0.5, 0.75, 1.0] * 6
    width = [e.high - e.low for e in map(share, (per_task, [0.0, 1.0] * 15, [0.0, 1.0] * 60))]
    assert width[1] > width[0] > width[2]
    equal = share([0.5] * 8)
    assert (equal.low, equal.high) == pytest.approx((0.2152, 0.7848), abs=2e-4)


def test_rewards_beyond_0_and_1_have_students_interval_or_no_bounds():
    mean, low, high = estimate([-1.0, 3.0])
    assert (mean, high - mean) == (1.0, pytest.approx(12.706 * 2, rel=1e-4)) and low < mean
    assert math.isnan(estimate([2.0, 2.0]).low) and math.isnan(estimate([2.0]).high)


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
        "eval/m/accuracy": pytest.approx(1 / 3), "eval/m/reward": pytest.approx(1 / 3),
        "eval/m/pass@2": pytest.approx(2 / 3),
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


@pytest.mark.parametrize("width, widest", [(80, 80), (200, 200)])
def test_no_table_cuts_a_heading_or_a_number(width, widest, capsys):
    console = Console(highlight=False, soft_wrap=True, markup=False, width=width)
    records = [record(i, s, float(i == s)) for i in range(3) for s in range(16)]
    for row in records:
        row["turns"][0] |= {"agent": "an_agent_of_a_long_name" * 2}
    found = score(records)
    scores = {("a_benchmark_of_a_long_name", "team without adapters"): found, ("b", "team"): found}
    console.print(tables.benchmarks(scores), tables.agents(scores))
    shown = capsys.readouterr().out
    whole = ["benchmark", "who", "agent", "tasks", "avg@n (95 %)", "pass@n", "tokens", "cut off"]
    for text in [*whole, f"@16 {found.accuracy}", f"@16 {found.passed[16].mean:.4f}"]:
        assert text in shown
    assert "…" not in shown and max(map(len, shown.splitlines())) <= widest


def test_tasks_with_other_numbers_of_samples_have_the_passes_of_the_fewest():
    rows = [record(0, s, float(s > 1), right=s > 1) for s in range(4)]
    found = score([*rows, record(1, 0, 1.0, right=True), record(1, 1, 0.0, right=False)])
    assert found.samples == 2 and sorted(found.passed) == [1, 2]
    assert found.passed[1].mean == pytest.approx(0.5)
    assert found.passed[2].mean == pytest.approx((5 / 6 + 1) / 2)
