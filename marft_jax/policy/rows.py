"""Rows: packed token sequences with their actions and turns, as arrays of fixed sizes.

Sequences of a row may share a prefix (samples of one task, turns with one system prompt). The
prefix stands in the row once, what follows it in each sequence stands behind it, and every token
reads what it would read in a row of its own. Only action tokens have a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from marft_jax.parallel.ladder import round_up
from marft_jax.policy.data import Datum
from marft_jax.policy.forbidden import Forbidden
from marft_jax.types import Level

Array = TypeVar("Array", bound=np.ndarray | jax.Array)


class Tokens(NamedTuple, Generic[Array]):
    """Tokens of rows.

    Attributes:
        ids_BT: token ids.
        positions_BT: position of each token within its sequence.
        last_reader_BT: where the last token stands that may read this token.
        owners_BT: the adapter that the token passes through; -1 for padding.
        agents_BT: whose turn the token leads to or belongs to; -1 for padding.
    """

    ids_BT: Array
    positions_BT: Array
    last_reader_BT: Array
    owners_BT: Array
    agents_BT: Array


class Actions(NamedTuple, Generic[Array]):
    """Action tokens of rows.

    Attributes:
        index_BA: where in the row the token stands that predicts this action token.
        targets_BA: ids of the action tokens.
        mask_BA: 1 for action tokens, 0 for padding.
        behaviour_BA: behaviour log-probs.
        temperature_BA: the temperature that the tokens were sampled with.
        turn_BA: the turn of the row that the token belongs to.
        forbidden: tokens that could not be drawn, of each row; None where no token of the batch
            was drawn under a mask.
    """

    index_BA: Array
    targets_BA: Array
    mask_BA: Array
    behaviour_BA: Array
    temperature_BA: Array
    turn_BA: Array
    forbidden: Forbidden[Array] | None = None


class Turns(NamedTuple, Generic[Array]):
    """Turns of rows.

    Attributes:
        prompt_end_BK: where in the row the last prompt token stands.
        mask_BK: 1 for turns, 0 for padding.
        agent_BK: who acted.
        owner_BK: the adapter that acted.
        divisor_BK: what the action's log-prob is divided by: 1, its tokens or its words.
        tokens_BK: number of action tokens; 1 for padding.
    """

    prompt_end_BK: Array
    mask_BK: Array
    agent_BK: Array
    owner_BK: Array
    divisor_BK: Array
    tokens_BK: Array


class Rows(NamedTuple, Generic[Array]):
    """B rows of a microbatch; the arrays of a batch have an axis U before B.

    ``Rows[np.ndarray]`` is on the host, ``Rows[jax.Array]`` on the device.
    """

    tokens: Tokens[Array]
    actions: Actions[Array]
    turns: Turns[Array]

    def decision_mask(self, level: Level) -> Array:
        """1 for decisions, 0 for padding: ``[..., K]`` of turns or ``[..., A]`` of tokens."""
        return self.turns.mask_BK if level == "action" else self.actions.mask_BA


_PADDING: Any = Rows(  # a float makes an array of float32
    Tokens[Any](0, 0, 0, owners_BT=-1, agents_BT=-1),
    Actions[Any](0, 0, mask_BA=0.0, behaviour_BA=0.0, temperature_BA=1.0, turn_BA=0),
    Turns[Any](0, mask_BK=0.0, agent_BK=0, owner_BK=0, divisor_BK=1.0, tokens_BK=1.0),
)


def empty_rows(
    shape: tuple[int, ...],
    tokens: int,
    actions: int,
    turns: int,
    sets: tuple[int, int] | None = None,
) -> Rows[np.ndarray]:
    """Makes rows of padding, with room for that many tokens, action tokens and turns in each, and
    for forbidden tokens as (sets, words)."""

    def full(padding: Any, size: int) -> Any:
        kinds = {float: np.float32, int: np.int32}
        return jax.tree.map(lambda x: np.full((*shape, size), x, kinds[type(x)]), padding)

    rows = Rows(*map(full, _PADDING, (tokens, actions, turns)))
    rows.tokens.last_reader_BT[:] = np.arange(tokens)
    if sets is None:
        return rows
    empty = Forbidden(np.zeros((*shape, actions), np.int32), np.zeros((*shape, *sets), np.uint32))
    return rows._replace(actions=rows.actions._replace(forbidden=empty))


def fill_row(
    row: Rows[np.ndarray], data: Sequence[Datum], branches: int, forbidden: Forbidden[np.ndarray]
) -> None:
    """Writes data into a row, their learned tokens and units in order.

    Args:
        row: views of one empty row, without the axis B.
        data: sorted, so that those which share a prefix stand side by side.
        branches: as of ``packing.pack_rows``; a prefix that a datum shares with the one before it
            is not written again.
        forbidden: that of the data, joined.
    """
    end, a, k = 0, 0, 0
    places = np.zeros(0, int)  # where each token of the datum stands in the row
    for i, datum in enumerate(data):
        known = datum.shared_with(data[i - 1], branches) if i else 0
        start = round_up(end, max(1, branches))
        end = start + len(datum.ids) - known
        places = np.concatenate([places[:known], np.arange(start, end)])
        row.tokens.ids_BT[start:end] = datum.ids[known:]
        row.tokens.positions_BT[start:end] = np.arange(known, len(datum.ids))
        row.tokens.owners_BT[start:end] = datum.owner
        row.tokens.agents_BT[start:end] = datum.labels[known:]
        row.tokens.last_reader_BT[places] = end - 1
        n, first = len(datum.targets), np.flatnonzero(np.diff(datum.units, prepend=-1))
        index, learned = places[datum.positions], slice(a, a + n)
        numbers = index, datum.targets, 1, datum.logprobs, datum.temperature, k + datum.units
        for array, x in zip(row.actions[:-1], numbers, strict=True):
            array[learned] = x
        ends, counts = datum.positions[first], np.diff(first, append=n)
        numbers = places[ends], 1, datum.labels[ends], datum.owner, datum.divisors, counts
        units = slice(k, k + len(first))
        for array, x in zip(row.turns, numbers, strict=True):
            array[units] = x
        a, k = a + n, k + len(first)
    for array, x in zip(row.actions.forbidden or (), forbidden, strict=False):
        array[tuple(map(slice, x.shape))] = x


def microbatches(rows: Any) -> list[Any]:
    """Splits rows, or other arrays of them, along the axis U."""
    count = len(jax.tree.leaves(rows)[0])
    return [jax.tree.map(lambda x, u=u: x[u], rows) for u in range(count)]
