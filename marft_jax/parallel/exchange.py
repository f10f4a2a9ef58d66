"""Sends episodes between processes as JSON, so that nothing received is executed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from marft_jax.errors import RunFailed
from marft_jax.types import Episode, FailedEpisode, Played, StepResult, Turn

_ARRAYS = {"prompt": np.int32, "action": np.int32, "logprobs": np.float32}  # of a turn


def write_part(played: Played, failure: Sequence[str] | None = None) -> bytes:
    """Writes what a process played, or its failure as (kind of the error, text)."""
    rows = [
        episode._asdict()
        | {"turns": [turn._asdict() | _lists(turn) for turn in episode.turns]}
        | {"results": [result._asdict() for result in episode.results]}
        for episode in played.episodes
    ]
    failed = [episode._asdict() for episode in played.failed]
    return json.dumps({"episodes": rows, "failed": failed, "failure": failure}).encode()


def read_part(part: bytes) -> tuple[Played, list[str] | None]:
    """Reads the bytes of ``write_part``.

    Raises:
        RunFailed: the bytes are something else.
    """
    try:
        read = json.loads(part)
        episodes = [_episode(**row) for row in read["episodes"]]
        failed = [FailedEpisode(**row) for row in read["failed"]]
        failure = read["failure"]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise RunFailed(f"another process sent something that is no episodes: {error}") from error
    return Played(episodes, failed), failure


def _lists(turn: Turn) -> dict[str, Any]:
    return {key: np.asarray(getattr(turn, key)).tolist() for key in _ARRAYS}


def _episode(
    turns: Sequence[Any], results: Sequence[Any], branch: Any, paid: Sequence[float], **more: Any
) -> Episode:
    return Episode(
        turns=tuple(_turn(**turn) for turn in turns),
        results=tuple(StepResult(**result) for result in results),
        branch=branch and tuple(branch),
        paid=tuple(paid),
        **more,
    )


def _turn(sees: Sequence[int], choices: Sequence[Sequence[int]], **more: Any) -> Turn:
    arrays: dict[str, Any] = {key: np.asarray(more[key], kind) for key, kind in _ARRAYS.items()}
    return Turn(sees=tuple(sees), choices=tuple(map(tuple, choices)), **(more | arrays))
