"""Episodes on their way between processes: JSON and arrays, checked when read.

A format that can only say what an episode is: nothing that is received is ever executed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar, get_type_hints

import numpy as np

from marft_jax.errors import RunFailed
from marft_jax.formats import jsonlines
from marft_jax.types import Episode, FailedEpisode, Played, StepResult, Turn

_T = TypeVar("_T")


def header_of(played: Played, failure: Sequence[str] | None = None) -> bytes:
    """Everything but the tokens, as JSON; in their place stands how many there are."""
    rows = [
        episode._asdict()
        | {"turns": [turn._asdict() | _lengths(turn) for turn in episode.turns]}
        | {"results": [_plain(result) for result in episode.results]}
        for episode in played.episodes
    ]
    failed = [episode._asdict() for episode in played.failed]
    return json.dumps({"episodes": rows, "failed": failed, "failure": failure}).encode()


def tokens_of(episodes: Sequence[Episode]) -> tuple[np.ndarray, np.ndarray]:
    """The ids of all prompts and actions in a row, and the log-probs of all actions."""
    turns = [turn for episode in episodes for turn in episode.turns]
    ids = [part for turn in turns for part in (turn.prompt, turn.action)]
    logprobs = [turn.logprobs for turn in turns]
    return (
        np.concatenate([*ids, []]).astype(np.int32),
        np.concatenate([*logprobs, []]).astype(np.float32),
    )


def read_part(
    header: bytes, ids: np.ndarray, logprobs: np.ndarray
) -> tuple[Played, list[str] | None]:
    """Reads what ``header_of`` and ``tokens_of`` wrote.

    Raises:
        RunFailed: it is anything else.
    """
    try:
        part = json.loads(header)
        taken = _Taken(ids, logprobs)
        episodes = [_episode(row, taken) for row in part["episodes"]]
        failed = [_typed(FailedEpisode, row) for row in part["failed"]]
        failure = part["failure"]
        if taken.left or not (failure is None or list(map(type, failure)) == [str, str]):
            raise ValueError("it does not add up")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RunFailed(f"another process sent something that is no episodes: {error}") from error
    return Played(episodes, failed), failure


class _Taken:
    """Hands out the tokens of turn after turn."""

    def __init__(self, ids: np.ndarray, logprobs: np.ndarray):
        self._ids, self._logprobs = ids, logprobs

    @property
    def left(self) -> int:
        return len(self._ids) + len(self._logprobs)

    def ids(self, count: int) -> np.ndarray:
        found, self._ids = self._ids[:count], self._ids[count:]
        return _exactly(found, count)

    def logprobs(self, count: int) -> np.ndarray:
        found, self._logprobs = self._logprobs[:count], self._logprobs[count:]
        return _exactly(found, count)


def _exactly(found: np.ndarray, count: int) -> np.ndarray:
    if len(found) != count:
        raise ValueError(f"expected {count} tokens, got {len(found)}")
    return found


def _lengths(turn: Turn) -> dict[str, int]:
    return {key: len(getattr(turn, key)) for key in ("prompt", "action", "logprobs")}


def _plain(result: StepResult) -> dict[str, Any]:
    """A result as JSON knows it; what an environment noted becomes what a transcript would show."""
    rewards = {name: float(value) for name, value in result.agent_rewards.items()}
    info = json.loads(jsonlines.dumps(result.info))
    return result._asdict() | {"agent_rewards": rewards, "info": info}


def _episode(row: dict[str, Any], taken: _Taken) -> Episode:
    turns = tuple(_turn(turn, taken) for turn in row["turns"])
    results = tuple(_typed(StepResult, result) for result in row["results"])
    return _typed(Episode, row)._replace(turns=turns, results=results)


def _turn(row: dict[str, Any], taken: _Taken) -> Turn:
    turn = _typed(Turn, row)
    return turn._replace(
        prompt=taken.ids(row["prompt"]),
        action=taken.ids(row["action"]),
        logprobs=taken.logprobs(row["logprobs"]),
        sees=tuple(map(int, row["sees"])),
    )


_KINDS = {int: (int,), str: (str,), float: (int, float), bool: (bool,)}


def _typed(kind: type[_T], row: dict[str, Any]) -> _T:
    """A NamedTuple of exactly its fields, the plain ones of their types."""
    names = get_type_hints(kind)
    if not isinstance(row, dict) or row.keys() != names.keys():
        raise ValueError(f"expected the fields {', '.join(names)}")
    for name, annotation in names.items():
        if type(row[name]) not in _KINDS.get(annotation, (type(row[name]),)):
            raise ValueError(f"{name}: expected {annotation.__name__}, got {row[name]!r:.60}")
    return kind(**row)
