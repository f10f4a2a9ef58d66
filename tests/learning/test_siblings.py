"""A turn is compared with other samples of the same turn, and with nothing else."""

from __future__ import annotations

import functools
import itertools

import bounds
import numpy as np
import pytest
import small

from marft_jax.cli import configure
from marft_jax.errors import BadInput
from marft_jax.learning.algorithms import ALGORITHMS, normalized_advantages
from marft_jax.learning.chain import Chain, make_chain
from marft_jax.learning.normalizers import NORMALIZERS
from marft_jax.learning.siblings import sibling_advantage, solo_advantage
from marft_jax.rollout.branches import branched_turns, learnable
from marft_jax.types import Episode

chain_of = functools.partial(make_chain, level="action")


def trunk(rewards, member: int = 0) -> tuple[Episode, np.ndarray]:
    earned = np.asarray(rewards, np.float32)
    episode = small.episode(0, [small.turn(k % 2, [1], [2]) for k in range(len(earned))], [0.0])
    return episode._replace(member=member), earned


def branch(of: Episode, turn: int, number: int, reward: float) -> tuple[Episode, np.ndarray]:
    """Of another length after the turn, where its reward is paid."""
    turns = [t._replace(replayed=k < turn) for k, t in enumerate(of.turns[: turn + 1])]
    earned = np.zeros(len(turns), np.float32)
    earned[-1] = reward
    return of._replace(turns=tuple(turns), branch=(turn, number)), earned


def advantages(*played) -> list[list[float]]:
    episodes, rewards = learnable(played)
    chain = chain_of(episodes, rewards)
    found = sibling_advantage(chain)
    return [row[: len(e.turns)].tolist() for row, e in zip(found, episodes, strict=True)]


def test_a_turn_earns_its_subtree_minus_the_mean_of_its_siblings():
    """Turn 0 of the trunk stands for three leaves: 1, and the branches at turn 1."""
    own, earned = trunk([0, 0, 1])
    found = advantages(
        (own, earned), branch(own, 0, 1, 0.0), branch(own, 0, 2, 0.5),
        branch(own, 1, 1, 0.0), branch(own, 1, 2, 0.0),
    )  # fmt: skip
    first = 1 / 3
    assert found[0] == pytest.approx([first - 0.25, 1.0, 0.0])
    assert [row[0] for row in found[1:3]] == pytest.approx([0 - (first + 0.5) / 2, 0.5 - first / 2])
    assert [row[0] for row in found[3:]] == pytest.approx([-0.5, -0.5])


def test_equal_siblings_and_turns_without_any_teach_exactly_nothing():
    one, paid = trunk([0.1, 0.2, 0.3])
    other, more = trunk([5.0, 0.0, 0.0], member=1)
    equal = [branch(one, 1, n, float(paid.sum())) for n in (1, 2)]
    assert all(x == 0 for row in advantages((one, paid), *equal, (other, more)) for x in row)


# An episode: a turn succeeds (1) with the odds of its place and may end it; (odds, ends, return).
SUCCESS = {
    "ends on success": ([0.5] * 3, lambda done: done[-1], lambda done: float(done[-1])),
    "two more turns after a first success": (
        [0.5, 0.3, 0.6], lambda done: not done[0], lambda done: float(sum(done))),
    "sooner is better": ([0.3] * 4, lambda done: done[-1], lambda done: done[-1] / len(done)),
    "ends on failure": ([0.6] * 3, lambda done: not done[-1], lambda done: float(sum(done))),
    "ends on two failures": (
        [0.5] * 4, lambda done: done[-2:] == (0, 0), lambda done: float(sum(done))),
    "never ends early": ([0.7, 0.2], lambda done: False, lambda done: float(done[-1] > done[0])),
}  # fmt: skip


