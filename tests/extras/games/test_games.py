"""Players: who acts, what each sees and earns; and games that need no package."""

from __future__ import annotations

import types

import numpy as np
import pytest
import small
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Scripted, text

from marft_jax.background import DaemonThreads
from marft_jax.errors import BadInput, EpisodesFailed
from marft_jax.extras.check.playing import check
from marft_jax.extras.games import exploitability as exact
from marft_jax.extras.games import pettingzoo
from marft_jax.extras.games.moves import read_move
from marft_jax.extras.games.open_spiel import Settings, source
from marft_jax.extras.games.tree import load
from marft_jax.learning.algorithms import find_algorithm, normalized_advantages
from marft_jax.learning.batch import build
from marft_jax.learning.chain import chains_of
from marft_jax.learning.credit import groups_with_signal
from marft_jax.learning.settings import SETTINGS
from marft_jax.rollout.rollout import Rollout
from marft_jax.team.profiles import Profile
from marft_jax.team.team_files import Blueprint
from marft_jax.team.workflows import find_workflow
from marft_jax.types import StepResult

SEATS = tuple(Profile(name, prompt=name, answers=True) for name in ("ann", "bob"))
LONELY = small.team_of(Blueprint(SEATS[:1]), context=256, max_new_tokens=24)
PAIR = small.team_of(Blueprint(SEATS), context=256, max_new_tokens=24)


def play(create, speak, team=PAIR, tasks=(0, 1, 2, 3), **how):
    engine = Scripted(speak)
    rollout = Rollout(engine, team, find_workflow("players"), create, DaemonThreads(), **how)
    return rollout.play(small.samples(tasks), 0), engine


def kuhn(**own):
    return source(Settings(**own), "train").create


# The core: chains, credit and advantages of each player.


class Race:
    """Two act at once, then one; paid at the end, the first one for a step in which it is idle."""

    def players(self, agents):
        self._names = agents
        return {name: f"side {i}" for i, name in enumerate(agents)}

    def reset(self, seed):
        self._steps = 0
        return f"race {seed}"

    def acting(self):
        return self._names if self._steps == 0 else self._names[1:]

    def view(self, agent, observation):
        return f"{agent} at {self._steps}"

    def step(self, turns):
        self._steps += 1
        done = self._steps == 2
        return StepResult("", 0.5, done, agent_rewards={"side 0": 2.0, "bob": -1.0} if done else {})


def test_the_game_says_who_acts_and_each_is_paid_for_itself():
    played, engine = play(Race, lambda request: "x", tasks=[7])
    [episode] = played.episodes
    assert [(t.name, t.step, t.player) for t in episode.turns] == [
        ("ann", 0, "side 0"), ("bob", 0, "side 1"), ("bob", 1, "side 1")
    ]  # fmt: skip
    assert [text(request.prompt) for request in engine.requests] == [
        "<s>ann<u>ann at 0<a>", "<s>bob<u>bob at 0<a>", "<s>bob<u>bob at 1<a>"
    ]  # fmt: skip
    assert episode.dependency.tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 0]]
    assert chains_of([episode]) == [(0, [0]), (0, [1, 2])]
    [paid] = small.paid([episode])  # both get the common 0.5 of each step
    assert paid.tolist() == [0.5 + 0.5 + 2.0, 0.5, 0.5 - 1.0]
    assert episode.reward == (3.0 + 0.0) / 2  # the mean of what the players earned


@pytest.mark.parametrize(
    ("acting", "expected"),
    [(lambda self: [], "acting: expected some of ann, bob"), (lambda self: ["eve"], "eve")],
)
def test_nobody_acts_who_is_not_of_the_team(acting, expected):
    with pytest.raises(BadInput, match=expected):
        play(type("Odd", (Race,), {"acting": acting}), lambda request: "x")


