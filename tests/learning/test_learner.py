"""The update: who moves, by what, and that nothing else does."""

from __future__ import annotations

import dataclasses
import functools

import bounds
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from one_step import (
    ALGO,
    LAYERS,
    ONCE,
    alike,
    build,
    fresh,
    learn,
    learner,
    member,
    on_device,
    policy_of,
    same,
    settings,
    settled,
)

from marft_jax.cli import configure
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.learner import Learner
from marft_jax.learning.minibatches import order
from marft_jax.learning.objectives import critic_of
from marft_jax.models import decoder
from marft_jax.models.vocabulary import Vocabulary
from marft_jax.policy import gradients, logprobs
from marft_jax.policy.objective import Inputs
from marft_jax.policy.programs import of_critic, of_gradients
from marft_jax.sampling.protocol import Request
from marft_jax.types import MAIN, Sampling


@pytest.fixture(scope="module")
def episodes():
    """Off-policy: their behaviour log-probs are random."""
    return small.random_episodes(8, steps=2)


# The first update is on policy.


@pytest.mark.parametrize("name", ["appo", "tppo"])
@pytest.mark.slow
def test_the_learner_scores_what_the_engine_sampled_as_the_engine_did(name):
    engine, rng, episodes = small.engine(longest=8, layers=LAYERS), np.random.default_rng(0), []
    sampling = (Sampling(8, 0.5), Sampling(8, 1.7, top_k=9, top_p=0.9), Sampling(8, 0.0))
    for e in range(4):
        prompts = rng.integers(0, 256, (3, 11)).astype(np.int32)
        asked = [Request(p, a, sampling[a], (0, e, a)) for a, p in enumerate(prompts)]
        turns = [
            small.turn(r.owner, r.prompt, done.ids, logprobs=done.logprobs,
                       temperature=r.sampling.temperature or 1.0)
            for r, done in zip(asked, small.answers(engine, asked), strict=True)
        ]  # fmt: skip
        episodes.append(small.episode(e, turns, [rng.normal()]))
    _, metrics = learn(settings(ONCE), episodes, name=name, agents=3)
    gap = bounds.logprobs(layers=LAYERS)
    assert (metrics["logprob_gap"] < gap).all()
    assert (np.abs(metrics["approx_kl"]) < (8 * gap) ** 2).all()  # of actions of 8 tokens
    assert (metrics["clip_fraction"] == 0).all() and (metrics["entropy"] > 0).all()


# Padding has no part in it.


def test_a_critic_over_a_base_on_which_nobody_learns_needs_no_pass_through_the_base(episodes):
    config, base = settings(mode="heads"), small.base(LAYERS)
    batch, state = build(config, episodes), fresh(config, "appo")
    own = settled(config, "appo"), find_algorithm("appo")
    spec = critic_of(*own, base.graphdef, agents=2)
    rows = jax.tree.map(lambda x: x[0], small.rows_of(batch))
    ones = np.ones(small.decisions_shape(batch)[1:], np.float32)
    inputs = Inputs({"values": 0 * ones, "returns": ones}, {})
    features = np.tile(ones[..., None], small.CONFIG.d_model)
    run = jax.jit(functools.partial(gradients.value_gradients, spec))
    nothing = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), base.params)
    sums = run(nothing, state.critic[MAIN], rows, inputs, features)
    assert np.any(jax.tree.leaves(sums.gradient)[0]) and np.isfinite(sums.loss)
    assert sums.units_P.sum() == rows.turns.mask_BK.sum() and not sums.nonfinite_P.any()