class Play:
    def __init__(self, odds, ends, pays):
        self.odds, self.ends, self.pays = odds, ends, pays

    def rest(self, done: tuple[int, ...]):
        """(probability, whole episode) for each way in which it goes on."""
        if len(done) == len(self.odds) or done and self.ends(done):
            yield 1.0, done
            return
        for choice in (0, 1):
            p = self.odds[len(done)] if choice else 1 - self.odds[len(done)]
            yield from ((p * q, whole) for q, whole in self.rest((*done, choice)))

    def value(self, done: tuple[int, ...]) -> float:
        return sum(p * self.pays(whole) for p, whole in self.rest(done))

    def advantage(self, done: tuple[int, ...]) -> float:
        return self.value(done) - self.value(done[:-1])


@pytest.mark.parametrize("branches", [1, 2, 3])
@pytest.mark.parametrize("game", SUCCESS.values(), ids=SUCCESS)
def test_a_trunks_estimates_are_unbiased_by_enumeration(game, branches):
    """Advantages are linear in the returns of branches, so these are replaced by their means: the
    sum over all trunks is then the expectation, exactly. A KL in the reward is a cost of the choice
    itself: of a branch's later turns it is not known."""
    play, found = Play(*game), dict[tuple[int, ...], list[tuple[float, float]]]()
    kl = np.random.default_rng(0).normal(size=(len(play.odds), 2))
    mean_kl = [(1 - p) * no + p * yes for p, (no, yes) in zip(play.odds, kl, strict=True)]
    for chance, whole in play.rest(()):
        own, paid = trunk([0.0] * (len(whole) - 1) + [play.pays(whole)])
        places = [(t, n + 1) for t in range(len(whole)) for n in range(branches)]
        others = [branch(own, t, n, play.value(whole[:t])) for t, n in places]
        chain = chain_of(*learnable([(own, paid), *others]))
        kl_EJ = np.zeros_like(chain.rewards_EJ)
        kl_EJ[0, : len(whole)] = [kl[t, choice] for t, choice in enumerate(whole)]
        kl_EJ[1:, 0] = [mean_kl[t] for t, _ in places]
        chain = chain._replace(rewards_EJ=chain.rewards_EJ - kl_EJ, kl_EJ=kl_EJ)
        found_EJ = sibling_advantage(chain)
        for t, estimate in enumerate(found_EJ[0, : len(whole)]):
            found.setdefault(whole[: t + 1], []).append((chance, estimate))
    for done, estimates in found.items():
        t, got = len(done) - 1, sum(p * x for p, x in estimates) / sum(p for p, _ in estimates)
        expected = play.advantage(done) - (kl[t, done[-1]] - mean_kl[t])
        bounds.close(got, expected, bounds.sums(len(estimates)), size=5.0)


@pytest.mark.parametrize("credit", ["siblings", "tree"])
@pytest.mark.parametrize("game", SUCCESS.values(), ids=SUCCESS)
def test_one_turn_of_each_episode_stands_for_all_its_turns(game, credit):
    """The sum over trunks and drawn turns is the sum over all turns: the mean number of turns of
    the batch, which holds every trunk as often as it is probable, scales all alike."""
    play, by_step = Play(*game), credit == "tree"
    given = {"algo.name": "grpo", "algo.credit": credit, "algo.branches": 2, "algo.group_size": 1}
    config, played, chances = configure(given).algo, [], []
    ways = list(play.rest(()))
    drawn = [(chance, whole, t) for chance, whole in ways for t in range(len(whole))]
    for member, (chance, whole, t) in enumerate(drawn):
        own, _ = trunk([0.0] * len(whole), member)
        paid = whole if by_step else [0] * (len(whole) - 1) + [play.pays(whole)]
        mean = play.odds[t] if by_step else play.value(whole[:t])
        played += [(own, np.float32(paid)), *(branch(own, t, n, mean) for n in (1, 2))]
        chances.append((chance / len(whole), whole, t))
    chain = chain_of(*learnable(played, by_step=by_step))
    found, _ = ALGORITHMS["grpo"].advantages(config, chain, None, None)
    trunks = found[chain.origin.branch_E < 0]
    turns = np.array([len(whole) for _, whole, _ in chances])
    sums: dict[tuple[int, ...], float] = {}
    for (chance, whole, t), row in zip(chances, trunks, strict=True):
        done = whole[: t + 1]
        sums[done] = sums.get(done, 0.0) + chance * row[t] * turns.mean()
    for done, total in sums.items():
        reached = sum(c for c, whole in ways if whole[: len(done)] == done)
        right = done[-1] - play.odds[len(done) - 1] if by_step else play.advantage(done)
        bounds.close(total, reached * right, bounds.sums(len(drawn)), size=1.0)


