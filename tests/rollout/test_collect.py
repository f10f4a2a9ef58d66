"""Which tasks a step plays, and which episodes it learns from."""

from __future__ import annotations

import numpy as np
import pytest
import small

from marft_jax.config import Algo, Config, Run
from marft_jax.learning.credit import make_credit
from marft_jax.rollout.collect import collect, tasks_of, with_signal


def settings(**algo):
    return Config(algo=Algo(**{"episodes": 6, "group_size": 3, **algo}))


class Player:
    """Pays 1 where ``rule(task, member)`` says so; notes what it was asked."""

    waited_s = 0.5

    def __init__(self, rule, failing=()):
        self.rule, self.failing, self.asked = rule, failing, []

    def play(self, tasks, step, *, first=0):
        self.asked.append((list(tasks), step, first))
        members = np.arange(len(tasks)) % 3
        return [
            small.episode(task, [small.turn(0, [1], [2])], [float(self.rule(task, member))])
            for task, member in zip(tasks, members, strict=True)
            if (task, member) not in self.failing
        ]


def play(config, player, step=0):
    return collect(player, make_credit(config.algo, small.team()), config, step)


def test_the_members_of_a_group_share_a_task_and_steps_do_not():
    config = settings()
    assert tasks_of(config, 0) == [0, 0, 0, 1, 1, 1]
    assert tasks_of(config, 7) == [14, 14, 14, 15, 15, 15]
    assert tasks_of(settings(group_size=1), 1) == [6, 7, 8, 9, 10, 11]
    seeded = Config(run=Run(seed=2), algo=config.algo)
    assert set(tasks_of(seeded, 0)).isdisjoint(range(10_000))


def test_every_draw_of_every_step_has_tasks_of_its_own():
    config = settings(dynamic_sampling=True, max_refills=2)
    draws = [tasks_of(config, step, refill) for step in range(4) for refill in range(3)]
    drawn = [task for draw in draws for task in set(draw)]
    assert sorted(drawn) == list(range(24))


def test_without_dynamic_sampling_all_episodes_are_learned_from():
    player = Player(lambda task, member: True)
    got = play(settings(), player, step=3)
    assert player.asked == [([6, 6, 6, 7, 7, 7], 3, 0)]
    assert [e.index for e in got.episodes] == player.asked[0][0]
    assert got.dropped_groups == 0 and got.waited_s == 0.5


def test_groups_without_signal_are_dropped_and_replaced():
    """Of the tasks 0, 1 | 2 | 4 only 1 and 4 divide their samples."""
    player = Player(lambda task, member: task in (1, 4) and member == 0)
    got = play(settings(dynamic_sampling=True, max_refills=5), player)
    assert player.asked == [
        ([0, 0, 0, 1, 1, 1], 0, 0),
        ([2, 2, 2], 0, 6),
        ([4, 4, 4], 0, 12),
    ]
    assert [e.index for e in got.episodes] == [1, 1, 1, 4, 4, 4]
    assert [float(r[0]) for r in got.rewards] == [1, 0, 0, 1, 0, 0]
    assert len(got.played) == len(got.played_rewards) == 12
    assert got.dropped_groups == 2 and got.waited_s == 1.5


def test_refills_end():
    player = Player(lambda task, member: task == 1 and member == 0)
    got = play(settings(dynamic_sampling=True, max_refills=1), player)
    assert len(player.asked) == 2
    assert {e.index for e in got.episodes} == {1} and got.dropped_groups == 2


def test_where_nothing_has_signal_the_first_groups_stay():
    got = play(settings(dynamic_sampling=True, max_refills=2), Player(lambda *_: True))
    assert [e.index for e in got.episodes] == [0, 0, 0, 1, 1, 1]
    assert len(got.played) == 18 and got.dropped_groups == 4


def test_a_group_that_lost_members_is_judged_by_the_others():
    failing = [(0, 0), (1, 1), (1, 2)]
    player = Player(lambda task, member: member == 0, failing)
    got = play(settings(dynamic_sampling=True, max_refills=1), player)
    assert len(player.asked[1][0]) == 6  # 0 earned the same twice, of 1 there is one left
    assert {e.index for e in got.episodes} == {2, 3}


@pytest.mark.parametrize(
    ("samples", "differ"),
    [
        ([[0.1, 0.5], [0.5, 0.1]], True),  # the same total
        ([[0.1, 0.5], [0.1, 0.5]], False),
        ([[0.5], [0.5, 0.0]], True),  # the second's last turn was worth less than the task
        ([[0.5], [0.0, 0.5]], False),  # each turn led to the same
        ([[0.5], [0.5 + 1e-9]], False),
        ([[0.1, 0.5]], False),  # nothing to compare with
    ],
)
def test_signal_is_what_turns_of_the_same_place_differ_in(samples, differ):
    episodes = [
        small.episode(3, [small.turn(a, [1], [2]) for a in range(len(rewards))], [1.0])
        for rewards in samples
    ]
    rewards = [np.array(rewards, np.float32) for rewards in samples]
    assert with_signal(episodes, rewards) == ({3} if differ else set())