@pytest.mark.parametrize("name", ["appo", "tppo"])
@pytest.mark.slow
def test_what_stands_in_padding_changes_nothing(episodes, name):
    rng = np.random.default_rng(1)

    def spoil(batch):
        r = small.rows_of(batch)
        idle_T, idle_A = r.tokens.owners_BT < 0, r.actions.mask_BA == 0
        idle_K = r.turns.mask_BK == 0
        assert idle_T.any() and idle_A.any() and idle_K.any()

        def noise(x, idle, high):
            return np.where(idle, rng.integers(0, high, x.shape), x).astype(x.dtype)

        tokens, actions, turns = r
        spoiled = r._replace(
            tokens=tokens._replace(
                ids_BT=noise(tokens.ids_BT, idle_T, 256),
                positions_BT=noise(tokens.positions_BT, idle_T, 9),
                owners_BT=noise(tokens.owners_BT, idle_T, 2),
                agents_BT=noise(tokens.agents_BT, idle_T, 2),
            ),
            actions=actions._replace(
                targets_BA=noise(actions.targets_BA, idle_A, 256),
                index_BA=noise(actions.index_BA, idle_A, 9),
                behaviour_BA=noise(actions.behaviour_BA, idle_A, 3),
                turn_BA=noise(actions.turn_BA, idle_A, 2),
            ),
            turns=turns._replace(
                agent_BK=noise(turns.agent_BK, idle_K, 2),
                owner_BK=noise(turns.owner_BK, idle_K, 2),
            ),
        )
        return small.with_rows(batch, spoiled)

    clean = learn(settings(), episodes, name=name)
    assert same(learn(settings(), episodes, name=name, change=spoil), clean)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.slow
def test_the_spared_product_gives_the_gradient_of_capped_and_divided_logits(masked):
    """Without an entropy bonus; log-probs and entropy are those of a softmax over some tokens."""
    rng = np.random.default_rng(0)
    matrix, hidden = (jnp.asarray(rng.normal(size=n), jnp.float32) for n in ((20, 8), (3, 5, 8)))
    targets, heat = rng.integers(0, 20, (3, 5)), jnp.full((3, 5), 0.7)
    never = masked & (rng.random((3, 5, 20)) < 0.6) & (np.arange(20) != targets[..., None])
    own = {"never": jnp.asarray(never)} if masked else {}
    vocabulary = Vocabulary(matrix, divisor=1.5, cap=2.0, **own)
    fixed, roundings = (vocabulary, targets, heat), bounds.sums(8, 20, 8)

    def gradient(score, of):
        return jax.grad(lambda h: jnp.sum(score(h, *fixed)[of]))(hidden)

    bounds.close(gradient(logprobs._score_once, 0), gradient(logprobs._score, 0), roundings)
    logits = decoder.logits(hidden, dataclasses.replace(vocabulary, never=None)) / 0.7
    logits = np.where(never, -np.inf, logits)
    p = np.exp(logits - np.logaddexp.reduce(logits, -1, keepdims=True))
    scored, entropy = logprobs._score_once(hidden, *fixed)
    chosen = np.take_along_axis(p, targets[..., None], -1)[..., 0]
    bounds.close(np.exp(scored), chosen, roundings)
    bounds.close(entropy, -(p * np.log(np.maximum(p, 1e-30))).sum(-1), roundings)
    assert np.isfinite(gradient(logprobs._score, 1)).all()


# Whoever is not trained does not move, momentum included.


@pytest.mark.slow
def test_agents_that_are_not_trained_stay_bit_for_bit(episodes):
    """A step of the critic's warm-up, then one agent at a time."""
    config = settings(dataclasses.replace(ALGO, agent_interval=1), warmup_steps=1)
    states = [jax.device_get(fresh(config))]
    for step in range(5):
        state, _ = learn(config, episodes, step=step, state=on_device(states[-1]))
        states.append(state)
    moved = [
        [not same(member(old, n), member(new, n)) for n in range(2)]
        for old, new in zip(states, states[1:], strict=False)
    ]
    assert moved == [[False, False], [False, True], [True, False], [False, True], [True, False]]
    for old, new in zip(states, states[1:], strict=False):
        assert not same((old.critic, old.critic_opt), (new.critic, new.critic_opt))
    assert [int(state.step) for state in states] == [0, 1, 2, 3, 4, 5]


def test_agent_interval_trains_each_agent_for_that_many_steps():
    own = learner(settings(dataclasses.replace(ALGO, agent_interval=3)))
    learns = [own.trainable(step)[MAIN].tolist().index(True) for step in range(8)]
    assert learns == [0, 0, 0, 1, 1, 1, 0, 0]


