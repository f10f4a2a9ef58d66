"""Games of OpenSpiel; Kuhn poker is built in.

A move is written as OpenSpiel writes it. A game is a function of the task's number and the moves.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from marft_jax.envs.base import EVAL_SEEDS, EnvSource, Member, Split
from marft_jax.errors import BadInput
from marft_jax.extras.games import bots
from marft_jax.extras.games.outcomes import outcomes
from marft_jax.extras.games.processes import GameSettings, in_processes
from marft_jax.extras.games.seats import check_movers, seat_of, take_seats
from marft_jax.extras.games.tree import Tree, load
from marft_jax.setting import setting
from marft_jax.types import StepResult, Turn

_LISTED = 40  # legal moves that a player is shown, at most
_ALONE = (
    r"(?<![^\W_])(?<![^\W_]_)(?<![\w)]-)(?<![-−](?=\d))(?<!\d[./])"
    r"(?:%s)(?!_*[^\W_]|[./]\d|-\w)"
)


@dataclasses.dataclass(frozen=True)
class Settings(GameSettings):
    """Settings of a game."""

    name: str = "open_spiel"
    game: str = "kuhn_poker"
    """Its name and parameters, as OpenSpiel writes them: leduc_poker, nim(pile_sizes=1;2;3)."""
    illegal: Literal["forfeit", "retry", "random", "masked"] = "forfeit"
    """A text that is no legal move loses the game; is asked for again, with a message; becomes a
    legal move at random; or cannot be: the sampler draws legal moves alone."""
    retries: int = setting(3, needs="env.illegal retry")
    """So often a player is asked again in a turn, before it forfeits."""
    bots: tuple[str, ...] = ()
    """Seats without a model, as `1=random`, `1=perfect` or `1=package.module:function`."""
    numbered: bool = False
    """A move is written as its number, for small models; players are shown what each stands for."""
    rotate: bool = False
    """Agents and bots change seats from task to task."""
    teacher: str = "random"
    """Who plays demonstrations: random, perfect, or package.module:function."""


def source(settings: Settings, split: Split) -> EnvSource:
    """Deals of a game, those of evaluation apart from those of training.

    Raises:
        BadInput: there is no such game, seat or bot.
    """
    table = Table(load(settings.game), settings.numbered)
    seats = bots_of(settings, table.tree)
    bots.find_bot(settings.teacher)
    first = EVAL_SEEDS if split == "eval" else 0
    source = EnvSource(lambda: TreeGame(settings, table, seats, first))
    return in_processes(settings, split, source)


def bots_of(settings: Settings, tree: Tree) -> dict[int, bots.Bot]:
    """Finds the bots of a game's seats; raises ``BadInput`` where there is no such one."""
    found = {}
    for text in settings.bots:
        seat, _, name = text.partition("=")
        if not (seat.isdecimal() and int(seat) < tree.players and name):
            seats = ", ".join(map(str, range(tree.players)))
            raise BadInput(f"--env.bots: expected seat=name, of the seats {seats}, got {text!r}")
        found[int(seat)] = bots.find_bot(name)
    if len(found) == tree.players:
        raise BadInput("--env.bots: expected a seat that is left for the team, got all taken")
    return found


class Table(NamedTuple):
    """A game as a team sees it: the texts of its moves and states."""

    tree: Tree
    numbered: bool = False

    def moves(self, state: Any, seat: int) -> dict[str, int]:
        """Texts of the legal moves, and their actions."""
        return {self.text(state, seat, a): a for a in state.legal_actions(seat)}

    def text(self, state: Any, seat: int, action: int) -> str:
        return str(action) if self.numbered else state.action_to_string(seat, action).strip()

    def see(self, state: Any, seat: int) -> str:
        """Text that a player sees: what it knows, and its legal moves."""
        moves = self.moves(state, seat)
        if self.numbered:
            moves = [f"{text} {state.action_to_string(seat, a)}" for text, a in moves.items()]
        more = ["..."] if len(moves) > _LISTED else []
        shown = ", ".join([*list(moves)[:_LISTED], *more])
        return f"player {seat}\n{self.tree.see(state, seat)}\nmoves: {shown}"


