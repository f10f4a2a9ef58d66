"""Games as trees: the part of OpenSpiel's ``State`` that is used here, and Kuhn poker with it."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self

from marft_jax.errors import BadInput


class Node(Protocol):
    """State of a game, as OpenSpiel's; actions are numbers with a text."""

    def is_terminal(self) -> bool: ...

    def is_chance_node(self) -> bool: ...

    def is_simultaneous_node(self) -> bool: ...

    def current_player(self) -> int: ...

    def chance_outcomes(self) -> Sequence[tuple[int, float]]: ...

    def legal_actions(self, player: int) -> Sequence[int]: ...

    def action_to_string(self, player: int, action: int) -> str: ...

    def apply_action(self, action: int) -> None: ...

    def apply_actions(self, actions: Sequence[int]) -> None: ...

    def returns(self) -> Sequence[float]: ...

    def clone(self) -> Self: ...

    def history_str(self) -> str: ...


def after(state: Any, action: int) -> Any:
    """State that an action leads to; ``state`` stays as it is."""
    child = state.clone()
    child.apply_action(action)
    return child


class Tree(NamedTuple):
    """A game.

    Attributes:
        root: makes its first state.
        players: how many there are.
        see: (state, player) to the text that the player sees of it.
        least: the least that a player can earn.
        zero_sum: the players' rewards add up to 0.
        at_once: players move at the same time, in some states.
    """

    root: Callable[[], Any]
    players: int
    see: Callable[[Any, int], str]
    least: float
    zero_sum: bool
    at_once: bool = False


class Kuhn:
    """Kuhn poker: three cards, one each, one bet. A player sees its card, and who did what.

    Source: Kuhn 1950, A simplified two-person poker; the state strings are those of OpenSpiel.
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

    def apply_actions(self, actions: Sequence[int]) -> None:
        raise NotImplementedError  # nobody moves at once

    def returns(self) -> list[float]:
        if not self.is_terminal():
            return [0.0, 0.0]
        higher = 0 if self._cards[0] > self._cards[1] else 1
        shown = self._bets[-2:] in ("pp", "bb")
        winner = higher if shown else (len(self._bets) - 2) % 2  # who did not pass on a bet
        won = 2.0 if self._bets.endswith("bb") else 1.0
        return [won, -won] if winner == 0 else [-won, won]

    def information_state_string(self, player: int) -> str:
        return f"{self._cards[player]}{self._bets}"

    def clone(self) -> Kuhn:
        return Kuhn(self._cards, self._bets)

    def history_str(self) -> str:
        return f"{self._cards} {self._bets}"

    def __str__(self) -> str:
        return " ".join([*map(str, self._cards), self._bets]).strip()


def load(name: str) -> Tree:
    """Loads a game of OpenSpiel by its name, with its parameters where it has some.

    Raises:
        BadInput: there is none, or the package is not there.
    """
    if name == "kuhn_poker":
        return Tree(Kuhn, 2, Kuhn.information_state_string, -2.0, zero_sum=True)
    if importlib.util.find_spec("pyspiel") is None:
        raise BadInput(f"--env.game {name} needs OpenSpiel: pip install 'marft_jax[games]'")
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
    kind = game.get_type()
    if kind.dynamics == pyspiel.GameType.Dynamics.MEAN_FIELD:
        raise BadInput(f"--env.game {kind.short_name}: expected a game of single players")
    perfect = kind.information == pyspiel.GameType.Information.PERFECT_INFORMATION
    recalls = kind.provides_information_state_string and not (
        perfect and kind.provides_observation_string
    )

    def see(state: Any, player: int) -> str:
        how = state.information_state_string if recalls else state.observation_string
        return how(player).strip()

    return Tree(
        game.new_initial_state,
        game.num_players(),
        see,
        game.min_utility(),
        kind.utility == pyspiel.GameType.Utility.ZERO_SUM,
        kind.dynamics == pyspiel.GameType.Dynamics.SIMULTANEOUS,
    )