@pytest.mark.slow
def test_an_agent_that_did_not_act_does_not_move(episodes):
    first, _ = learn(settings(), episodes)
    alone = [e._replace(turns=[t for t in e.turns if t.agent == 0]) for e in episodes]
    second, _ = learn(settings(), alone, state=on_device(first))
    assert same(member(first, 1), member(second, 1))
    assert not same(member(first, 0), member(second, 0))


def test_an_agent_beyond_max_kl_is_skipped_and_the_others_are_not(episodes):
    config = settings(dataclasses.replace(ONCE, max_kl=0.01))
    policy = small.with_policy(episodes, small.adapters(layers=LAYERS))
    mixed = []
    for e, own in zip(episodes, policy, strict=True):
        pairs = zip(e.turns, own.turns, strict=True)
        mixed.append(e._replace(turns=[p if p.agent == 0 else t for t, p in pairs]))
    before = jax.device_get(fresh(config))
    after, metrics = learn(config, mixed)
    assert metrics["approx_kl"][0] < 0.01 < metrics["approx_kl"][1]
    assert same(member(before, 1), member(after, 1))
    assert not same(member(before, 0), member(after, 0))


def test_one_agents_episodes_do_not_change_anothers_step(episodes):
    """Without the shared normalisation, agent 0 takes the same step whatever agent 1 did."""
    config = settings(dataclasses.replace(ALGO, normalize="none", gae_lambda=0.0, gamma=0.0))
    other = [
        e._replace(turns=[t._replace(action=t.action[::-1]) if t.agent else t for t in e.turns])
        for e in episodes
    ]
    one, two = learn(config, episodes)[0], learn(config, other)[0]
    roundings = bounds.update(layers=LAYERS)
    bounds.close_members(member(one, 0), member(two, 0), ALGO.lr, roundings, ALGO.epochs)
    assert not same(member(one, 1), member(two, 1))


@pytest.mark.slow
def test_epochs_divide_a_batch_in_other_ways_and_report_what_steps_learn_from():
    """With room for all of a minibatch in one microbatch, too."""
    algo = dataclasses.replace(ALGO, epochs=8, minibatches=2, microbatch_tokens=8192)
    ours, episodes = learner(settings(algo)), small.random_episodes(16)
    batch = ours.pack(episodes, small.paid(episodes))
    micros = len(small.rows_of(batch).tokens.ids_BT)
    of_block = np.arange(micros).reshape(batch.blocks, -1)
    parts = [set(of_block[part].ravel().tolist()) for part in order(algo, 0, 3, batch.blocks)]
    epochs = list(zip(parts[::2], parts[1::2], strict=True))
    assert all(a | b == set(range(micros)) and not a & b for a, b in epochs)
    assert len({frozenset(map(frozenset, epoch)) for epoch in epochs}) > 1
    _, metrics = learn(settings(algo), episodes)
    assert metrics["decisions"].tolist() == metrics["decisions_min"].tolist() == [8, 8]


@pytest.mark.slow
def test_a_minibatch_without_rows_moves_nothing(episodes):
    """Fewer rows than minibatches: momentum must not be spent on nothing."""
    config = settings(dataclasses.replace(ONCE, minibatches=4, microbatch_tokens=64))
    single = episodes[0]._replace(turns=episodes[0].turns[:1], results=episodes[0].results[:1])
    assert small.rows_of(build(config, [single])).turns.mask_BK.sum() == 1
    alone, _ = learn(settings(ONCE), [single])
    for step in range(4):  # the full minibatch comes first, last or between
        state, _ = learn(config, [single], step=step)
        alike((state, {}), (alone, {}), config)


# However the work is cut, the step is the same.


@pytest.mark.parametrize("name", ["appo", "tppo"])
@pytest.mark.slow
def test_accumulated_gradients_are_those_of_one_big_microbatch(episodes, name):
    big = settings(dataclasses.replace(ONCE, microbatch_tokens=100_000))
    cut = settings(dataclasses.replace(ONCE, microbatch_tokens=64))
    assert len(small.rows_of(build(big, episodes)).tokens.ids_BT) == 1
    assert len(small.rows_of(build(cut, episodes)).tokens.ids_BT) >= 4
    one, two = learn(big, episodes, name=name), learn(cut, episodes, name=name)
    alike(one, two, settings(ONCE))