def test_a_game_needs_a_player_for_each_agent_and_its_workflow():
    nobody = type("Nobody", (Race,), {"players": lambda self, agents: {"ann": "ann"}})
    with pytest.raises(BadInput, match="players: expected the player of each of ann, bob"):
        play(nobody, lambda request: "x")
    with pytest.raises(BadInput, match="seats for 2, expected as many agents, got 1"):
        play(kuhn(), lambda request: "Pass", LONELY)


def in_a_game(seed: int, rewards, players=("a", "b"), group: int = 4):
    """Episodes in which turns of two players alternate at random, each paid at its end."""
    rng = np.random.default_rng(seed)
    episodes = []
    for e, own in enumerate(rewards):
        acted = [0, 1, *rng.integers(0, 2, rng.integers(0, 4))]
        turns = [small.turn(a, [1, 2], rng.integers(0, 256, rng.integers(1, 4)), step=k)
                 for k, a in enumerate(acted)]  # fmt: skip
        turns = [t._replace(player=players[t.agent]) for t in turns]
        made = small.episode(e // group, turns, [0.0] * len(turns))
        last = made.results[-1]._replace(agent_rewards=dict(zip(small.NAMES, own, strict=False)))
        episodes.append(made._replace(results=[*made.results[:-1], last]))
    return episodes


ALGORITHMS = [(n, how) for n in ("grpo", "gspo") for how in ("group", "batch", "agent", "none")]
ALGORITHMS += [("appo", "batch"), ("tppo", "batch"), ("reinforce", "none")]


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(ALGORITHMS),
    st.lists(st.floats(-2, 2).map(lambda x: round(x, 2)), min_size=16, max_size=16),
    st.sampled_from([("a", "b"), ("both", "both")]),
    st.integers(0, 99),
)
def test_advantages_change_with_anothers_rewards_only_where_they_are_shared(
    kind, paid, players, seed
):
    """Invariant 16, also of which groups have a signal for the player."""
    name, how = kind
    own = {"baseline": "role"} if name == "reinforce" else {}
    algo = SETTINGS[name](normalize=how, episodes=8, group_size=4, **own)
    algorithm, values = find_algorithm(name), np.random.default_rng(seed)

    def learned(theirs):
        rewards = list(zip(paid[:8], theirs, strict=True))
        episodes = in_a_game(seed, rewards, players)
        credited = small.paid(episodes)
        chain = build(episodes, credited, (0, 1), algo, algorithm.level).chain
        known = np.random.default_rng(seed).normal(size=chain.mask_EJ.shape) * chain.mask_EJ
        got, _ = normalized_advantages(algo, algorithm, chain, known, np.full(16, 0.1))
        return got[(chain.agent_EJ == 0) & (chain.mask_EJ > 0)]

    before, after = learned(paid[8:]), learned(values.normal(size=8).round(2).tolist())
    assert players[0] == "both" or before.tolist() == after.tolist()
    if players[0] == "both" and name == "appo":
        assert before.tolist() != after.tolist()


def test_a_moving_mean_is_each_seats_own():
    """RAE: a group of one, and the mean of a role."""
    algo = SETTINGS["reinforce"](group_size=1, episodes=2, baseline="role")
    episodes = in_a_game(0, [(1.0, -1.0), (1.0, -1.0)], group=1)
    chain = build(episodes, small.paid(episodes), (0, 1), algo, "action").chain
    mean = np.zeros(16)
    mean[0] = 1.0  # of the first agent's first turn
    got, _ = normalized_advantages(algo, find_algorithm("reinforce"), chain, None, mean)
    firsts = (chain.turn.agent_turn_EJ == 0) & (chain.mask_EJ > 0)
    assert not got[firsts & (chain.agent_EJ == 0)].any()
    assert (got[firsts & (chain.agent_EJ == 1)] == -1).all()


def test_a_group_has_a_signal_where_any_player_has_one():
    alike, unlike = [(1.0, 0.0)] * 4, [(1.0, 0.0)] * 3 + [(1.0, 0.5)]
    for rewards, expected in ((alike, set()), (unlike, {0})):
        episodes = in_a_game(1, rewards)
        assert groups_with_signal(episodes, small.paid(episodes)) == expected


