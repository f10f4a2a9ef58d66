"""Advantages, losses and credit: the numbers of the first release, and definitions by hand."""

from __future__ import annotations

import dataclasses
import json

import bounds
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from reference_update import gae

from marft_jax import cli
from marft_jax.errors import BadInput
from marft_jax.learning import batch as batch_lib
from marft_jax.learning.algorithms import (
    ALGORITHMS,
    find_algorithm,
    normalized_advantages,
)
from marft_jax.learning.group_stats import Cells
from marft_jax.learning.moving import label_means
from marft_jax.learning.normalizers import find_normalizer, normalize
from marft_jax.learning.settings import Appo, Reinforce, resolve, resolved, reuses_samples
from marft_jax.learning.state import EMA
from marft_jax.policy import losses
from marft_jax.types import MAIN


@pytest.fixture(scope="module")
def numbers(golden):
    """The golden numbers as float32 arrays."""

    def arrays(tree):
        if isinstance(tree, dict):
            return {key: arrays(value) for key, value in tree.items()}
        return np.asarray(tree, np.float32) if isinstance(tree, list) else tree

    return arrays(json.loads(golden.read_text()))


# Golden numbers.


def whole(weights):
    """All entries in one cell."""
    return Cells(weights, np.zeros(np.shape(weights), int))


def chains(x_TBX):
    """``[T, B, ...]`` to one chain per parallel environment, in acting order."""
    return np.moveaxis(x_TBX, 1, 0).reshape(x_TBX.shape[1], -1)


def test_advantages_of_actions_are_those_of_the_first_release(numbers):
    g = numbers["action_gae"]
    values = np.concatenate([chains(g["values_TBA"][:-1]), g["values_TBA"][-1, :, :1]], axis=1)
    ends = np.ones_like(g["rewards_TBA"])
    ends[:, :, -1] = g["masks_TBA"][1:, :, -1]
    discounts = np.float32(g["gamma"]) * chains(ends)
    advantages, returns = gae(
        chains(g["rewards_TBA"]), values[:, :-1], values[:, 1:], discounts, g["gae_lambda"]
    )
    roundings = bounds.sums(advantages.shape[1])
    bounds.close(advantages, chains(g["advantages_TBA"]), roundings)
    bounds.close(returns, chains(g["returns_TBA"]), roundings)


def test_advantages_of_tokens_are_those_of_the_first_release(numbers):
    g = numbers["token_gae"]
    lengths = g["lengths_TBA"].astype(int)
    t_size, b_size, a_size = lengths.shape
    for b in range(b_size):
        turns = [(t, a) for t in range(t_size) for a in range(a_size)]
        spots = [(t, b, a, k) for t, a in turns for k in range(lengths[t, b, a])]
        at = tuple(np.array(spots).T)
        rewards, continues = np.zeros(len(spots)), np.ones(len(spots))
        for j, (t, _, a, k) in enumerate(spots):
            if k == lengths[t, b, a] - 1:
                rewards[j] = g["rewards_TBA"][t, b, a]
                continues[j] = g["masks_TBA"][t + 1, b, a] if a == a_size - 1 else 1
        values = g["values_TBAK"][at]
        bootstrap = g["values_TBAK"][t_size, b, 0, 0]
        row = (x[None].astype(np.float32) for x in (rewards, values))
        advantages, returns = gae(
            *row,
            np.append(values[1:], bootstrap)[None],
            (np.float32(g["gamma"]) * continues)[None].astype(np.float32),
            g["gae_lambda"],
        )
        bounds.close(advantages[0], g["advantages_TBAK"][at], bounds.sums(len(spots)))
        bounds.close(returns[0], g["returns_TBAK"][at], bounds.sums(len(spots)))


@pytest.mark.parametrize("level", ["appo", "tppo"])
def test_losses_are_those_of_the_first_release(numbers, level):
    g = numbers[f"{level}_loss"]
    mask = g.get("mask", np.ones_like(g["logprobs"]))

    def mean(x):
        return float((np.asarray(x) * mask).sum() / mask.sum())

    config, new, old = Appo(clip=g["clip"]), g["logprobs"], g["old_logprobs"]
    policy = ALGORITHMS[level].policy_loss(config, new, old, g["advantages"])
    total = mean(policy) - g["entropy_coef"] * mean(g["entropy"])
    roundings = bounds.sums(mask.size)
    bounds.close(total, g["policy_loss"], roundings, size=np.abs(g["advantages"]).max())
    kl = mean(losses.approx_kl(new, old))
    bounds.close(kl, g["approx_kl"], roundings, size=np.abs(new - old).max())
    if "mean_entropy" in g:
        bounds.close(mean(g["entropy"]), g["mean_entropy"], roundings)
    for name, delta in (("huber10", 10.0), ("mse", None)):
        error = losses.value_loss(g["values"], g["old_values"], g["returns"], g["clip"], delta)
        bounds.close(mean(error), g[f"value_loss_{name}"], roundings)