def conversations() -> list:
    """Two agents answer each task, after all before them."""
    rng, episodes = np.random.default_rng(7), []
    tasks = rng.integers(0, 256, (4, 20)).astype(np.int32)
    tasks[:, :9] = tasks[0, :9]  # a system prompt
    for e in range(8):
        first = small.turn(0, tasks[e // 2], rng.integers(0, 256, rng.integers(1, 9)))
        asked = np.concatenate([tasks[e // 2], first.action])
        second = small.turn(1, asked, rng.integers(0, 256, 5), sees=(0,))
        third = small.turn(0, np.concatenate([asked, second.action, [7]]), [1, 2, e], sees=(0, 1))
        episodes.append(small.episode(e // 2, [first, second, third], [rng.normal()]))
    return episodes


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, critic",
    [
        ("appo", "shared"), ("tppo", "lora"), ("grpo", "none"),
        pytest.param("gspo", "none", marks=pytest.mark.release),
    ],
)  # fmt: skip
def test_turns_that_share_their_beginning_learn_what_they_learn_apart(name, critic):
    """One adapter and two, and a KL."""
    episodes = conversations()
    config = settings(
        dataclasses.replace(ONCE, group_size=2 if critic == "none" else None, kl_coef=0.1),
        mode=critic,
    )
    for owners in ((0, 1), (0, 0)):
        apart, shared = (
            learn(config, episodes, name=name, owners=owners, share=share)
            for share in (False, True)
        )
        assert build(config, episodes, name, owners=owners, share=True).prefix_shared > 30
        alike(apart, shared, config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("critic", "shape"), [("shared", (1, 1, 1)), ("heads", (4, 2, 1))], ids=str
)
def test_a_critic_that_reads_prompts_alone_reads_what_it_would_in_the_rows(critic, shape):
    """Also where turns are nested, and where they share their beginning."""
    where, config = small.mesh_of(*shape), settings(ONCE, mode=critic)
    for owners, share in (((0, 1), False), ((0, 1), True), ((0, 0), True)):
        batch = build(config, conversations(), where=where, owners=owners, share=share)
        assert batch.parts[MAIN].prompts is not None
        tokens, fewer = (
            int((r.tokens.owners_BT >= 0).sum())
            for r in (small.rows_of(batch), batch.parts[MAIN].prompts.rows)
        )
        assert share or fewer < tokens
        ours = learner(config, where=where)
        apart, whole = (
            ours.learn(fresh(config, where=where), x, 0)[1]
            for x in (batch, batch._replace(parts={MAIN: batch.parts[MAIN]._replace(prompts=None)}))
        )
        for name in ("values_EJ", "advantages_EJ"):
            pair = (getattr(estimates, name) for estimates in (apart, whole))
            bounds.close(*pair, bounds.forward(layers=LAYERS), size=1.0)


def test_reuse_decides_whether_turns_share():
    turns = [small.turn(0, [1, 2, 3, 4], [5 + e]) for e in range(2)]
    episodes = [small.episode(e, [turn], [1.0]) for e, turn in enumerate(turns)]
    for reuse, shared in ((True, 4), (False, 0)):
        ours = learner(settings(dataclasses.replace(ALGO, reuse=reuse)))
        assert ours.pack(episodes, small.paid(episodes)).prefix_shared == shared


@pytest.mark.parametrize("shape", [(4,), (2, 2, 2)], ids=str)
@pytest.mark.slow
def test_any_mesh_takes_the_same_step_as_one_device(episodes, shape):
    where = small.mesh_of(*shape)
    one, many = learn(settings(ONCE), episodes), learn(settings(ONCE), episodes, where=where)
    alike(one, many, settings(ONCE))


@pytest.mark.slow
def test_batches_of_the_same_shapes_compile_nothing(episodes):
    where = small.one_device()
    base, team = small.base_on(where, LAYERS), small.team()
    ours = Learner(settled(configure(), "appo"), {MAIN: base}, team, find_algorithm("appo"), where)
    state = ours.init()
    few, many = (build(configure(), episodes[:n]) for n in (1, len(episodes)))
    assert small.rows_of(few).tokens.ids_BT.shape[1:] != small.rows_of(many).tokens.ids_BT.shape[1:]
    for batch, programs in ((few, 1), (many, 2), (few, 2), (many, 2)):
        state, _, _ = ours.learn(state, batch, 0)
        spec = gradients.GradientSpec(base.graphdef, ours._objective, 2)
        own = of_gradients(where, spec).accumulate, of_critic(where, ours._critics[MAIN]).read
        assert [program._cache_size() for program in own] == [programs, programs]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["appo", pytest.param("grpo", marks=pytest.mark.release)])
def test_two_bases_that_are_one_file_give_what_one_base_gives(episodes, name):
    """One chain of credit along the team; rows, heads and adapters of each base."""
    algo = dataclasses.replace(ALGO, kl_coef=0.1, kl_reference="start", correction="decoupled")
    config, where = settings(algo, mode="heads"), small.one_device()
    base, one, whole = small.base_on(where, LAYERS), small.team(), small.adapters(2, layers=LAYERS)
    two = one._replace(
        bases=(MAIN, "other"),
        owners=(0, 0),
        adapter_names={MAIN: one.names[:1], "other": one.names[1:]},
        trainable={MAIN: (True,), "other": (True,)},
    )
    own = {b: jax.tree.map(lambda x, n=n: x[n : n + 1], whole) for n, b in enumerate(two.bases)}
    found = []
    for team, adapters in ((one, {MAIN: whole}), (two, own)):
        bases = dict.fromkeys(adapters, base)
        chosen = settled(config, name)
        chosen = chosen._replace(lr=dict.fromkeys(bases, chosen.lr[MAIN]))
        learner = Learner(chosen, bases, team, find_algorithm(name), where)
        state = learner.init().with_adapters(jax.device_put(adapters)).begun()
        batch = learner.pack(episodes, small.paid(episodes))
        assert len(batch.parts) == len(bases)
        state, _, metrics = learner.learn(state, batch, 0)
        metrics.pop("critic/grad_norm", None)  # a mean over all heads of both bases
        found.append((jax.device_get(state), metrics))
    (state, metrics), (apart, others) = found
    joined = jax.tree.map(lambda *x: np.concatenate(x), *apart.policies.values())
    roundings = bounds.update(layers=LAYERS)
    bounds.close_members(policy_of(state)[:2], joined[:2], ALGO.lr, roundings, ALGO.epochs)
    for n, b in enumerate(two.bases):
        pair = (
            jax.tree.map(lambda x, n=n: x[n], (s.critic[at].head, s.critic_opt[at].head))
            for s, at in ((state, MAIN), (apart, b))
        )
        bounds.close_members(*pair, config.critic.lr, roundings, ALGO.epochs)
    assert metrics.keys() == others.keys()
    bounds.close(metrics, others, bounds.backward(layers=LAYERS), bounds.LOGITS)


def test_the_same_step_twice_is_the_same_bit_for_bit(episodes):
    assert same(learn(settings(), episodes), learn(settings(), episodes))


# Every setting does what it says.


@pytest.mark.parametrize(
    ("setting", "value", "changes"),
    [
        ("lr", 2e-3, "adapters"), ("clip", 2.0, "adapters"), ("entropy_coef", 0.5, "adapters"),
        ("ratio", "token", "adapters"), ("normalize", "agent", "adapters"),
        ("normalize", "none", "adapters"), ("value_clip", 0.01, "critic"),
        ("huber_delta", 0.05, "critic"), ("gamma", 0.5, "both"), ("gae_lambda", 0.1, "both"),
        ("max_grad_norm", 1e-4, "both"), ("epochs", 3, "both"), ("minibatches", 2, "both"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_setting_changes_what_it_names_and_nothing_else(episodes, setting, value, changes):
    usual, _ = learn(settings(), episodes)
    other, _ = learn(settings(dataclasses.replace(ALGO, **{setting: value})), episodes)
    assert same(usual.adapters, other.adapters) == (changes == "critic")
    assert same(usual.critic, other.critic) == (changes == "adapters")


def test_a_warm_up_scales_the_first_step_and_decay_takes_a_share_of_what_was_there(episodes):
    """The moves of one step: of the usual one, with half its rate, and with weight decay."""
    start, moves = small.adapters(layers=LAYERS), []
    for more in ({}, {"lr_warmup": 1}, {"weight_decay": 0.5}):
        state, _ = learn(settings(dataclasses.replace(ONCE, **more)), episodes)
        moves.append(jax.tree.map(lambda a, b: np.asarray(a - b), state.adapters[MAIN], start))
    usual, half, decayed = moves
    bounds.close(jax.tree.map(lambda x: x / 2, usual), half, size=2.0)  # of what they move
    shrunk = jax.tree.map(lambda x, a: x - ONCE.lr * 0.5 * np.asarray(a), usual, start)
    bounds.close(shrunk, decayed, size=2.0)


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 2, [1 / 3, 2 / 3, 1, 1]),
        ("linear", 2, [1 / 3, 2 / 3, 1, 1 / 2]),
        ("cosine", 0, [1, (1 + 0.5**0.5) / 2, 1 / 2, (1 - 0.5**0.5) / 2]),
    ],
)
def test_learning_rates_rise_and_fall_as_their_schedule_says(schedule, warmup, expected):
    algo = dataclasses.replace(ALGO, lr_schedule=schedule, lr_warmup=warmup)
    plan = settled(settings(algo), "appo")._replace(steps=4)
    factors = [float(plan.rate_factor(step)) for step in range(4)]
    bounds.close(factors, expected, size=1.0)


@pytest.mark.slow
def test_the_critic_learns_returns_with_its_own_learning_rate(episodes):
    start = jax.device_get(fresh(settings()).critic)
    still, _ = learn(settings(lr=0.0), episodes)
    assert same(still.critic, start)
    state, first = learn(settings(), episodes)
    for _ in range(30):
        state, last = learn(settings(), episodes, state=on_device(state))
    assert last["critic/explained_variance"] > max(0.3, first["critic/explained_variance"])


@pytest.mark.parametrize("scale", [1e-3, 10.0])
@pytest.mark.slow
def test_a_critic_follows_returns_of_any_size(episodes, scale):
    """Values, and so steps of adapters, are those of a reward scale of 1."""
    config, seen = settings(dataclasses.replace(ONCE, huber_delta=0.5)), []
    ours = learner(config)
    for factor in (1.0, scale):
        state, paid = fresh(config), small.paid(episodes, reward_scale=factor)
        for step in range(12):
            state, estimates, metrics = ours.learn(state, ours.pack(episodes, paid), step)
        seen.append((estimates.values_EJ / factor, jax.device_get(state).adapters))
        assert metrics["critic/explained_variance"] > 0.3
    assert np.abs(seen[0][0]).max() > 0.3
    # to a hundredth of what 12 steps learned: each passes on the rounding of those before it
    values, adapters = zip(*seen, strict=True)
    np.testing.assert_allclose(*values, atol=0.01 * np.abs(values[0]).max())
    for x, y in zip(*map(jax.tree.leaves, adapters), strict=True):
        np.testing.assert_allclose(x, y, atol=0.01 * 12 * ONCE.lr)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["appo", "tppo"])
def test_variance_that_is_not_there_is_not_explained(episodes, name):
    """Where all earn the same, returns differ by the discount to their turn, or by the critic."""
    config = settings(ONCE)
    ours, turns = learner(config, name), [len(e.turns) for e in episodes]
    alike = [np.array([0] * (n - 1) + [1], np.float32) for n in turns]
    other = [np.zeros_like(alike[0]), *alike[1:]]
    for rewards, is_defined in ((alike, False), (other, True)):
        _, found, _ = ours.learn(fresh(config, name), ours.pack(episodes, rewards), 0)
        assert np.isfinite(found.report["critic/explained_variance"]) == is_defined