# Kuhn poker.


def test_kuhn_is_paid_as_its_rules_say():
    found, _ = play(kuhn(), lambda request: "bet", tasks=range(12))
    for episode in found.episodes:
        cards = [text(turn.prompt).split("\n")[1][0] for turn in episode.turns[:2]]
        sign = 1 if cards[0] > cards[1] else -1
        assert dict(episode.results[-1].agent_rewards) == {"ann": 2.0 * sign, "bob": -2.0 * sign}
        assert [turn.text for turn in episode.turns] == ["bet", "bet"]
    again, _ = play(kuhn(), lambda request: "bet", tasks=range(12))
    assert [e.results for e in again.episodes] == [e.results for e in found.episodes]
    assert len({e.turns[0].prompt.tobytes() for e in found.episodes}) == 3  # of the cards


def test_who_passes_on_a_bet_loses_the_ante():
    def speak(request):
        return "Pass" if "player 0" in text(request.prompt) else "Bet"

    found, _ = play(kuhn(), speak)
    assert {len(e.turns) for e in found.episodes} == {3}
    assert all(e.results[-1].agent_rewards == {"ann": -1.0, "bob": 1.0} for e in found.episodes)


@pytest.mark.parametrize(
    ("how", "turns", "paid"),
    [
        (dict(illegal="forfeit"), 1, -2.0),
        (dict(illegal="retry", retries=2), 3, -2.0),
        (dict(illegal="random"), None, None),
    ],
)
def test_illegal_moves_cost_what_the_setting_says(how, turns, paid):
    def speak(request):
        return "fold!" if "player 0" in text(request.prompt) else "Bet"

    found, engine = play(kuhn(**how), speak, tasks=range(8))
    for episode in found.episodes:
        results = [result.info.get("illegal") for result in episode.results]
        if turns is None:  # a legal move in its place
            assert len(episode.turns) > 1 and results[:2] == [["ann"], None]
            continue
        assert len(episode.turns) == turns and results == [["ann"]] * turns
        assert episode.results[-1].agent_rewards == {"ann": paid, "bob": -paid}
    told = ["no legal move" in text(request.prompt) for request in engine.requests]
    assert sum(told) == (8 * 2 if turns == 3 else 0)


@pytest.mark.parametrize(
    ("moves", "said", "move"),
    [
        ("3 4", "34", None), ("3 4", "I take 34", None), ("3 4", "my move: 3", "3"),
        ("3 4", "first 3, no: 4", "4"), ("3 4", "3.", "3"), ("3 4", "**3**", "3"),
        ("3 4", "I take 3.5 or 1/4", None), ("3 4", "-3", None), ("3 -3", "I play -3", "-3"),
        ("3 4", "3rd, x4", None), ("b1 b10", "b10", "b10"), ("b1", "b10", None), ("", "3", None),
        ("b1", "ab1 or b1_2", None), ("b1 c3", "b1-c3", None), ("b1", "_b1_", "b1"),
        ("Pass Bet", "pass? No: BET!", "Bet"), ("Pass Bet", "alphabet", None),
        ("Pass Bet", "Pass the bets", "Pass"), ("O-O O-O-O", "castle: O-O-O", "O-O-O"),
        ("O-O", "O-O-O", None), ("bxc3 Bxc3", "I play Bxc3", "Bxc3"), ("bxc3 Bxc3", "BXC3", None),
        ("x(0,1) x(0,12)", "so x(0,12) it is", "x(0,12)"), ("raise raise|all", "raise", "raise"),
    ],
)  # fmt: skip
def test_a_move_is_the_text_or_the_last_one_that_stands_alone(moves, said, move):
    assert read_move(said, {name: name for name in moves.split()}) == move