def test_normalisation_is_that_of_the_first_release(numbers):
    g = numbers["advantage_norm"]
    normalized = normalize(g["advantages"], whole(g["advantages"] != 0))
    bounds.close(normalized, g["normalized"], bounds.sums(normalized.size))


# Definitions.


def test_the_value_loss_is_the_worse_of_clipped_and_unclipped_and_linear_beyond_delta():
    values, returns = np.array([1.0, -1.0, 0.1]), np.array([2.0, 2.0, 0.1])
    error = losses.value_loss(values, np.zeros(3), returns, 0.2, None)
    bounds.close(error, np.array([1.8**2 / 2, 3.0**2 / 2, 0.0]))
    returns = np.array([0.5, 2.0, -5.0, 100.0], np.float32)
    error = losses.value_loss(np.zeros(4), np.zeros(4), returns, 0.2, 2.0)
    bounds.close(error, np.array([0.125, 2.0, 8.0, 198.0]))


def test_the_policy_loss_stops_at_the_clip_only_where_that_is_a_gain():
    old, advantages = jnp.zeros(4), jnp.array([1.0, -1.0, 1.0, -1.0])
    new = jnp.log(jnp.array([1.5, 1.5, 0.5, 0.5]))
    loss = losses.clipped_policy_loss(new, old, advantages, 0.8, 1.2)
    bounds.close(loss, np.array([-1.2, 1.5, -0.5, 0.8]))
    slope = jax.grad(lambda x: losses.clipped_policy_loss(x, old, advantages, 0.8, 1.2).sum())(new)
    bounds.close(slope, np.array([0, 1.5, -0.5, 0]))
    assert losses.clip_fraction(new, old, 0.8, 1.2).tolist() == [1, 1, 1, 1]
    assert losses.clip_fraction(new, old, 0.4, 1.6).tolist() == [0, 0, 0, 0]
    loss = losses.clipped_policy_loss(new, old, advantages, 0.8, 1.28)
    bounds.close(loss, np.array([-1.28, 1.5, -0.5, 0.8]))
    assert losses.clip_fraction(new, old, 0.8, 1.6).tolist() == [0, 0, 1, 1]
    for a in (1.0, -1.0):  # long actions have log ratios beyond 88
        slope = jax.grad(lambda x, a=a: losses.clipped_policy_loss(x, -100.0, a, 0.8, 1.2))(0.0)
        assert np.isfinite(slope)


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    new, advantages = jnp.log(jnp.array([9.0, 9.0, 2.0])), jnp.array([-1.0, 1.0, -1.0])
    loss = losses.clipped_policy_loss(new, jnp.zeros(3), advantages, 0.8, 1.2, 3.0)
    bounds.close(loss, np.array([3.0, -1.2, 2.0]))
    for name in ("appo", "tppo", "grpo", "gspo"):
        algo = Appo(clip=0.1, clip_high=0.3, dual_clip=4.0)
        loss = ALGORITHMS[name].policy_loss(algo, new, jnp.zeros(3), advantages)
        bounds.close(loss, np.array([4.0, -1.3, 2.0]))


