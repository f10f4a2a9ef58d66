"""From episodes to packed rows: every action token once, in acting order, apart from the others."""

from __future__ import annotations

import dataclasses

import bounds
import jax
import numpy as np
import pytest
import small
from hypothesis import given, settings
from hypothesis import strategies as st

from marft_jax.learning import batch as batch_lib
from marft_jax.learning.settings import Appo
from marft_jax.learning.team_data import data_of
from marft_jax.parallel.ladder import bucket

ALGO = Appo(ratio="sum", minibatches=1, microbatch_tokens=128)


def build(episodes, level="action", owners=(0, 1, 2), algo=ALGO, **how):
    return batch_lib.build(episodes, small.paid(episodes), owners, algo, level, **how)


def units(x, batch):
    """Numbers of decisions, in acting order: one array per episode."""
    flat, chain = x.reshape(-1), batch.chain
    return [flat[small.places_EJ(batch)[e, : int(m.sum())]] for e, m in enumerate(chain.mask_EJ)]


@pytest.fixture(scope="module")
def episodes():
    return small.random_episodes(9, agents=3, steps=2, longest=5)


def shared_history():
    """Three turns through one growing sequence: each prompt begins with all before it."""
    first = small.turn(0, [1, 2], [3, 4])
    second = small.turn(1, [1, 2, 3, 4, 50], [6], sees=(0,))
    third = small.turn(0, [1, 2, 3, 4, 50, 6, 51], [7, 8, 9], sees=(0, 1))
    return small.episode(0, [first, second, third], [1.0])


def used(rows):
    """Which rows have sequences."""
    return (rows.tokens.owners_BT >= 0).any(-1)


def ends(rows):
    """The tokens of each sequence, where none share any, from few to many."""
    last = rows.tokens.last_reader_BT
    at = np.stack(np.broadcast_arrays(*np.indices(last.shape)[:2], last), -1)
    return sorted(np.unique(at[rows.tokens.owners_BT >= 0], axis=0, return_counts=True)[1].tolist())


# Rows.


def test_nested_turns_of_one_owner_are_one_sequence():
    batch = build([shared_history()], owners=(0, 0))
    r = small.rows_of(batch)
    assert ends(r) == [9]
    [row] = r.tokens.ids_BT[used(r)]
    assert row[:9].tolist() == [1, 2, 3, 4, 50, 6, 51, 7, 8]
    assert r.actions.targets_BA[r.actions.mask_BA > 0].tolist() == [3, 4, 6, 7, 8, 9]
    assert r.actions.index_BA[r.actions.mask_BA > 0].tolist() == [1, 2, 4, 6, 7, 8]
    assert r.actions.turn_BA[r.actions.mask_BA > 0].tolist() == [0, 0, 1, 2, 2, 2]
    assert r.turns.agent_BK[r.turns.mask_BK > 0].tolist() == [0, 1, 0]


def test_nested_turns_of_other_owners_stay_apart():
    r = small.rows_of(build([shared_history()], owners=(0, 1)))
    assert len(ends(r)) == 2 and {*r.tokens.owners_BT.flat} == {-1, 0, 1}


def test_two_answers_to_one_prompt_stay_apart():
    turns = [small.turn(0, [1, 2], [3]), small.turn(0, [1, 2], [3]), small.turn(0, [1, 2], [4])]
    r = small.rows_of(build([small.episode(0, turns, [1.0])]))
    assert ends(r) == [2, 2, 2]


def test_sequences_of_other_episodes_are_never_nested():
    first = small.episode(0, [small.turn(0, [1, 2], [3])], [1.0])
    second = small.episode(1, [small.turn(0, [1, 2, 3, 4], [5])], [1.0])
    assert ends(small.rows_of(build([first, second]))) == [2, 4]


@pytest.mark.parametrize("level", ["action", "token"])
def test_every_action_token_is_there_once_behind_its_own_prompt(episodes, level):
    check_what_is_read(build(episodes, level), episodes)


