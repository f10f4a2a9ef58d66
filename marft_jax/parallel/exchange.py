"""Episodes on their way between processes, as JSON that is checked when it is read.

A format that can only say what an episode is: nothing that is received is ever executed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any, TypeVar, get_type_hints

import numpy as np

from marft_jax.errors import RunFailed
from marft_jax.formats import jsonlines
from marft_jax.types import Episode, FailedEpisode, Played, StepResult, Turn

_T = TypeVar("_T")
_ARRAYS = {"prompt": np.int32, "action": np.int32, "logprobs": np.float32}  # of a turn, as base64
_KINDS = {int: (int,), str: (str,), float: (int, float), bool: (bool,)}


def write_part(played: Played, failure: Sequence[str] | None = None) -> bytes:
    """Writes what a process played, or its failure: the kind of the error, and the text."""
    rows = [
        episode._asdict()
        | {"turns": [turn._asdict() | _encoded(turn) for turn in episode.turns]}
        | {"results": [_plain(result) for result in episode.results]}
        for episode in played.episodes
    ]
    failed = [episode._asdict() for episode in played.failed]
    return json.dumps({"episodes": rows, "failed": failed, "failure": failure}).encode()


def read_part(part: bytes) -> tuple[Played, list[str] | None]:
    """Reads what ``write_part`` wrote.

    Raises:
        RunFailed: it is anything else.
    """
    try:
        read = json.loads(part)
        played = Played(
            [_episode(row) for row in read["episodes"]],
            [_typed(FailedEpisode, row) for row in read["failed"]],
        )
        failure = read["failure"]
        if not (failure is None or list(map(type, failure)) == [str, str]):
            raise ValueError(f"failure: expected two texts, got {failure!r:.60}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RunFailed(f"another process sent something that is no episodes: {error}") from error
    return played, failure


def _encoded(turn: Turn) -> dict[str, str]:
    arrays = {key: np.asarray(getattr(turn, key), dtype) for key, dtype in _ARRAYS.items()}
    return {key: base64.b64encode(x.tobytes()).decode() for key, x in arrays.items()}


def _plain(result: StepResult) -> dict[str, Any]:
    """A result as JSON knows it; what an environment noted becomes what a transcript would show."""
    rewards = {name: float(value) for name, value in result.agent_rewards.items()}
    info = json.loads(jsonlines.dumps(result.info))
    return result._asdict() | {"agent_rewards": rewards, "info": info}


def _episode(row: dict[str, Any]) -> Episode:
    turns = tuple(_turn(turn) for turn in row["turns"])
    results = tuple(_typed(StepResult, result) for result in row["results"])
    branch = None if row["branch"] is None else tuple(map(int, row["branch"]))
    own = _typed(Episode, row | {"paid": tuple(row["paid"])})
    return own._replace(turns=turns, results=results, branch=branch)


def _turn(row: dict[str, Any]) -> Turn:
    arrays = {
        key: np.frombuffer(base64.b64decode(row[key], validate=True), dtype).copy()
        for key, dtype in _ARRAYS.items()
    }
    return _typed(Turn, row)._replace(**arrays, sees=tuple(map(int, row["sees"])))


def _typed(kind: type[_T], row: dict[str, Any]) -> _T:
    """A NamedTuple of exactly its fields, the plain ones of their types."""
    names = get_type_hints(kind)
    if not isinstance(row, dict) or row.keys() != names.keys():
        raise ValueError(f"expected the fields {', '.join(names)}")
    for name, annotation in names.items():
        if type(row[name]) not in _KINDS.get(annotation, (type(row[name]),)):
            raise ValueError(f"{name}: expected {annotation.__name__}, got {row[name]!r:.60}")
    return kind(**row)