def test_kl_estimates_have_the_mean_of_the_kl():
    """Over a whole distribution k1 and k3 are the KL itself, k2 half the mean square."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    x = np.log(p / q)
    kl = float((p * x).sum())
    for estimator, expected in (("k1", kl), ("k3", kl), ("k2", (p * x**2).sum() / 2)):
        mean = float((p * losses.reference_kl(np.log(p), np.log(q), estimator)).sum())
        bounds.close(mean, expected)
    assert np.isfinite(losses.reference_kl(-200.0, 0.0, "k3"))


def test_correction_weights_beyond_the_cap_are_dropped_or_cut():
    weights = jnp.array([0.5, 1.0, 2.0, 3.0])
    decoupled, truncated = (
        losses.correction_weight(jnp.log(weights), jnp.zeros(4), how, 2.5)
        for how in ("decoupled", "truncated")
    )
    bounds.close(decoupled, np.array([0.5, 1, 2, 0]))
    bounds.close(truncated, np.array([0.5, 1, 2, 2.5]))


# Groups and baselines.

LENGTHS = ((2, 3), (1, 1), (4, 2), (1, 5))  # of the actions of two agents
PAID = (1.0, 0.0, 3.0, 7.0)


@pytest.fixture(scope="module", params=["action", "token"])
def grouped(request):
    """The chain of two groups of two episodes, of which each agent acts once."""
    episodes = [
        small.episode(
            e // 2, [small.turn(a, [1], [2] * n) for a, n in enumerate(lengths)], [PAID[e]]
        )
        for e, lengths in enumerate(LENGTHS)
    ]
    rewards = small.paid(episodes, credit="step_discount", credit_discount=0.5)
    algo = Appo(ratio="sum", episodes=5)
    return batch_lib.build(episodes, rewards, (0, 1), algo, request.param).chain


def by_turn(x_EJ, chain):
    """One number per turn, after checking that all its links have it: ``[4, 2]``."""
    links = [x_EJ[e][chain.mask_EJ[e] > 0] for e in range(4)]
    agents = [chain.agent_EJ[e][chain.mask_EJ[e] > 0] for e in range(4)]
    parts = [[x[a == i] for i in range(2)] for x, a in zip(links, agents, strict=True)]
    bounds.close(parts, [[0 * part + part[-1] for part in row] for row in parts], size=10.0)
    return np.array([[part[-1] for part in row] for row in parts])


RETURNS = np.array([[1.5, 1.0], [0, 0], [4.5, 3], [10.5, 7]])  # R/2 + R, R


def test_group_advantages_are_returns_to_go_minus_the_mean_of_their_place_in_the_group(grouped):
    """Each agent's turn with the same agent's: a discount pays the first one something else."""
    for name in ("grpo", "gspo"):
        advantages, returns = find_algorithm(name).advantages(Appo(), grouped, None, None)
        bounds.close(by_turn(np.asarray(returns), grouped), RETURNS)
        means = np.repeat([RETURNS[:2].mean(0), RETURNS[2:].mean(0)], 2, axis=0)
        bounds.close(by_turn(np.asarray(advantages), grouped), RETURNS - means)


@pytest.mark.parametrize("how", ["batch", "agent", "group", "group_turn", "none"])
def test_statistics_weigh_every_turn_once_whatever_its_length(grouped, how):
    cells = {
        "batch": [(slice(None), slice(None))],
        "agent": [(slice(None), i) for i in range(2)],
        "group": [(slice(i, i + 2), slice(None)) for i in (0, 2)],
        "group_turn": [(slice(i, i + 2), j) for i in (0, 2) for j in range(2)],
        "none": [],
    }[how]
    expected = RETURNS.copy()
    for cell in cells:
        own = RETURNS[cell]
        expected[cell] = (own - own.mean()) / (own.std() + 1e-8)
    _, returns = find_algorithm("grpo").advantages(Appo(), grouped, None, None)
    normalized = find_normalizer(how)(returns, grouped, False)
    bounds.close(by_turn(np.asarray(normalized), grouped), expected, bounds.sums(8))


def test_a_group_weighs_every_episode_once_however_many_turns_it_has():
    """Also where it stands in for a place that only one of its episodes reached."""
    one = small.episode(0, [small.turn(0, [1], [2])], [1.0])
    three = small.episode(0, [small.turn(0, [1], [2]) for _ in range(3)], [0.0])
    algo = Appo(ratio="sum", episodes=2)
    chain = batch_lib.build([one, three], small.paid([one, three]), (0,), algo, "action").chain
    advantages, returns = find_algorithm("gspo").advantages(algo, chain, None, None)
    bounds.close(np.asarray(advantages)[0, 0], 0.5)
    bounds.close(np.asarray(advantages)[1, :3], -0.5)
    group = np.asarray(find_normalizer("group")(returns, chain, False))[:, 0]
    bounds.close(group, np.array([1, -1]))
    batch = np.asarray(find_normalizer("batch")(returns, chain, False))[:, 0]
    bounds.close(batch, np.array([3**0.5, -(3**-0.5)]))


def test_the_moving_baseline_is_a_debiased_average_per_agent(grouped):
    """An agent without turns keeps its own."""
    algo = Reinforce(baseline="moving")
    baseline, seen = EMA(np.zeros(3), np.zeros(3)), []
    for scale in (1.0, 2.0, 4.0):
        chain = grouped._replace(rewards_EJ=scale * grouped.rewards_EJ)
        advantages, returns = find_algorithm("reinforce").advantages(
            algo, chain, None, baseline.mean
        )
        expected = scale * RETURNS - np.asarray(baseline.mean)[:2]
        bounds.close(by_turn(np.asarray(advantages), grouped), expected)
        baseline = baseline.update(*label_means(returns, chain, chain.agent_EJ, 3), 0.5)
        seen.append(scale)
        weights = 0.5 ** np.arange(len(seen))[::-1]
        mean = (weights * seen).sum() / weights.sum() * RETURNS.mean(0)
        bounds.close(baseline.mean, np.array([*mean, 0]))
    still = baseline.update(np.ones(3), np.array([1.0, 0, 0]), 0.5)
    assert still.mean[1] == baseline.mean[1] and still.mean[0] != baseline.mean[0]


# What a name brings with it.


def test_what_was_set_stays():
    given = "--algo.name grpo --algo.normalize group_turn --algo.group_size 4"
    algo = cli.parse(given.split()).algo
    assert (algo.normalize, algo.group_size) == ("group_turn", 4)
    heads = cli.parse("--algo.name tppo --critic.mode heads".split())
    assert resolve(heads, {MAIN: ("tiny", small.CONFIG)}).critic.mode == "heads"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--algo.name ppo", "--algo.name: expected appo, tppo, .* got 'ppo'"),
        ("--critic.mode none", "--critic.mode: appo needs a critic, got none; use shared"),
        ("--algo.name tppo --algo.ratio token", "belongs to appo and reinforce, got token"),
        ("--algo.name gspo --algo.ratio sum", "unknown setting for --algo.name gspo"),
        ("--algo.baseline group", "--algo.baseline: .* belongs to reinforce, got group"),
        ("--algo.name grpo --algo.group_size 1", "--algo.name grpo compares .* at least 2, got 1"),
        ("--algo.normalize group_turn", "--algo.normalize group_turn compares .* got 1"),
        ("--algo.dynamic_sampling true", "--algo.dynamic_sampling compares .* got 1"),
        ("--algo.episodes 1", "--algo.episodes: --algo.normalize batch .* at least 2, got 1"),
        ("--algo.name grpo --algo.group_size 7", "--algo.episodes: expected a multiple .* got 64"),
        ("--algo.kl_coef 1 --algo.kl_in loss --algo.kl_estimator k1", "k1 has no gradient"),
    ],
)
def test_settings_that_contradict_each_other_are_one_line_with_what_to_do(flags, message):
    with pytest.raises(BadInput, match=message):
        cli.parse(flags.split())


@pytest.mark.parametrize(
    "more",
    ["--algo.normalize none",
     "--algo.name grpo --algo.group_size 1 --algo.credit siblings --algo.branches 3"],
)  # fmt: skip
def test_one_episode_is_enough_where_nothing_is_compared_with_other_episodes(more):
    assert cli.parse(["--algo.episodes", "1", *more.split()]).algo.episodes == 1


def test_the_estimator_of_the_kl_follows_from_where_it_goes():
    """k1 has a gradient of 0 on average, so in the loss it would change nothing."""
    for where, estimator in ("reward", "k1"), ("loss", "k3"):
        algo = cli.parse(["--algo.kl_coef", "0.1", "--algo.kl_in", where]).algo
        assert algo.estimator == estimator


def test_reinforce_uses_a_sample_once_and_warns_where_it_is_told_otherwise():
    plain = cli.parse(["--algo.name", "reinforce"]).algo
    assert (plain.epochs, plain.minibatches) == (1, 1) and reuses_samples(plain) is None
    twice = cli.parse(["--algo.name", "reinforce", "--algo.epochs", "2"]).algo
    assert "2 epochs x 1 minibatches" in str(reuses_samples(twice))
    assert reuses_samples(cli.parse([]).algo) is None


OUTSIDE = """
import dataclasses
import numpy as np
from marft_jax.settings.config import Algo
from marft_jax.learning import Algorithm

