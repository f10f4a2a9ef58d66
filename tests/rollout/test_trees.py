"""Further samples of a step: candidates of which one goes on, agents alone, and what they cost."""

from __future__ import annotations

import numpy as np
import pytest
import small
from scripted import Slow
from test_branches import TOPOLOGIES, by_branch, plain, rollout_of

from marft_jax.cli import configure
from marft_jax.errors import BadInput, EpisodesFailed
from marft_jax.extras.planning.work import step_work
from marft_jax.learning.credit import make_credit
from marft_jax.rollout.branches import branched_turns, learnable, play_samples
from marft_jax.types import Sample, StepResult

SAMPLES = [Sample(i, i // 2, i % 2) for i in range(6)]


def said(episodes):
    return [list(map(plain, e.turns)) for e in episodes]


def length(turn, reward, episode) -> float:
    return len(turn.text) % 7 + reward


def played(rollout, credit: str, samples=SAMPLES, **algo):
    """(trunks, others) of a step, and its config."""
    settings = {"name": "grpo", "credit": credit, "branches": 2, "episodes": 6, "group_size": 2}
    config = configure({f"algo.{key}": value for key, value in (settings | algo).items()})
    rule = make_credit(config.algo, rollout.team)
    parts = list(play_samples(rollout, rule, samples, config, 3))
    episodes = [e for part in parts for e in part.episodes]
    trunks = [e for e in episodes if e.branch is None]
    return trunks, [e for e in episodes if e.branch is not None], config


BEST = {"branch_at": "every", "branch_continue": "best", "step_reward": f"{__name__}:length"}


@pytest.mark.slow
@pytest.mark.parametrize(("workflow", "shared"), [TOPOLOGIES[i] for i in (0, 3, 4, 7)])
def test_of_the_samples_of_a_turn_the_one_with_the_best_step_reward_goes_on(workflow, shared):
    rollout, engine = rollout_of(workflow, shared, by_branch)
    trunks, lost, config = played(rollout, "tree", **BEST)
    credit = make_credit(config.algo, rollout.team)
    assert [e[:3] for e in sorted(trunks)] == [s[:3] for s in SAMPLES]
    for trunk in trunks:
        own, turns = trunk.paid, len(trunk.turns)
        others = [e for e in lost if e[:3] == trunk[:3]]
        assert sorted({e.branch[0] for e in others}) == list(range(turns)) and turns > 3
        assert trunk.results[-1].done
        for turn in range(turns):
            drawn = [e for e in others if e.branch[0] == turn]
            assert len(drawn) == 2 and all(credit.pay(e)[turn] <= own[turn] for e in drawn)
            prompt = trunk.turns[turn].prompt.tolist()
            assert all(e.turns[turn].prompt.tolist() == prompt for e in drawn)
            assert all(e.turns[-1].step == trunk.turns[turn].step for e in drawn)
    sampled = [t for e in [*trunks, *lost] for t in e.turns if not t.replayed]
    assert len(sampled) == len(engine.requests)
    assert sum(len(e.prompt) for e in sampled) == sum(len(r.prompt) for r in engine.requests)


@pytest.mark.slow
def test_a_random_one_goes_on_as_if_there_were_no_others():
    rollout, _ = rollout_of("dag", 0, by_branch)
    trunks, others, config = played(rollout, "tree", branch_at="every", branch_continue="random")
    alone = rollout.play(SAMPLES, 3).episodes
    for trunk, same in zip(trunks, alone, strict=True):
        assert list(map(plain, trunk.turns)) == list(map(plain, same.turns))
        assert trunk.results == same.results
    assert len(others) == 2 * sum(len(branched_turns(e, config, 3)) for e in trunks)
    assert {e.turns[-1].step - e.turns[e.branch[0]].step for e in others} == {0}


def test_agents_alone_are_graded_on_the_task_and_change_no_other_sample():
    rollout, engine = rollout_of("sequential", 0, by_branch, env=lambda: Slow(1))
    plainly = rollout.play(SAMPLES, 3).episodes
    engine.requests.clear()
    trunks, others, _ = played(rollout, "solo")
    assert said(trunks) == said(plainly)
    assert len(others) == 2 * 3 * 6  # Each task has two samples of each of three agents.
    for e in others:
        assert [turn.name for turn in e.turns] == [small.NAMES[e.branch[1]]]
        assert e.turns[0].answers and not e.turns[0].sees
    for trunk in trunks:
        for agent, mean in trunk.alone.items():
            own = [e.reward for e in others if e[:2] == trunk[:2] and e.branch[1] == agent]
            assert len(own) == 2 and mean == pytest.approx(np.mean(own))
    assert len({request.key for request in engine.requests}) == len(engine.requests)


@pytest.mark.slow
@pytest.mark.parametrize(("credit", "more"), [("siblings", {"branch_at": "every"}), ("solo", {})])
def test_a_budget_of_leaves_or_tokens_is_that_of_a_step_without_branches(credit, more):
    samples = [Sample(i // 2, i // 2, i % 2) for i in range(60)]

    def cost(budget: str) -> tuple[int, int]:
        rollout, _ = rollout_of("sequential", 0, by_branch, env=lambda: Slow(1))
        given = {"branches": 1, "episodes": 60, "branch_budget": budget, **more}
        trunks, others, _ = played(rollout, credit, samples, **given)
        turns = [t for e in (*trunks, *others) for t in e.turns if not t.replayed]
        return len(trunks) + len(others), sum(len(turn.action) for turn in turns)

    rollout, _ = rollout_of("sequential", 0, by_branch, env=lambda: Slow(1))
    without = rollout.play(samples, 3).episodes
    tokens = sum(len(t.action) for e in without for t in e.turns)
    assert 48 <= cost("leaves")[0] <= 60 < cost("none")[0]
    assert 0.6 * tokens < cost("tokens")[1] < 1.3 * tokens < cost("none")[1]


class Counted:
    """Three steps, of which the last pays by all that was said; counts those it is asked for."""

    taken = 0

    def reset(self, seed: int) -> str:
        self._said: list[int] = []
        return f"t{seed}"

    def step(self, turns):
        type(self).taken += 1
        self._said.append(sum(len(turn.text) for turn in turns))
        over = len(self._said) == 3
        return StepResult(f"s{self._said}", float(sum(self._said)) if over else 0.0, over)


class Restored(Counted):
    def snapshot(self):
        return list(self._said)

    def restore(self, value):
        self._said = list(value)


@pytest.mark.slow
def test_where_an_environment_offers_snapshots_no_step_is_taken_again():
    def episodes(env):
        env.taken = 0
        rollout, _ = rollout_of("sequential", 0, by_branch, env=env, snapshots=True)
        trunks, others, _ = played(rollout, "siblings", branch_at="every")
        return [*trunks, *others], env.taken

    again, stepped = episodes(Counted)
    restored, taken = episodes(Restored)
    assert said(again) == said(restored)
    assert [e.reward for e in again] == [e.reward for e in restored]
    steps = [len({t.step for t in e.turns if not t.replayed}) for e in restored]
    assert taken == sum(steps) < stepped == 3 * len(again)


class Failing(Slow):
    def step(self, turns):
        if self._seed == 0:
            raise OSError("gone")
        return super().step(turns)


@pytest.mark.parametrize("more", [{"branch_budget": "leaves"}, BEST])
def test_a_task_that_fails_ends_no_step_though_it_is_played_with_few_others(more):
    how = {"env": lambda: Failing(1), "max_failed": 0.25}
    rollout, _ = rollout_of("sequential", 0, by_branch, **how)
    tasks = [Sample(i, i) for i in range(8)]
    given = {"episodes": 8, "group_size": 1, "branch_at": "every", **more}
    trunks, others, _ = played(rollout, "tree", tasks, **given)
    assert trunks and others and 0 not in {e.index for e in (*trunks, *others)}
    with pytest.raises((EpisodesFailed, BadInput)):
        played(rollout, "tree", [Sample(0, i) for i in range(8)], **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("credit", "given"),
    [
        ("solo", {"branches": 3}),
        ("siblings", {"branch_at": "planner,verifier"}),
        ("tree", {"branch_at": "every", "branch_continue": "random"}),
    ],
)
def test_a_plan_counts_the_turns_that_are_played_and_learned(credit, given):
    rollout, engine = rollout_of("sequential", 0, by_branch, env=lambda: Slow(1))
    samples = [Sample(i // 2, i // 2, i % 2) for i in range(60)]
    trunks, others, config = played(rollout, credit, samples, episodes=60, **given)
    work = step_work(config, rollout.team, "sequential")
    assert work.turns == pytest.approx(len(engine.requests), rel=0.08)  # where branches are drawn
    episodes, _ = learnable([(e, np.zeros(len(e.turns))) for e in [*trunks, *others]])
    turns = 60 * (len(work.owners) + len(work.branched))
    assert turns == sum(len(e.turns) for e in episodes)