def read_move(text: str, legal: Mapping[str, int]) -> int | None:
    """Finds the legal move that a text names.

    It is the whole text, or else the last move that stands alone: not as part of a word, of a
    number or of a longer move. Case counts only between moves that differ in nothing else.

    >>> moves = {"Pass": 0, "Bet": 1, "3": 2}
    >>> read_move("I pass.", moves), read_move("bet", moves), read_move("34", moves)
    (0, 1, None)
    """
    if (text := text.strip()) in legal:
        return legal[text]
    moves = sorted(filter(None, legal), key=len, reverse=True)  # the longer one is tried first
    named = re.findall(_ALONE % "|".join(map(re.escape, moves)), text, re.I) if moves else []
    if not named or named[-1] in legal:
        return legal[named[-1]] if named else None
    same = [move for move in moves if move.casefold() == named[-1].casefold()]
    return legal[same[0]] if len(same) == 1 else None


class TreeGame:
    """A game that is played; a ``envs.base.Game``.

    Args:
        bots: who plays the seats without a model.
        first: is added to the numbers of tasks.
    """

    def __init__(
        self, settings: Settings, table: Table, seats: Mapping[int, bots.Bot], first: int = 0
    ) -> None:
        self._settings, self._table, self._given, self._first = settings, table, seats, first
        self._tree = tree = table.tree
        self._agents: dict[int, str] = {}  # of each seat that is the team's
        self._paid = [0.0] * tree.players
        self._tries = 0
        self._chosen: dict[int, int] = {}  # actions of those who have moved where others have not
        self._notes: dict[int, str] = {}
        if settings.illegal == "masked":
            self.legal = lambda agent: list(self._table.moves(self._state, self._seat(agent)))

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
        return {agent: agent for agent in agents}

    def acting(self) -> list[str]:
        return [self._agents[seat] for seat in self._to_move() if seat not in self._chosen]

    def view(self, agent: str, observation: str) -> str:
        seat = self._seat(agent)
        return self._notes.get(seat, "") + self._table.see(self._state, seat)

    def step(self, turns: Sequence[Turn]) -> StepResult:
        check_movers(turns, self.acting())
        self._notes, moves, wrong = {}, dict[str, str](), list[str]()
        for turn in turns:
            seat = self._seat(turn.name)
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
        """Plays as the teacher, who draws apart from chance and bots: a replay has no teacher."""
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
        """Where whoever has that seat sits in this task."""
        return (seat + self._turned) % self._tree.players

    def _seat(self, agent: str) -> int:
        return seat_of(agent, self._agents)

    def _to_move(self) -> list[int]:
        """Seats of the team that move now."""
        if self._state.is_simultaneous_node():
            return [s for s in sorted(self._agents) if self._state.legal_actions(s)]
        return [self._state.current_player()]

    def _forfeits(self, agent: str) -> bool:
        """Counts an illegal move; True where it loses the game."""
        self._tries += 1
        self._notes[self._seat(agent)] = "That was no legal move.\n"
        return self._settings.illegal != "retry" or self._tries > self._settings.retries

    def _forfeited(self, names: Sequence[str]) -> list[float]:
        """Who forfeits ends with the least of the game; the others share that where gains are
        losses, or keep what they have."""
        least, lost = self._tree.least, [self._seat(name) for name in names]
        others = self._tree.players - len(lost)
        won = [-least * len(lost) / max(others, 1)] * self._tree.players
        kept = won if self._tree.zero_sum else self._paid
        return [least if seat in lost else kept[seat] for seat in range(self._tree.players)]

    def _move(self) -> None:
        """Makes the moves that were chosen, and those of chance and bots that follow."""
        if self._state.is_simultaneous_node():
            actions = [
                self._chosen[s] if s in self._chosen else self._bot(s)
                for s in range(self._tree.players)
            ]
            self._state.apply_actions(actions)
        else:
            self._state.apply_action(self._chosen[self._state.current_player()])
        self._chosen, self._tries = {}, 0
        self._advance()

    def _bot(self, seat: int) -> int:
        return self._bots[seat](self._state, seat, self._rng) if seat in self._bots else 0

    def _advance(self) -> None:
        """Lets chance and bots move, until it is the team's turn."""
        while not self._state.is_terminal():
            if self._state.is_chance_node():
                actions, weights = zip(*self._state.chance_outcomes(), strict=True)
                self._state.apply_action(self._rng.choices(actions, weights)[0])
            elif self._state.is_simultaneous_node() or (
                (seat := self._state.current_player()) not in self._bots
            ):
                return
            else:
                self._state.apply_action(self._bot(seat))