@dataclasses.dataclass(frozen=True)
class Halved(Algo):
    gamma: float = 0.99
    normalize: str = "outside_%s:halved"

@dataclasses.dataclass(frozen=True)
class Compared(Halved):
    group_size: int = 4

@dataclasses.dataclass(frozen=True)
class Valued(Algo):
    has_critic = True
    gamma: float = 0.99

def advantages(config, chain, values_EJ, baseline_X):
    return config.gamma * chain.rewards_EJ, chain.rewards_EJ

def policy_loss(config, logprobs, old_logprobs, advantages):
    return -logprobs * advantages

def halved(advantages_EJ, chain):
    return advantages_EJ / 2 * chain.mask_EJ

PLAIN = Algorithm("action", advantages, policy_loss, Halved)
COMPARES = PLAIN._replace(settings=Compared, level="token")
VALUES = PLAIN._replace(settings=Valued)
ODD = PLAIN._replace(level="turn")
WORDS = PLAIN._replace(settings={"normalise": "batch"})
MISSHAPEN = PLAIN._replace(advantages=lambda *_: (np.ones(3), np.ones(3)))
LONE = PLAIN._replace(advantages=lambda *_: np.ones(3))
WRONG = lambda advantages_EJ, chain: advantages_EJ[:1, :1]
NAMED = lambda advantages_EJ, chain: {"advantages": advantages_EJ}
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"outside_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(OUTSIDE.replace("outside_%s", name))
    return name