def test_of_two_moves_that_begin_alike_the_longer_one_is_meant():
    moves = {"Bet": 0, "Bet 3": 1, "3": 2}
    assert (read_move("I bet 3", moves), read_move("I bet 34", moves)) == (1, 0)
    assert read_move("<think>I bet 3?</think>I bet 34", moves) == 0
    assert read_move("<think>I bet 3?", moves) is None


def test_legal_moves_are_what_the_sampler_may_draw():
    found, engine = play(kuhn(illegal="masked"), lambda request: "Bet")
    end = PAIR.tokenizers[0].end_id
    assert {request.choices for request in engine.requests} == {((*b"Pass", end), (*b"Bet", end))}
    assert len(found.episodes) == 4
    short = small.team_of(Blueprint(SEATS), context=256, max_new_tokens=4)
    with pytest.raises(BadInput, match="choices: expected at most 4 tokens"):
        play(kuhn(illegal="masked"), lambda request: "Bet", short)


def test_bots_take_seats_and_agents_may_change_theirs():
    found, _ = play(kuhn(bots=("0=random",)), lambda request: "Pass", LONELY, tasks=range(8))
    shown = {text(turn.prompt).split("\n")[1][1:] for e in found.episodes for turn in e.turns}
    assert shown == {"p", "b"}
    found, _ = play(kuhn(rotate=True), lambda request: "Pass")
    assert [e.turns[0].name for e in found.episodes] == ["ann", "bob"] * 2
    turned = kuhn(bots=("0=random",), rotate=True)
    found, _ = play(turned, lambda request: "Pass", LONELY, tasks=range(8))
    assert ["player 1" in text(e.turns[0].prompt) for e in found.episodes] == [True, False] * 4
    with pytest.raises(BadInput, match="expected seat=name, of the seats 0, 1, got '2=random'"):
        kuhn(bots=("2=random",))


def test_a_game_that_is_not_there_is_named():
    with pytest.raises(BadInput, match="no_such"):
        kuhn(game="no_such")


def test_a_team_of_another_workflow_cannot_play():
    how = find_workflow("sequential"), kuhn(), DaemonThreads()
    rollout = Rollout(Scripted(lambda request: "Pass"), PAIR, *how)
    with pytest.raises((BadInput, EpisodesFailed), match="expected --team.workflow players"):
        rollout.play(small.samples([0]), 0)


# Games of other packages, by stand-ins with their interfaces; and themselves where they are.


class Discrete:
    def __init__(self, n):
        self.n = n


class Turns:
    """A PettingZoo game of moves in turn: who takes the last of five matches loses."""

    metadata = {"render_modes": ["human"]}
    possible_agents = ["p0", "p1"]

    def reset(self, seed):
        self.agents, self.left, self.agent_selection = list(self.possible_agents), 5, "p0"
        self.terminations = self.truncations = dict.fromkeys(self.agents, False)
        self.rewards, self.infos = dict.fromkeys(self.agents, 0.0), {}

    def observe(self, name):
        mask = np.array([0, self.left >= 1, self.left >= 2, 0])
        return {"observation": np.array([self.left]), "action_mask": mask}

    def action_space(self, name):
        return Discrete(4)

    def step(self, action):
        own = self.agent_selection
        self.agent_selection = other = "p1" if own == "p0" else "p0"
        if action is None:
            self.agents.remove(own)
            return
        self.left -= action
        if not self.left:
            self.terminations = dict.fromkeys(self.agents, True)
            self.rewards = {own: -1.0, other: 1.0}


class AtOnce:
    """A PettingZoo game of moves at once: matching pennies."""

    metadata = {}
    possible_agents = ["p0", "p1"]

    def reset(self, seed):
        self.agents = list(self.possible_agents)
        return dict.fromkeys(self.agents, 7), {}

    def action_space(self, name):
        return Discrete(2)

    def step(self, actions):
        self.agents, even = [], actions["p0"] == actions["p1"]
        return {}, {"p0": 1.0 if even else -1.0, "p1": -1.0 if even else 1.0}, {}, {}, {}