def check_what_is_read(batch, episodes):
    """Each action token is predicted where the turn's own tokens are read, and nothing else."""
    r = small.rows_of(batch)
    turns = [t for e in episodes for t in e.turns]
    assert r.actions.mask_BA.sum() == sum(len(t.action) for t in turns)
    assert r.turns.mask_BK.sum() == len(turns)
    rebuilt = []
    for u, b, a in zip(*np.nonzero(r.actions.mask_BA), strict=True):
        i = r.actions.index_BA[u, b, a]
        before = r.tokens.ids_BT[u, b, : i + 1][r.tokens.last_reader_BT[u, b, : i + 1] >= i]
        owner, position = r.tokens.owners_BT[u, b, i], r.tokens.positions_BT[u, b, i]
        assert position == len(before) - 1
        rebuilt.append((int(owner), *before.tolist(), int(r.actions.targets_BA[u, b, a])))
    spots = [(t, i) for t in turns for i in range(1, len(t.action) + 1)]
    expected = [(t.agent, *t.prompt.tolist(), *t.action[:i].tolist()) for t, i in spots]
    assert sorted(rebuilt) == sorted(expected)


# Turns that begin alike.


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.slow
def test_shared_turns_read_what_they_read_apart(data):
    """Few kinds of token, so that many turns begin alike, and some are the same."""

    def turn():
        tokens = st.lists(st.integers(0, 2), min_size=1, max_size=9)
        return small.turn(data.draw(st.integers(0, 2)), data.draw(tokens), data.draw(tokens))

    count = data.draw(st.integers(1, 12))
    episodes = [
        small.episode(e, [turn() for _ in range(data.draw(st.integers(1, 3)))], [1.0])
        for e in range(count)
    ]
    apart, shared = (build(episodes, share=share) for share in (False, True))
    check_what_is_read(shared, episodes)
    filled = [(small.rows_of(batch).tokens.owners_BT >= 0).sum() for batch in (apart, shared)]
    assert apart.prefix_shared == 0 and filled[1] == filled[0] - shared.prefix_shared
    sames = [small.rows_of(batch).tokens.ids_BT.shape for batch in (apart, shared)]
    assert sames[1][1] * sames[1][2] <= max(ALGO.microbatch_tokens, sames[1][2])


def test_what_turns_begin_with_stands_in_their_row_once():
    turns = [[1, 2, 3, 4, *end] for end in ([5], [5, 6], [7], [7], [5, 8])]
    episodes = [small.episode(0, [small.turn(0, ids, [9])], [1.0]) for ids in turns]
    batch = build(episodes, share=True)
    [row] = np.argwhere(used(small.rows_of(batch))).tolist()
    n = 4 + 1 + 2 + 1  # the beginning; 5 and what follows it twice; 7, which two have
    tokens = small.rows_of(batch).tokens
    assert tokens.ids_BT[*row, :n].tolist() == [1, 2, 3, 4, 5, 6, 8, 7]
    assert tokens.last_reader_BT[*row, :n].tolist() == [7] * 4 + [6, 5, 6, 7]
    assert tokens.positions_BT[*row, :n].tolist() == [0, 1, 2, 3, 4, 5, 5, 4]
    assert batch.prefix_shared == 5 + 6 + 5 + 5 + 6 - n


def test_other_owners_and_other_agents_do_not_share_a_beginning():
    first, second = (small.episode(a, [small.turn(a, [1, 2, 3], [4])], [1.0]) for a in (0, 1))
    assert build([first, second], share=True, owners=(0, 1)).prefix_shared == 0
    for both in ([first, second], [second, first]):
        assert build(both, share=True, owners=(0, 0)).prefix_shared == 0
    assert build([first, first], share=True).prefix_shared == 3