def test_an_algorithm_and_a_normaliser_come_from_outside(outside, grouped):
    learning = resolve(
        cli.parse(["--algo.name", f"{outside}:PLAIN", "--algo.gamma", "0.5"]),
        {MAIN: ("tiny", small.CONFIG)},
    )
    algo, algorithm = learning.algo, find_algorithm(f"{outside}:PLAIN")
    assert (learning.critic, algo.ratio, algo.group_size) == (None, "sum", 1)
    got, returns = normalized_advantages(algo, algorithm, grouped, grouped.rewards_EJ, None)
    np.testing.assert_array_equal(got, 0.25 * grouped.rewards_EJ * grouped.mask_EJ)
    np.testing.assert_array_equal(returns, grouped.rewards_EJ)
    assert cli.parse(["--algo.name", f"{outside}:COMPARES"]).algo.group_size == 4
    valued = cli.parse(["--algo.name", f"{outside}:VALUES", "--critic.lr", "0.1"])
    assert resolve(valued, {MAIN: ("tiny", small.CONFIG)}).critic.mode == "shared"
    halved = find_normalizer(f"{outside}:halved")(grouped.rewards_EJ, grouped)
    np.testing.assert_array_equal(halved, grouped.rewards_EJ / 2 * grouped.mask_EJ)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--algo.name", "{}:ODD"], "of the level action or token, got Algorithm.level='turn'"),
        (["--algo.name", "{}:WORDS"], "settings that extend .*Algo, got {'normalise'"),
        (["--algo.name", "{}:halved"], "settings that extend .*Algo, got <function"),
        (["--algo.normalize", "{}:PLAIN"], "is no function"),
        (["--algo.normalize", "mean"], "expected batch, .* or package.module:function, got"),
    ],
)
def test_what_does_not_fit_from_outside_is_one_line(outside, flags, message):
    with pytest.raises(BadInput, match=message):
        algo = cli.parse([flag.format(outside) for flag in flags]).algo
        find_algorithm(algo.name), find_normalizer(algo.normalize)


def test_what_outside_functions_return_is_checked(outside, grouped):
    for name in ("MISSHAPEN", "LONE"):
        algo = Appo(name=f"{outside}:{name}")
        with pytest.raises(BadInput, match=rf"--algo.name {outside}:{name}: expected "):
            values = grouped.rewards_EJ, None
            normalized_advantages(algo, find_algorithm(algo.name), grouped, *values)
    for name in ("WRONG", "NAMED"):
        algo = Appo(normalize=f"{outside}:{name}")
        with pytest.raises(BadInput, match="expected an array of shape"):
            values = grouped.rewards_EJ, None
            normalized_advantages(algo, find_algorithm("appo"), grouped, *values)


@pytest.mark.parametrize(
    ("flags", "width", "expected"),
    [
        (["--model.base", "tiny"], 64, 1e-3),
        (["--model.base", "x"], 576, 1.3e-4),
        (["--model.base", "x", "--algo.name", "imitation"], 576, 1.3e-3),
        (["--model.base", "x", "--algo.name", "imitation"], 2048, 4.9e-4),
        (["--model.base", "x", "--algo.lr", "0.01"], 576, 0.01),
    ],
)
def test_the_learning_rate_of_a_real_model_follows_from_its_width(flags, width, expected):
    config = cli.parse(flags)
    model = dataclasses.replace(small.CONFIG, d_model=width)
    learning = resolve(config, {MAIN: (config.model.base, model)})
    assert learning.lr == {MAIN: pytest.approx(expected)}
    assert resolve(resolved(config, learning), {MAIN: (config.model.base, model)}).lr == learning.lr