def zoo(make, **own):
    return lambda: pettingzoo.ZooGame(pettingzoo.Settings(**own), make)


def test_a_game_of_pettingzoo_in_turn_and_at_once():
    found, engine = play(zoo(Turns), lambda request: "I take 2", tasks=[0])
    [episode] = found.episodes
    assert [t.name for t in episode.turns] == ["ann", "bob", "ann"]
    assert text(engine.requests[0].prompt) == "<s>ann<u>p0\n[5]\nmoves: 1, 2<a>"
    assert [r.info.get("illegal") for r in episode.results] == [None, None, ["ann"]]
    assert episode.results[-1].agent_rewards == {"ann": -1.0}  # one match is left: 2 is illegal
    for said in ("b2", "2.5", "1/2", "I take 22"):  # no move stands alone in it
        [episode] = play(zoo(Turns), lambda request, said=said: said, tasks=[0])[0].episodes
        assert episode.results[0].info["illegal"] == ["ann"]
    found, _ = play(zoo(Turns, illegal="random"), lambda request: "2", tasks=[0])
    assert found.episodes[0].results[-1].agent_rewards == {"ann": -1.0, "bob": 1.0}
    found, engine = play(zoo(Turns, illegal="masked"), lambda request: "1", tasks=[0])
    assert len(engine.requests[0].choices) == 2 and len(engine.requests[-1].choices) == 1
    outcomes = found.episodes[0].results[-1].info["outcomes"]
    assert {a: (o["seat"], o["outcome"]) for a, o in outcomes.items()} == {
        "ann": (0, "loss"), "bob": (1, "win")
    }  # fmt: skip
    found, engine = play(zoo(AtOnce), lambda request: "1", tasks=[0])
    assert [t.name for t in found.episodes[0].turns] == ["ann", "bob"]
    assert found.episodes[0].results[0].agent_rewards == {"ann": 1.0, "bob": -1.0}


def test_a_game_of_open_spiel_is_played_and_solved():
    pytest.importorskip("pyspiel")
    create = kuhn(game="tic_tac_toe", numbered=True, illegal="random", bots=("0=perfect",))
    found, engine = play(create, lambda request: "0", LONELY, tasks=range(3))
    ends = [e.results[-1].info["outcomes"]["ann"]["outcome"] for e in found.episodes]
    assert "win" not in ends and "moves: 0 o(0,0)" in text(engine.requests[0].prompt)
    tree = load("kuhn_poker(players=2)")
    ours = load("kuhn_poker")
    keys = {exact.key_of(tree, state) for state in exact.states(tree)}
    assert keys == {exact.key_of(ours, state) for state in exact.states(ours)}


def test_the_check_of_environments_plays_games():
    problems, remarks = check(Race, episodes=2, agents=("ann", "bob"))
    assert not problems and "2 distinct tasks" in remarks[0]
    broken = type("Broken", (Race,), {"acting": lambda self: 1 / 0})
    assert "ZeroDivisionError" in check(broken, episodes=1, agents=("ann", "bob"))[0][0]


@pytest.mark.parametrize(
    "settings",
    [{"game": "leduc_poker"}, {"bots": ("1=random",), "rotate": True}],  # one deals in between
)
def test_a_demonstration_of_a_game_can_be_played_again(settings):
    if "game" in settings:
        pytest.importorskip("pyspiel")
    game = kuhn(**settings)()
    for task in range(20):
        agents = [types.SimpleNamespace(name=n) for n in ("ann", "bob")[: 2 - ("bots" in settings)]]
        game.reset(task)
        turns = game.demonstrate(agents)
        boards = str(game._state)
        game.reset(task)
        game.players([agent.name for agent in agents])
        for turn in turns:
            assert turn["agent"] in game.acting()
            done = game.step([types.SimpleNamespace(name=turn["agent"], text=turn["text"])]).done
        assert done and str(game._state) == boards
