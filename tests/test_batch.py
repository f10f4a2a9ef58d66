"""Episodes to rows: nesting, packing, minibatches, and the chain of decisions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import small

from marft_jax import batch as batch_lib
from marft_jax import config as config_lib

ALGO = config_lib.Algo(minibatches=1, microbatch_tokens=256)


def build(episodes, level="action", owners=(0, 1, 2), algo=ALGO, **settings):
    rewards = [np.arange(1, len(e.turns) + 1, dtype=np.float32) for e in episodes]
    return batch_lib.build(episodes, rewards, owners, algo, level, **settings)


def test_turns_of_one_owner_with_nested_histories_share_a_row():
    first = small.turn(0, [1, 2, 3], [4, 5])
    second = small.turn(1, [1, 2, 3, 4, 5, 6], [7, 8, 9])
    episode = small.episode(0, [first, second], [1.0])
    shared = build([episode], owners=(0, 0))
    apart = build([episode], owners=(0, 1))
    assert shared.rows.segments_UBT.max() == 1 and (shared.rows.segments_UBT > 0).sum() == 8
    assert (apart.rows.segments_UBT > 0).sum() == 4 + 8
    targets = shared.rows.targets_UBA[shared.rows.mask_UBA > 0].tolist()
    assert targets == [4, 5, 7, 8, 9]


def test_the_token_before_each_action_token_predicts_it():
    episodes = small.random_episodes(5, agents=3)
    rows = build(episodes).rows
    for u, b, a in np.argwhere(rows.mask_UBA > 0):
        at = rows.index_UBA[u, b, a]
        if (
            rows.segments_UBT[u, b, (at + 1) % rows.tokens_UBT.shape[2]]
            == (rows.segments_UBT[u, b, at])
            and at + 1 < rows.tokens_UBT.shape[2]
        ):
            assert rows.tokens_UBT[u, b, at + 1] == rows.targets_UBA[u, b, a]


@pytest.mark.parametrize("level", ["action", "token"])
def test_the_chain_links_every_decision_once_in_acting_order(level):
    episodes = small.random_episodes(5, agents=3, steps=2)
    batch = build(episodes, level)
    rows, chain = batch.rows, batch.chain
    mask = rows.turn_mask_UBK if level == "action" else rows.mask_UBA
    linked = chain.unit_EJ[chain.mask_EJ > 0]
    assert sorted(linked) == np.flatnonzero(mask.reshape(-1)).tolist()
    flat_link = chain.link_UBX.reshape(-1)
    for e, episode in enumerate(episodes):
        units = chain.unit_EJ[e, chain.mask_EJ[e] > 0]
        assert (flat_link[units] == e * chain.unit_EJ.shape[1] + np.arange(len(units))).all()
        if level == "token":
            written = np.concatenate([turn.action for turn in episode.turns])
            assert rows.targets_UBA.reshape(-1)[units].tolist() == written.tolist()
        else:
            agents = [turn.agent for turn in episode.turns]
            assert rows.agent_UBK.reshape(-1)[units].tolist() == agents
        assert chain.continues_EJ[e].sum() == len(units) - 1


def test_a_turns_reward_sits_on_its_last_token():
    [episode] = small.random_episodes(1)
    chain = build([episode], "token").chain
    lengths = [len(turn.action) for turn in episode.turns]
    paid = np.zeros(chain.rewards_EJ.shape[1])
    paid[lengths[0] - 1], paid[sum(lengths) - 1] = 1, 2
    assert chain.rewards_EJ[0].tolist() == paid.tolist()


def test_long_batches_become_several_microbatches_of_bounded_size():
    episodes = small.random_episodes(40, agents=3)
    batch = build(episodes, algo=dataclasses.replace(ALGO, minibatches=4))
    _, b, t = batch.rows.tokens_UBT.shape
    assert b * t <= 256
    assert batch.micros % 4 == 0
    filled = (batch.rows.segments_UBT > 0).any((1, 2))
    assert filled[: batch.micros].all() and not filled[batch.micros :].any()
    assert batch.rows.turn_mask_UBK.sum() == 120


def test_rows_of_a_microbatch_divide_among_the_devices():
    batch = build(small.random_episodes(5), shards=8)
    assert batch.rows.tokens_UBT.shape[1] % 8 == 0


def test_the_seed_decides_which_rows_share_a_minibatch():
    episodes = small.random_episodes(30)
    same = [build(episodes, seed=(0, 1)).rows.tokens_UBT for _ in range(2)]
    other = build(episodes, seed=(0, 2)).rows.tokens_UBT
    assert np.array_equal(*same) and not np.array_equal(same[0], other)


def test_packing_wastes_little():
    assert batch_lib.padding(build(small.random_episodes(60, agents=3))) < 0.35