@pytest.mark.parametrize("credit", ["siblings", "tree", "solo"])
@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_the_kl_of_other_turns_changes_nothing_where_all_are_worth_the_same(credit, name):
    """Of a trunk the KL of every turn is known, of a branch that of its own alone."""
    given = {"algo.name": name, "algo.credit": credit, "algo.branches": 2, "algo.group_size": 1}
    config = configure({**given, "algo.episodes": 2, "algo.kl_coef": 0.1}).algo
    if credit == "solo":
        chain = alone_on([[0.0, 0.0, 0.7]], {0: float(np.float32(0.7)), 1: float(np.float32(0.7))})
    else:
        own, paid = trunk([0.0, 0.0, 0.7])
        equal = [branch(own, 1, n, float(paid.sum())) for n in (1, 2)]
        if credit == "tree":
            equal = [branch(own, 1, n, 0.0) for n in (1, 2)]
        chain = chain_of(*learnable([(own, paid), *equal], by_step=credit == "tree"))
    kl_EJ = np.zeros_like(chain.rewards_EJ)
    kl_EJ[0, [0, 2]] = 0.1, 0.9
    chain = chain._replace(rewards_EJ=chain.rewards_EJ - kl_EJ, kl_EJ=kl_EJ)
    algorithm = ALGORITHMS[name]
    found, _ = algorithm.advantages(config, chain, None, None)
    assert not found[0, 1].any() and not found[1:].any()
    if credit == "solo":
        assert found[0] == pytest.approx([-0.1, 0, -0.9])