def test_samples_of_a_task_make_wider_rows_while_every_minibatch_has_some():
    rng = np.random.default_rng(0)
    tasks = rng.integers(0, 99, (8, 200))
    episodes = [
        small.episode(e // 8, [small.turn(0, tasks[e // 8], rng.integers(0, 99, 50))], [1.0])
        for e in range(64)
    ]
    algo = dataclasses.replace(ALGO, microbatch_tokens=4096, minibatches=4)
    apart, shared = (build(episodes, algo=algo, share=share) for share in (False, True))
    assert small.rows_of(shared).tokens.ids_BT.shape[2] > 256
    tokens = [small.rows_of(batch).tokens.ids_BT.size for batch in (apart, shared)]
    assert tokens[1] <= tokens[0] / 2
    few = build(episodes[:8], algo=algo, share=True)
    assert used(small.rows_of(few)).any(1).all() and len(small.rows_of(few).tokens.ids_BT) == 4


def test_a_turn_carries_its_own_numbers(episodes):
    hot = [
        e._replace(turns=[t._replace(temperature=0.5 + t.agent) for t in e.turns]) for e in episodes
    ]
    for ratio in ("sum", "token", "word"):
        batch = build(hot, algo=dataclasses.replace(ALGO, ratio=ratio))
        r = small.rows_of(batch)
        for e, episode in enumerate(hot):
            own = {x.removesuffix("_BK"): units(y, batch)[e] for x, y in r.turns._asdict().items()}
            lengths = [len(t.action) for t in episode.turns]
            words = [len(t.text.split()) for t in episode.turns]
            divisor = {"sum": [1] * len(lengths), "token": lengths, "word": words}[ratio]
            assert own["divisor"].tolist() == divisor and own["tokens"].tolist() == lengths
            places = small.places_EJ(batch)[e, : len(lengths)] // r.turns.prompt_end_BK.shape[-1]
            rows = r.tokens.ids_BT.reshape(-1, r.tokens.ids_BT.shape[-1])
            before = rows[places, own["prompt_end"]].tolist()
            assert before == [t.prompt[-1] for t in episode.turns]
            assert own["agent"].tolist() == [t.agent for t in episode.turns]
    batch = build(hot, "token")
    actions = small.rows_of(batch).actions
    for e, episode in enumerate(hot):
        heat = np.concatenate([[t.temperature] * len(t.action) for t in episode.turns])
        logprobs = np.concatenate([t.logprobs for t in episode.turns])
        np.testing.assert_array_equal(units(actions.temperature_BA, batch)[e], heat)
        np.testing.assert_array_equal(units(actions.behaviour_BA, batch)[e], logprobs)


def test_the_prompts_of_nested_turns_reach_to_their_last_ones_first_token():
    [datum] = data_of([shared_history()], {0: 0, 1: 0}, "sum").data
    prompt = datum.prompt()
    assert prompt.ids.tolist() == [1, 2, 3, 4, 50, 6, 51]
    assert prompt.targets.tolist() == [3, 4, 6, 7] and prompt.units.tolist() == [0, 0, 1, 2]
    assert prompt.labels.tolist() == datum.labels[:7].tolist()


def test_minibatches_have_about_as_many_tokens():
    """Of episodes with equal decisions, of which half are ten times as long."""
    rng = np.random.default_rng(0)
    episodes = [
        small.episode(e, [small.turn(0, rng.integers(0, 99, 20 if e % 2 else 200), [1])], [1.0])
        for e in range(16)
    ]
    for seed in range(4):
        algo = dataclasses.replace(ALGO, minibatches=4, epochs=1, microbatch_tokens=1024)
        batch = build(episodes, algo=algo, seed=(0, seed))
        read = (small.rows_of(batch).tokens.owners_BT >= 0).reshape(4, -1).sum(1)
        assert read.max() == read.min()


def test_ids_equal_to_padding_are_not_taken_for_it():
    turns = [small.turn(0, [0, 0, 0], [0, 0]), small.turn(1, [256, 257], [257, 256, 0])]
    r = small.rows_of(build([small.episode(0, turns, [1.0])]))
    assert r.actions.mask_BA.sum() == 5 and (r.tokens.owners_BT >= 0).sum() == 4 + 4


# The chain.


@pytest.mark.parametrize("level", ["action", "token"])
def test_chains_run_in_acting_order_and_link_every_decision_once(episodes, level):
    batch = build(episodes, level)
    chain, r = batch.chain, small.rows_of(batch)
    mask = r.turns.mask_BK if level == "action" else r.actions.mask_BA
    linked = small.places_EJ(batch)[chain.mask_EJ > 0]
    assert len(set(linked.tolist())) == len(linked) == mask.sum()
    assert (mask.reshape(-1)[linked] == 1).all()
    assert small.decisions_shape(batch) == mask.shape
    for e, episode in enumerate(episodes):
        n = int(chain.mask_EJ[e].sum())
        assert chain.mask_EJ[e].tolist() == [1] * n + [0] * (chain.mask_EJ.shape[1] - n)
        if level == "token":
            written = np.concatenate([t.action for t in episode.turns])
            np.testing.assert_array_equal(units(r.actions.targets_BA, batch)[e], written)
        else:
            agents = [t.agent for t in episode.turns]
            assert units(r.turns.agent_BK, batch)[e].tolist() == agents


def test_a_turns_reward_sits_on_its_last_token(episodes):
    chain = build(episodes, "token").chain
    for e, episode in enumerate(episodes):
        expected = [
            reward if i == len(turn.action) - 1 else 0
            for turn, reward in zip(episode.turns, small.paid([episode])[0], strict=True)
            for i in range(len(turn.action))
        ]
        assert chain.rewards_EJ[e, : len(expected)].tolist() == expected
        assert not chain.rewards_EJ[e, len(expected) :].any()


@pytest.mark.parametrize("level", ["action", "token"])
def test_every_turn_weighs_one_and_knows_its_agent_group_and_number(level):
    episodes = small.random_episodes(6, agents=2, steps=2, longest=5, group=3)
    chain = build(episodes, level).chain
    places = {}
    for e, episode in enumerate(episodes):
        lengths = [len(t.action) if level == "token" else 1 for t in episode.turns]
        ends = np.cumsum(lengths)
        for turn, n, end in zip(episode.turns, lengths, ends, strict=True):
            span = np.s_[e, end - n : end]
            bounds.close(chain.weight_EJ[span], 1 / n)
            assert set(chain.agent_EJ[span]) == {turn.agent}
            assert set(chain.group_EJ[span]) == {e // 3}
            [place] = set(chain.place_EJ[span])
            places.setdefault((turn.agent, turn.step), set()).add(int(place))
        assert not chain.weight_EJ[e, ends[-1] :].any()
    numbers = [number for place in places.values() for number in place]
    assert sorted(numbers) == [0, 1, 2, 3]


def test_a_token_belongs_to_the_agent_whose_turn_it_leads_to():
    r = small.rows_of(build([shared_history()], owners=(0, 0)))
    [row] = r.tokens.agents_BT[used(r)]
    assert row[:10].tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0, -1]


# How rows are cut.


@pytest.mark.parametrize("minibatches", [1, 2, 3])
@pytest.mark.parametrize("shards", [1, 4])
def test_rows_are_dealt_evenly_to_minibatches_and_shards(episodes, minibatches, shards):
    algo = dataclasses.replace(ALGO, minibatches=minibatches)
    batch = build(episodes, algo=algo, shards=shards)
    full = used(small.rows_of(batch)).sum(-1)
    u, b, width = small.rows_of(batch).tokens.ids_BT.shape
    assert u % minibatches == 0 and b % shards == 0
    assert b * width <= max(algo.microbatch_tokens, shards * width)
    assert full.min() > 0 and full.max() - full.min() <= 1


def talks(n, group, agents=2, seed=0):
    """Episodes of groups of that size; each agent's prompt begins with its own and the task."""
    rng, episodes = np.random.default_rng(seed), []
    tasks = rng.integers(0, 256, (n, 60))
    for e in range(n):
        acted = range(agents) if agents < 3 or e % 10 == 3 else range(2)
        turns = [
            small.turn(a, [a, *tasks[e // group]], rng.integers(0, 256, rng.integers(10, 30)))
            for a in acted
        ]
        episodes.append(small.episode(e // group, turns, [1.0]))
    return episodes


def decisions_of(batch, micros, owners):
    """How many decisions of each adapter these microbatches have."""
    r = small.rows_of(batch)
    weight_UBK = r.turns.mask_BK * (1 if batch.level == "action" else r.turns.tokens_BK)
    own, weights = r.turns.owner_BK[micros].ravel(), weight_UBK[micros].ravel()
    return np.bincount(own, weights, len(set(owners)))


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("level", ["action", "token"])
@pytest.mark.parametrize(
    ("n", "group", "agents", "minibatches"),
    [(64, 1, 2, 2), (16, 8, 2, 2), (24, 8, 2, 2), (40, 1, 3, 2), (64, 8, 2, 4), (6, 6, 2, 3)],
)
def test_minibatches_have_equal_parts_of_each_adapters_decisions(
    n, group, agents, minibatches, level, share
):
    """Also of an agent that acts in one episode of ten; of tokens, about as many."""
    algo = dataclasses.replace(ALGO, minibatches=minibatches, microbatch_tokens=4096)
    batch = build(talks(n, group, agents), level, algo=algo, share=share, seed=(0, 5))
    owners, micros = range(agents), np.arange(len(small.rows_of(batch).tokens.ids_BT))
    assert batch.blocks % minibatches == 0 and len(micros) % batch.blocks == 0
    per_block = [decisions_of(batch, part, owners) for part in np.split(micros, batch.blocks)]
    part = sum(per_block) / batch.blocks
    atol, rtol = (1, 0) if level == "action" else (30, 0.25)  # an action has up to 30 tokens
    for counts in per_block:
        np.testing.assert_allclose(counts, part, atol=atol, rtol=rtol)


def test_samples_of_a_task_stay_in_one_minibatch_as_they_share_a_prefix():
    """Of three tasks and two minibatches, the last one's samples are divided."""
    algo = dataclasses.replace(ALGO, minibatches=2, microbatch_tokens=4096)
    for n, divided in ((64, 0), (24, 1)):
        episodes = talks(n, 8)
        batch = build(episodes, algo=algo, share=True)
        blocks = {}
        for e, episode in enumerate(episodes):
            micro = np.unravel_index(small.places_EJ(batch)[e, 0], small.decisions_shape(batch))[0]
            block = int(micro) // (len(small.rows_of(batch).tokens.ids_BT) // batch.blocks)
            blocks.setdefault(episode.group, set()).add(block)
        assert sum(len(found) > 1 for found in blocks.values()) == divided


def test_the_seed_decides_which_rows_share_a_minibatch(episodes):
    seeds = (0, 1), (0, 1), (0, 2)
    one, same, other = (small.rows_of(build(episodes, seed=s)).tokens.ids_BT for s in seeds)
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize(
    "episodes, tokens, padding, share, optional",
    [(8, 1280, 0.15, False, 0), (64, 1280, 0.05, False, 0), (64, 8192, 0.1, False, 0),
     (64, 1280, 0.1, True, 0), (64, 8192, 0.2, True, 0), (16, 1280, 0.2, True, 0.5)],
)  # fmt: skip
@pytest.mark.slow
def test_a_run_of_varied_batches_pads_little_and_has_few_shapes(
    episodes, tokens, padding, share, optional
):
    """Also where the second agent acts in half of the episodes only."""
    rng, absent = np.random.default_rng(0), np.random.default_rng(1)
    algo = dataclasses.replace(ALGO, microbatch_tokens=tokens, episodes=episodes)
    met, idle = set(), []

    def turn(agent):
        return small.turn(agent, range(rng.integers(100, 300)), range(rng.integers(8, 64)))

    for _ in range(60):
        played = [[turn(0), turn(1)] for _ in range(episodes)]
        if share:  # eight samples of each task
            tasks = [rng.permutation(played[e - e % 8][0].prompt) for e in range(0, episodes, 8)]
            played = [
                [t._replace(prompt=tasks[e // 8], action=rng.permutation(t.action)) for t in turns]
                for e, turns in enumerate(played)
            ]
        acted = [turns[: 1 + (absent.random() >= optional)] for turns in played]
        made = [small.episode(i, t, [1.0]) for i, t in enumerate(acted)]
        batch = build(made, algo=algo, share=share)
        met.add(tuple(x.shape[1:] for x in jax.tree.leaves(small.rows_of(batch))))
        idle.append(np.mean(small.rows_of(batch).tokens.owners_BT < 0))
    assert len(met) <= 9 and np.mean(idle) < padding


@settings(deadline=None)
@given(st.integers(1, 5000), st.sampled_from([1, 8, 32]), st.sampled_from([1, 2, 4]))
def test_a_bucket_holds_what_it_must_and_the_ladder_is_short(n, least, rungs):
    size = bucket(n, least, rungs)
    assert size >= max(n, least)
    assert bucket(size, least, rungs) == size
    assert size <= max(least, n * (1 + 1 / rungs) + 1)
    assert len({bucket(i, least, rungs) for i in range(least, least * 2)}) <= rungs + 1
