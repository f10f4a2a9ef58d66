"""Finds the move that a text names."""

from __future__ import annotations

import re
from collections.abc import Mapping

from marft_jax.types import without_thinking

_ALONE = (
    r"(?<![^\W_])(?<![^\W_]_)(?<![\w)]-)(?<![-−](?=\d))(?<!\d[./])"
    r"(?:%s)(?!_*[^\W_]|[./]\d|-\w)"
)


def read_move(text: str, legal: Mapping[str, int]) -> int | None:
    """Finds the legal move that a text names; None where it names none.

    The move is the whole text, or else the last legal move that is not part of a word, of a number
    or of a longer move. Case counts only between moves that differ in nothing else.

    Args:
        legal: text of each legal move, and its action.

    >>> moves = {"Pass": 0, "Bet": 1, "3": 2}
    >>> read_move("I pass.", moves), read_move("bet", moves), read_move("34", moves)
    (0, 1, None)
    """
    if (text := without_thinking(text).strip()) in legal:
        return legal[text]
    moves = sorted(filter(None, legal), key=len, reverse=True)  # longer moves are tried first
    named = re.findall(_ALONE % "|".join(map(re.escape, moves)), text, re.I) if moves else []
    if not named or named[-1] in legal:
        return legal[named[-1]] if named else None
    same = [move for move in moves if move.casefold() == named[-1].casefold()]
    return legal[same[0]] if len(same) == 1 else None
