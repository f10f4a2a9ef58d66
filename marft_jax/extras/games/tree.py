"""Games as trees of states, and Kuhn poker.

A state has the methods of OpenSpiel's ``State`` that ``Kuhn`` shows, and ``apply_actions`` where
players move at the same time. Actions are numbers; ``action_to_string`` gives their text.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

from marft_jax.errors import BadInput


def after(state: Any, action: int) -> Any:
    """Returns the state after an action; ``state`` itself does not change."""
    child = state.clone()
    child.apply_action(action)
    return child


class Tree(NamedTuple):
    """A game.

    Attributes:
        root: makes the first state.
        players: number of players.
        see: maps (state, player) to the text that the player sees.
        least: smallest possible return of a player.
        zero_sum: the players' returns add up to 0.
        at_once: in some states several players move at the same time.
    """

    root: Callable[[], Any]
    players: int
    see: Callable[[Any, int], str]
    least: float
    zero_sum: bool
    at_once: bool = False


class Kuhn:
    """State of Kuhn poker: three cards, one card for each player, one bet.

    A player sees its own card and all actions so far. Source: Kuhn 1950, A simplified two-person
    poker; the state strings are those of OpenSpiel.
    """

    MOVES = ("Pass", "Bet")

    def __init__(self, cards: tuple[int, ...] = (), bets: str = "") -> None:
        self._cards, self._bets = cards, bets

    def is_terminal(self) -> bool:
        return self._bets in ("pp", "bp", "bb", "pbp", "pbb")

    def is_chance_node(self) -> bool:
        return len(self._cards) < 2

    def is_simultaneous_node(self) -> bool:
        return False

    def current_player(self) -> int:
        return len(self._bets) % 2

    def chance_outcomes(self) -> list[tuple[int, float]]:
        left = [card for card in range(3) if card not in self._cards]
        return [(card, 1 / len(left)) for card in left]

    def legal_actions(self, player: int) -> list[int]:
        return [0, 1]

    def action_to_string(self, player: int, action: int) -> str:
        return self.MOVES[action]

    def apply_action(self, action: int) -> None:
        if self.is_chance_node():
            self._cards += (action,)
        else:
            self._bets += "pb"[action]

    def returns(self) -> list[float]:
        if not self.is_terminal():
            return [0.0, 0.0]
        higher = 0 if self._cards[0] > self._cards[1] else 1
        shown = self._bets[-2:] in ("pp", "bb")
        winner = higher if shown else (len(self._bets) - 2) % 2  # the player that bet
        won = 2.0 if self._bets.endswith("bb") else 1.0
        return [won, -won] if winner == 0 else [-won, won]

    def information_state_string(self, player: int) -> str:
        return f"{self._cards[player]}{self._bets}"

    def clone(self) -> Kuhn:
        return Kuhn(self._cards, self._bets)

    def __str__(self) -> str:
        return " ".join([*map(str, self._cards), self._bets]).strip()


def load(name: str) -> Tree:
    """Loads a game by the name that OpenSpiel gives it, with parameters where it has some.

    Raises:
        BadInput: OpenSpiel is not installed, or it has no such game.
    """
    if name == "kuhn_poker":
        return Tree(Kuhn, 2, Kuhn.information_state_string, -2.0, zero_sum=True)
    if importlib.util.find_spec("pyspiel") is None:
        raise BadInput(f'--env.game {name} needs OpenSpiel: pip install -e ".[games]"')
    import pyspiel  # pyright: ignore[reportMissingImports]

    known = pyspiel.registered_names()
    if (short := name.partition("(")[0]) not in known:
        near = difflib.get_close_matches(short, known, 3, 0.4)
        raise BadInput(f"--env.game {name}: OpenSpiel has no such game; it has {', '.join(near)}")
    try:
        return _of_open_spiel(pyspiel, pyspiel.load_game(name))
    except pyspiel.SpielError as error:
        raise BadInput(f"--env.game {name}: {error!s:.200}") from error


def _of_open_spiel(pyspiel: Any, game: Any) -> Tree:
    kind, types = game.get_type(), pyspiel.GameType
    is_hidden = kind.information != types.Information.PERFECT_INFORMATION
    is_seen = kind.provides_observation_string
    recalls = kind.provides_information_state_string and (is_hidden or not is_seen)

    def see(state: Any, player: int) -> str:
        shown = state.information_state_string if recalls else state.observation_string
        return shown(player).strip()

    return Tree(
        game.new_initial_state,
        game.num_players(),
        see,
        game.min_utility(),
        kind.utility == types.Utility.ZERO_SUM,
        kind.dynamics == types.Dynamics.SIMULTANEOUS,
    )