def test_which_turns_have_branches_follows_from_seed_step_and_episode():
    def at(where: str, step: int, **more) -> list[list[int]]:
        config = configure(
            {"algo.name": "grpo", "algo.credit": "siblings", "algo.branches": 1,
             "algo.branch_at": where, **more}
        )  # fmt: skip
        episodes = [trunk([0] * 6, member)[0] for member in range(8)]
        return [branched_turns(episode, config, step) for episode in episodes]

    assert at("every", 0) == [list(range(6))] * 8
    names = {name: k for k, name in enumerate(small.NAMES[:2])}
    for name, k in names.items():
        assert at(name, 0) == [list(range(k, 6, 2))] * 8
    assert at("random", 0) == at("random", 0) != at("random", 1)
    assert len({turn for turns in at("random", 0) for turn in turns}) > 2


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"algo.name": "grpo", "algo.credit": "siblings", "algo.branches": 1,
          "algo.branch_continue": "best"}, "credit siblings .* expected end, got best"),
        ({"algo.name": "grpo", "algo.credit": "tree", "algo.branches": 1,
          "algo.branch_continue": "best"}, "expected every, or agents, got random"),
        ({"algo.name": "grpo", "algo.credit": "siblings"}, "--algo.branches: credit siblings"),
        ({"algo.name": "grpo", "algo.branches": 2}, "credit last .* expected 0, got 2; leave"),
        ({"algo.name": "appo", "algo.branches": 2}, "unknown setting.*grpo"),
        ({"algo.name": "tppo", "algo.credit": "tree"}, "tree needs .*name grpo or"),
        ({"algo.name": "distill", "algo.credit": "solo"}, "solo needs --algo.name .*reinforce"),
        ({"algo.name": "grpo", "algo.credit": "sibling"}, "tree, solo, got 'sibling'$"),
        ({"algo.name": "grpo", "algo.credit": "siblings", "algo.branches": 1,
          "algo.dynamic_sampling": True}, "further samples are the baseline"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_branches_are_refused(flags, expected):
    with pytest.raises(BadInput, match=expected):
        configure(flags)


def test_a_branch_keeps_the_place_of_its_turn_in_the_trunk():
    """So ``group_turn`` scales it with its siblings, and not with its agent's first turns."""
    own, earned = trunk([0, 0, 1, 0])
    played = [(own, earned), *(branch(own, turn, 1, 10.0 * turn) for turn in (0, 2, 3))]
    chain = chain_of(*learnable(played))
    assert [row[0] for row in chain.turn.agent_turn_EJ[1:].tolist()] == [0, 1, 1]
    assert chain.turn.number_EJ[1:, 0].tolist() == chain.turn.layer_EJ[1:, 0].tolist() == [0, 2, 3]
    found = NORMALIZERS["group_turn"](sibling_advantage(chain), chain, True)
    assert np.abs(found[[1, 2, 3], 0]) == pytest.approx(1)


def test_in_a_tree_a_turn_earns_its_step_reward_minus_its_siblings():
    """What comes later counts nothing: neither for the trunk nor for a branch."""
    own, _ = trunk([0, 0, 0])
    others = [branch(own, 1, 1, 0.2)[0], branch(own, 1, 2, 0.1)[0]]
    rewards = [[9.0, 0.6, 7.0], [9.0, 0.2], [9.0, 0.1]]
    paid = [np.asarray(row, np.float32) for row in rewards]
    chain = chain_of(*learnable(list(zip([own, *others], paid, strict=True)), by_step=True))
    found = sibling_advantage(chain, by_step=True)
    assert found[0] == pytest.approx([0, 0.6 - 0.15, 0])
    assert found[1:, 0] == pytest.approx([0.2 - 0.35, 0.1 - 0.4])


def alone_on(returns: list[list[float]], alone: dict[int, float]) -> Chain:
    """Samples of one task, with what their agents earn alone on it."""
    pairs = [trunk(rewards, member) for member, rewards in enumerate(returns)]
    return chain_of([e._replace(alone=alone) for e, _ in pairs], [paid for _, paid in pairs])


def test_a_turn_earns_what_the_team_earns_beyond_its_agent_alone():
    found = solo_advantage(alone_on([[0.25, 0.75], [0.0, 0.5], [0.0, 0.0]], {0: 0.5, 1: 0.25}))
    assert found.tolist() == [[0.5, 0.75], [0.0, 0.25], [-0.5, -0.25]]
    one_is_unknown = solo_advantage(alone_on([[0, 1.0]], {1: 0.0}))
    assert one_is_unknown.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("credit", ["siblings", "tree", "solo"])
def test_identical_samples_teach_exactly_nothing(credit):
    """Rewards whose sums miss each other by a rounding; turns and agents are paid differently."""
    if credit == "solo":
        total = float(np.sum(np.float32([0.1, 0.2, 0.7])))
        chain = alone_on([[0.1, 0.2, 0.7]] * 2, {0: total, 1: (total * 3) / 3})
    else:
        pairs = []
        for member in (0, 1):
            own, paid = trunk([0.1, 0.2, 0.7], member)
            equal = [branch(own, t, n, 0)[0] for t in range(3) for n in (1, 2)]
            pairs += [(own, paid), *((e, paid[: e.branch[0] + 1]) for e in equal)]
            if credit == "siblings":
                whole = np.float32([0, 0, paid.sum()])
                pairs[-6:] = [(e, whole[-len(e.turns) :]) for e in equal]
        chain = chain_of(*learnable(pairs, by_step=credit == "tree"))
    zeros = np.zeros_like(chain.rewards_EJ)
    for name, normalize in itertools.product(["grpo", "reinforce"], NORMALIZERS):
        given = {"algo.name": name, "algo.normalize": normalize, "algo.credit": credit}
        config = configure({**given, "algo.branches": 2, "algo.group_size": 2}).algo
        found, _ = normalized_advantages(config, ALGORITHMS[name], chain, zeros, np.zeros(2))
        assert found.shape == zeros.shape and not found.any()
