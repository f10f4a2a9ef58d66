"""Transcripts of episodes: as plain values for programs, and as panels for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from marft_jax.errors import printable
from marft_jax.learning.batch import Level, chains_of
from marft_jax.learning.estimates import Estimates
from marft_jax.rollout.collect import Collected
from marft_jax.types import Episode, FailedEpisode, Played, Turn

_BYTES = 4  # of a character, at most


class Decode(Protocol):
    """Token ids to text; ``special`` keeps special tokens."""

    def __call__(self, ids: Sequence[int], /, *, special: bool = False) -> str: ...


def record(
    episode: Episode, decode: Decode, numbers: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """An episode as plain values, each turn with the numbers given for it.

    ``prompt`` is what the model read, special tokens included, and ``tool`` what a tool of the
    environment answered to the turn. ``D[i][j]`` is 1 where turn i was shown turn j; ``tokens`` is
    the half-open span of a turn in the episode's action tokens, in acting order.
    """
    turns = list(_turns(episode.turns, decode))
    return {
        "index": episode.index,
        "group": episode.group,
        "member": episode.member,
        **({} if episode.branch is None else {"branch": list(episode.branch)}),
        "task": episode.task,
        "reward": episode.reward,
        "D": episode.dependency.astype(int),
        "turns": [{**t, **own} for t, own in zip(turns, numbers or [{}] * len(turns), strict=True)],
        "results": [
            {"reward": result.reward, "done": result.done, "info": result.info}
            | ({"agent_rewards": dict(result.agent_rewards)} if result.agent_rewards else {})
            for result in episode.results
        ],
    }


def records(played: Played, decode: Decode) -> list[dict[str, Any]]:
    """Writes down all episodes of a play; those that failed earned nothing and have no turns."""
    return [record(e, decode) for e in played.episodes] + [_failed(e) for e in played.failed]


def _failed(episode: FailedEpisode) -> dict[str, Any]:
    place = {"index": episode.index, "group": episode.group, "member": episode.member}
    nothing: list[Any] = []
    earned = {"task": "", "reward": 0.0, "D": nothing, "turns": nothing, "results": nothing}
    return place | earned | {"failed": episode.why}


def turn_numbers(
    collected: Collected, estimates: Estimates, level: Level, decode: Decode
) -> Iterator[list[dict[str, Any]]]:
    """Returns the reward, value (at a token level the first token's; None without a critic) and
    advantage (the mean over its tokens) of each turn, episode by episode.

    A sampled turn also has ``pieces``, the text that each of its tokens adds, and their behaviour
    ``logprobs``; at a token level also their ``advantages`` and ``values``.
    """
    values_EJ = estimates.values_EJ
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for i, (e, numbers) in enumerate(chains_of(collected.episodes)):
        end = 0
        for k in numbers:
            turn = collected.episodes[e].turns[k]
            start, end = end, end + (len(turn.action) if level == "token" else 1)
            own_A = estimates.advantages_EJ[i, start:end]
            values_A = None if values_EJ is None else values_EJ[i, start:end]
            row = found[e, k] = {
                "reward": float(collected.rewards[e][k]),
                "value": None if values_A is None else float(values_A[0]),
                "advantage": float(own_A.mean()),
            }
            if turn.limit is not None:
                row["pieces"] = pieces(turn.action.tolist(), decode)
                row["logprobs"] = _short(turn.logprobs)
            if level == "token":
                row["advantages"] = _short(own_A)
                row |= {} if values_A is None else {"values": _short(values_A)}
    for e, episode in enumerate(collected.episodes):
        yield [found[e, k] for k in range(len(episode.turns))]


def pieces(ids: Sequence[int], decode: Decode) -> list[str]:
    """Returns the text that each token adds: a character of several tokens is the last one's.

    A token is decoded behind the one before it, because some tokenizers drop the space that a text
    begins with.
    """
    found, before, start, text = [], 0, 0, ""
    for end in range(1, len(ids) + 1):
        longer = decode(ids[before:end])
        if longer.endswith("\ufffd") and end - start < _BYTES and end < len(ids):
            found.append("")  # a character that later tokens complete
            continue
        found.append(longer[len(text) :])
        before, start = start, end
        text = decode(ids[before:start])
    return found


def _short(values: np.ndarray) -> list[float]:
    return np.round(values.astype(np.float64), 4).tolist()


def render(episode: Episode, decode: Decode | None = None) -> RenderableType:
    """An episode to print on a ``rich`` console: the task, each turn (with ``decode`` also its
    prompt, special tokens spelled out), the environment's answers."""
    parts: list[RenderableType] = [
        Panel(Text(printable(episode.task)), title="task", title_align="left")
    ]
    for step in sorted({turn.step for turn in episode.turns}):
        for turn in (turn for turn in episode.turns if turn.step == step):
            if decode is not None:
                prompt = printable(decode(turn.prompt.tolist(), special=True))
                parts.append(Text(f"{turn.name} is shown:\n{prompt}\n", style="dim"))
            parts.append(_panel(turn))
        for result in episode.results[step : step + 1]:
            details = printable("".join(f", {key}: {v}" for key, v in result.info.items()))
            parts.append(Text(f"reward {result.reward:g}{details}\n", style="dim"))
    return Group(*parts)


def _turns(turns: Sequence[Turn], decode: Decode) -> Iterator[dict[str, Any]]:
    end = 0
    for turn in turns:
        start, end = end, end + len(turn.action)
        yield {
            "agent": turn.name,
            "step": turn.step,
            "prompt": decode(turn.prompt.tolist(), special=True),
            "text": turn.text,
            **({} if turn.tool is None else {"tool": turn.tool}),
            "tokens": [start, end],
            "sees": turn.sees,
            "truncated": turn.truncated,
            "answers": turn.answers,
        }


def _panel(turn: Turn) -> Panel:
    notes = {
        turn.name: True,
        f"step {turn.step + 1}": turn.step > 0,
        "answers": turn.answers,
        "cut off": turn.truncated,
    }
    title = Text(" · ".join(note for note, holds in notes.items() if holds))
    text = printable(turn.text if turn.tool is None else f"{turn.text}\n\ntool: {turn.tool}")
    style = "green" if turn.answers else "cyan"
    return Panel(Text(text), title=title, title_align="left", border_style=style)
