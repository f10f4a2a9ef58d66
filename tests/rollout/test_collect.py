"""Which tasks a step plays, and which episodes it learns from."""

from __future__ import annotations

import small

from marft_jax.learning.credit import groups_with_signal, make_credit
from marft_jax.learning.settings import Appo
from marft_jax.rollout.collect import collect, samples_of
from marft_jax.settings.config import Run
from marft_jax.types import FailedEpisode, Played, Sample


def settings(**algo):
    return small.config(algo=Appo(**{"episodes": 6, "group_size": 3, **algo}))


class Player:
    """Pays 1 where ``rule(task, member)`` says so; notes what it was asked."""

    def __init__(self, rule, failing=()):
        self.rule, self.failing, self.asked = rule, failing, []

    def play(self, samples, step):
        self.asked.append(([sample.index for sample in samples], step))
        played = Played([], [], 0.5)
        for sample in samples:
            task, group, member = sample[:3]
            reward = float(self.rule(task, member))
            episode = small.episode(task, [small.turn(0, [1], [2])], [reward])
            if (task, member) in self.failing:
                played.failed.append(FailedEpisode(*sample[:3], "a bug"))
            else:
                played.episodes.append(episode._replace(group=group, member=member))
        return played


def play(config, player, step=0):
    credit = make_credit(config.algo, small.team())
    return collect(player, credit, groups_with_signal, config, step)


def tasks_of(config, step, refill=0):
    return [sample.index for sample in samples_of(config, step, refill)]


def test_the_members_of_a_group_share_a_task_and_steps_do_not():
    config = settings()
    assert samples_of(config, 1) == [Sample(2 + g, g, m) for g in range(2) for m in range(3)]
    assert tasks_of(config, 0) == [0, 0, 0, 1, 1, 1]
    assert tasks_of(config, 7) == [14, 14, 14, 15, 15, 15]
    assert tasks_of(settings(group_size=1), 1) == [6, 7, 8, 9, 10, 11]
    seeded = small.config(run=Run(seed=2), algo=config.algo)
    assert set(tasks_of(seeded, 0)).isdisjoint(range(10_000))


def test_every_draw_of_every_step_has_tasks_of_its_own():
    config = settings(dynamic_sampling=True, max_refills=2)
    draws = [tasks_of(config, step, refill) for step in range(4) for refill in range(3)]
    drawn = [task for draw in draws for task in set(draw)]
    assert sorted(drawn) == list(range(24))


def test_without_dynamic_sampling_all_episodes_are_learned_from():
    player = Player(lambda task, member: True)
    got = play(settings(), player, step=3)
    assert player.asked == [([6, 6, 6, 7, 7, 7], 3)]
    assert [e.index for e in got.episodes] == player.asked[0][0]
    assert got.dropped_groups == 0 and got.waited_s == 0.5


def test_groups_without_signal_are_dropped_and_replaced():
    """Of the tasks 0, 1 | 2 | 4 only 1 and 4 divide their samples."""
    player = Player(lambda task, member: task in (1, 4) and member == 0)
    got = play(settings(dynamic_sampling=True, max_refills=5), player)
    assert player.asked == [([0, 0, 0, 1, 1, 1], 0), ([2, 2, 2], 0), ([4, 4, 4], 0)]
    assert [e.index for e in got.episodes] == [1, 1, 1, 4, 4, 4]
    assert [e.group for e in got.episodes] == [1, 1, 1, 4, 4, 4]
    assert [float(r[0]) for r in got.rewards] == [1, 0, 0, 1, 0, 0]
    assert len(got.played) == len(got.played_rewards) == 12
    assert got.dropped_groups == 2 and got.waited_s == 1.5


def test_where_nothing_has_signal_the_first_groups_stay():
    got = play(settings(dynamic_sampling=True, max_refills=2), Player(lambda *_: True))
    assert [e.index for e in got.episodes] == [0, 0, 0, 1, 1, 1]
    assert len(got.played) == 18 and got.dropped_groups == 4


def test_a_group_that_lost_members_is_judged_by_the_others():
    failing = [(0, 0), (1, 1), (1, 2)]
    player = Player(lambda task, member: member == 0, failing)
    got = play(settings(dynamic_sampling=True, max_refills=1), player)
    assert len(player.asked[1][0]) == 6  # 0 earned the same twice, of 1 there is one left
    assert {e.index for e in got.episodes} == {2, 3} and got.failed == 3
