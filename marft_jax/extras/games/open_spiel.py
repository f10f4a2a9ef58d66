"""Games of OpenSpiel; Kuhn poker is built in and needs no package.

A move is written as OpenSpiel writes it. The task's number and the moves determine a game.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from marft_jax.envs.base import EnvSource, Member, Split, first_seed
from marft_jax.errors import BadInput
from marft_jax.extras.games import bots
from marft_jax.extras.games.moves import read_move
from marft_jax.extras.games.seats import check_movers, outcomes, take_seats
from marft_jax.extras.games.tree import Tree, load
from marft_jax.settings.config import EnvSettings
from marft_jax.settings.setting import Natural, setting
from marft_jax.types import StepResult, Turn

_LISTED = 40  # legal moves that a player is shown, at most


@dataclasses.dataclass(frozen=True)
class Settings(EnvSettings):
    """Settings of a game."""

    name: str = "open_spiel"
    game: str = "kuhn_poker"
    """Name and parameters of the game, as OpenSpiel writes them: leduc_poker,
    nim(pile_sizes=1;2;3)."""
    illegal: Literal["forfeit", "retry", "random", "masked"] = "forfeit"
    """What follows a text that is no legal move. forfeit: the player loses the game. retry: the
    player is asked again, with a message. random: a legal move at random. masked: the sampler draws
    legal moves only."""
    retries: Natural = setting(3, needs="env.illegal retry")
    """How often a player is asked again in a turn, before it forfeits the game."""
    bots: tuple[str, ...] = ()
    """Seats without a model, as `1=random`, `1=perfect` or `1=package.module:function`."""
    numbered: bool = False
    """Writes a move as its number, for small models. Players are shown what each number means."""
    rotate: bool = False
    """Agents and bots change seats from task to task."""
    teacher: str = "random"
    """Player of demonstrations: random, perfect, or package.module:function."""


def source(settings: Settings, split: Split) -> EnvSource:
    """Makes games; evaluation and training use different deals.

    Raises:
        BadInput: there is no such game, seat or bot.
    """
    table = Table(load(settings.game), settings.numbered)
    seats = bots_of(settings, table.tree)
    bots.find_bot(settings.teacher)
    return EnvSource(lambda: TreeGame(settings, table, seats, first_seed(split)))


def bots_of(settings: Settings, tree: Tree) -> dict[int, bots.Bot]:
    """Finds the bot of each seat in ``env.bots``; raises ``BadInput`` for a wrong seat or bot."""
    chosen = {}
    for text in settings.bots:
        seat, _, name = text.partition("=")
        if not (seat.isdecimal() and int(seat) < tree.players and name):
            seats = ", ".join(map(str, range(tree.players)))
            raise BadInput(f"--env.bots: expected seat=name, of the seats {seats}, got {text!r}")
        chosen[int(seat)] = bots.find_bot(name)
    if len(chosen) == tree.players:
        raise BadInput("--env.bots: expected at least one seat without a bot, for the team")
    return chosen


class Table(NamedTuple):
    """A game as texts: its moves and its states."""

    tree: Tree
    numbered: bool = False

    def moves(self, state: Any, seat: int) -> dict[str, int]:
        """Maps the texts of the legal moves to their actions."""
        return {self.text(state, seat, a): a for a in state.legal_actions(seat)}

    def text(self, state: Any, seat: int, action: int) -> str:
        """Writes an action."""
        return str(action) if self.numbered else state.action_to_string(seat, action).strip()

    def see(self, state: Any, seat: int) -> str:
        """Writes what a player sees: its information state and its legal moves."""
        moves = self.moves(state, seat)
        if self.numbered:
            moves = [f"{text} {state.action_to_string(seat, a)}" for text, a in moves.items()]
        more = ["..."] if len(moves) > _LISTED else []
        shown = ", ".join([*list(moves)[:_LISTED], *more])
        return f"player {seat}\n{self.tree.see(state, seat)}\nmoves: {shown}"


class TreeGame:
    """One game as an ``envs.base.Game``.

    Args:
        seats: the bots of the seats without a model.
        first: offset of the tasks' numbers.
    """

    def __init__(
        self, settings: Settings, table: Table, seats: Mapping[int, bots.Bot], first: int = 0
    ) -> None:
        self._settings, self._table, self._given, self._first = settings, table, seats, first
        self._tree = tree = table.tree
        self._agents: dict[int, str] = {}  # by seat; bots have the others
        self._seats: dict[str, int] = {}
        self._paid = [0.0] * tree.players
        self._tries = 0
        self._chosen: dict[int, int] = {}  # by seat, until all who move now have moved
        self._notes: dict[int, str] = {}
        if settings.illegal == "masked":
            self.legal = lambda agent: list(self._table.moves(self._state, self._seats[agent]))

    def reset(self, seed: int) -> str:
        self._turned = seed if self._settings.rotate else 0
        self._bots = {self._seat_after(seat): bot for seat, bot in self._given.items()}
        self._number = seed + self._first
        self._rng = random.Random(self._number)
        self._state = self._tree.root()
        self._advance()
        return self._settings.game

    def players(self, agents: Sequence[str]) -> dict[str, str]:
        free = [seat for seat in range(self._tree.players) if seat not in self._given]
        seats = [self._seat_after(seat) for seat in free]
        self._agents = take_seats(self._settings.game, seats, agents)
        self._seats = {agent: seat for seat, agent in self._agents.items()}
        return {agent: agent for agent in agents}

    def acting(self) -> list[str]:
        return [self._agents[seat] for seat in self._to_move() if seat not in self._chosen]

    def view(self, agent: str, observation: str) -> str:
        seat = self._seats[agent]
        return self._notes.get(seat, "") + self._table.see(self._state, seat)

    def step(self, turns: Sequence[Turn]) -> StepResult:
        check_movers(turns, self.acting())
        self._notes, moves, wrong = {}, dict[str, str](), list[str]()
        for turn in turns:
            seat = self._seats[turn.name]
            legal = self._table.moves(self._state, seat)
            action = read_move(turn.text, legal)
            if action is None:
                wrong.append(turn.name)
            if action is None and self._settings.illegal in ("random", "masked"):
                action = self._rng.choice(list(legal.values()))
            if action is not None:
                self._chosen[seat] = action
                moves[turn.name] = self._state.action_to_string(seat, action).strip()
        info: dict[str, Any] = {"moves": moves} | ({"illegal": wrong} if wrong else {})
        forfeits = [name for name in wrong if name not in moves and self._forfeits(name)]
        if forfeits:
            now, done = self._forfeited(forfeits), True
        else:
            if not self.acting():
                self._move()
            now, done = list(self._state.returns()), self._state.is_terminal()
        paid = {self._agents[s]: now[s] - self._paid[s] for s in self._agents}
        self._paid = now
        info["board"] = str(self._state)
        if done:
            info["outcomes"] = outcomes(now, self._agents)
        return StepResult("", 0.0, done, info, {name: r for name, r in paid.items() if r})

    def demonstrate(self, agents: Sequence[Member]) -> list[dict[str, str]]:
        """Plays as ``env.teacher``, with random numbers of its own: a replay draws none for it."""
        self.players([agent.name for agent in agents])
        teacher, turns = bots.find_bot(self._settings.teacher), []
        drawn = random.Random(f"teacher {self._number}")
        while not self._state.is_terminal():
            for seat in self._to_move():
                action = self._chosen[seat] = teacher(self._state, seat, drawn)
                text = self._table.text(self._state, seat, action)
                turns.append({"agent": self._agents[seat], "text": text})
            self._move()
        return turns

    def _seat_after(self, seat: int) -> int:
        """Returns the place of a seat in this task, after ``env.rotate``."""
        return (seat + self._turned) % self._tree.players

    def _to_move(self) -> list[int]:
        """Lists the team's seats that move now."""
        if self._state.is_simultaneous_node():
            return [s for s in sorted(self._agents) if self._state.legal_actions(s)]
        return [self._state.current_player()]

    def _forfeits(self, agent: str) -> bool:
        """Counts an illegal move and tells if it loses the game."""
        self._tries += 1
        self._notes[self._seats[agent]] = "That was no legal move.\n"
        return self._settings.illegal != "retry" or self._tries > self._settings.retries

    def _forfeited(self, names: Sequence[str]) -> list[float]:
        """Returns of a forfeited game: the least possible return for those who forfeit.

        In a zero-sum game the others share the gain; else they keep what they have.
        """
        least, lost = self._tree.least, [self._seats[name] for name in names]
        others = self._tree.players - len(lost)
        won = [-least * len(lost) / max(others, 1)] * self._tree.players
        kept = won if self._tree.zero_sum else self._paid
        return [least if seat in lost else kept[seat] for seat in range(self._tree.players)]

    def _move(self) -> None:
        """Applies the chosen moves, then those of chance and bots that follow."""
        if self._state.is_simultaneous_node():
            seats = range(self._tree.players)
            chosen = {s: self._bots[s](self._state, s, self._rng) for s in seats if s in self._bots}
            chosen = dict.fromkeys(seats, 0) | chosen | self._chosen
            self._state.apply_actions([chosen[seat] for seat in seats])
        else:
            self._state.apply_action(self._chosen[self._state.current_player()])
        self._chosen, self._tries = {}, 0
        self._advance()

    def _advance(self) -> None:
        """Lets chance and bots move until the team has to move."""
        while not self._state.is_terminal():
            if self._state.is_chance_node():
                actions, weights = zip(*self._state.chance_outcomes(), strict=True)
                self._state.apply_action(self._rng.choices(actions, weights)[0])
            elif self._state.is_simultaneous_node() or (
                (seat := self._state.current_player()) not in self._bots
            ):
                return
            else:
                self._state.apply_action(self._bots[seat](self._state, seat, self._rng))
