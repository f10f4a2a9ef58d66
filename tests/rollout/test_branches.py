"""A branch repeats its trunk as far as its turn, and is sampled anew from there."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import small
from scripted import Scripted
from test_recorded import DIAMOND, THREE, Lookup

from marft_jax.background import DaemonThreads
from marft_jax.errors import BadInput
from marft_jax.rollout.rollout import Rollout
from marft_jax.team.team_files import Blueprint
from marft_jax.team.workflows import find_workflow
from marft_jax.types import Branch, Sample, StepResult

WORDS = ["<call>solver</call>", "look?", "b" * 40, "12", "so 5", "ok é"]
TOPOLOGIES = list(itertools.product(["sequential", "dag", "debate", "orchestrated"], [1, 0]))


def by_place(request) -> str:
    """The same text in a branch as in its trunk."""
    return WORDS[sum(request.key[:6]) * 7 % len(WORDS)]


def by_branch(request) -> str:
    return WORDS[sum(request.key) * 7 % len(WORDS)]


def rollout_of(workflow: str, shared: int, speak, env=lambda: Lookup(2), **more):
    lead = "planner" if workflow == "orchestrated" else None
    blueprint = Blueprint(THREE, workflow, *DIAMOND, orchestrator=lead)
    settings = {"max_new_tokens": 30, "temperature": 0.7, "context": 4000}
    team = small.team_of(blueprint, team_context="shared" if shared else "own", **settings)
    engine = Scripted(speak)
    return Rollout(engine, team, find_workflow(workflow), env, DaemonThreads(), **more), engine


def branches_of(episodes, number: int = 1) -> list[Sample]:
    """A branch of each, at another turn each time."""
    return [
        Sample(e.index, e.group, e.member, Branch(e, e.index * 5 % len(e.turns), number))
        for e in episodes
    ]


def plain(turn):
    arrays = {name: getattr(turn, name).tolist() for name in ("prompt", "action", "logprobs")}
    return turn._replace(replayed=False, **arrays)


def as_written(turn):
    """Without what the environment, or a debate's majority, makes of it later."""
    return plain(turn)._replace(answers=False)


@pytest.mark.slow
@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.release)])
@pytest.mark.parametrize(("workflow", "shared"), TOPOLOGIES)
def test_branches_in_which_the_same_is_sampled_equal_their_trunks(workflow, shared, count):
    """200 of all topologies: half of them where agents share a conversation."""
    rollout, engine = rollout_of(workflow, shared, by_place)
    trunks = rollout.play([Sample(i, i) for i in range(count)], 0).episodes
    before = len(engine.requests)
    branches = rollout.play(branches_of(trunks), 0).episodes
    assert len(branches) == len(trunks) == count
    for trunk, branch in zip(trunks, branches, strict=True):
        assert list(map(plain, trunk.turns)) == list(map(plain, branch.turns))
        assert trunk.results == branch.results and trunk.task == branch.task
        np.testing.assert_array_equal(trunk.dependency, branch.dependency)
        assert not any(turn.replayed for turn in trunk.turns) and trunk.branch is None
        assert branch.branch == (trunk.index * 5 % len(trunk.turns), 1)
        assert not branch.turns[branch.branch[0]].replayed
    sampled = [turn for episode in branches for turn in episode.turns if not turn.replayed]
    assert len(engine.requests) - before == len(sampled)
    assert len(sampled) < sum(len(trunk.turns) for trunk in trunks)


@pytest.mark.slow
@pytest.mark.parametrize(("workflow", "shared"), TOPOLOGIES)
def test_what_comes_before_and_beside_the_turn_stays_as_it_was(workflow, shared):
    rollout, _ = rollout_of(workflow, shared, by_branch)
    trunks = rollout.play([Sample(i, i) for i in range(8)], 0).episodes
    ends = set()
    for number in (1, 2):
        branches = rollout.play(branches_of(trunks, number), 0).episodes
        for trunk, branch in zip(trunks, branches, strict=True):
            turn, _ = branch.branch
            old = [(t.agent, t.text, t.prompt.tolist()) for t in trunk.turns[turn:]]
            for k, again in enumerate(branch.turns):
                if k < turn:
                    assert again.replayed and as_written(again) == as_written(trunk.turns[k])
                elif again.replayed:  # of the same layer; other agents may have called more tools
                    assert (again.agent, again.text, again.prompt.tolist()) in old
            ends.add((trunk.index, branch.turns[turn].text, trunk.turns[turn].text))
    assert any(new != old for _, new, old in ends)


def test_siblings_of_a_layer_stay_and_only_what_follows_is_sampled():
    rollout, engine = rollout_of("dag", 0, by_branch, env=lambda: Plain())
    [trunk] = rollout.play([Sample(3, 0)], 0).episodes  # plan, left and right, end
    [branch] = rollout.play([Sample(3, 0, 0, Branch(trunk, 1, 1))], 0).episodes
    assert [turn.replayed for turn in branch.turns] == [True, False, True, False]
    keys = {request.key[6:] for request in engine.requests}
    assert keys == {(0, 0), (1, 1)}


class Plain:
    def reset(self, seed: int) -> str:
        return f"t{seed}"

    def step(self, turns):
        return StepResult("", 0.5, True, {"score": float("nan")})


class Forgetful(Plain):
    """Answers each time otherwise."""

    times = 0

    def step(self, turns):
        type(self).times += 1
        return StepResult(f"answer {self.times}", 0.0, self.times % 2 == 0)


def test_an_environment_that_answers_otherwise_the_second_time_is_named():
    rollout, _ = rollout_of("sequential", 0, by_place, env=Forgetful)
    [trunk] = rollout.play([Sample(7, 0)], 0).episodes
    last = len(trunk.turns) - 1
    with pytest.raises(BadInput, match="task 7, played again.*answer to a step was .*answer 1"):
        rollout.play([Sample(7, 0, 0, Branch(trunk, last, 1))], 0)
