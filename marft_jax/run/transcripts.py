"""Transcripts of episodes: as plain values for files, and as panels for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from marft_jax.errors import printable
from marft_jax.learning.chain import chains_of
from marft_jax.learning.estimates import Estimates
from marft_jax.models.tokenizers.token_texts import pieces
from marft_jax.rollout.collect import Collected
from marft_jax.types import Episode, FailedEpisode, Level, Played, StepResult, Turn


class Decode(Protocol):
    """Decodes token ids to text; ``special`` keeps special tokens."""

    def __call__(self, ids: Sequence[int], /, *, special: bool = False) -> str: ...


def record(
    episode: Episode, decoders: Sequence[Decode], numbers: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Converts an episode to plain values, each turn with the numbers given for it.

    ``prompt`` is what the model read, special tokens included. ``calls`` are a turn's calls of the
    agent's tools, and ``tool`` is what these or a tool of the environment answered. ``D[i][j]`` is
    1 where turn i was shown turn j; ``ids`` are the tokens of an action, and ``tokens`` is their
    half-open span in the episode's action tokens, in acting order. ``alone`` is what agents earn
    alone on the task, where that is known.

    Args:
        decoders: of each agent.
    """
    turns = list(_turns(episode.turns, decoders))
    alone = {t.name: episode.alone[t.agent] for t in episode.turns if t.agent in episode.alone}
    return {
        "index": episode.index,
        "group": episode.group,
        "member": episode.member,
        **({} if episode.branch is None else {"branch": list(episode.branch)}),
        **({"alone": alone} if alone else {}),
        "task": episode.task,
        "reward": episode.reward,
        "D": episode.dependency.astype(int),
        "turns": [{**t, **x} for t, x in zip(turns, numbers or [{}] * len(turns), strict=True)],
        "results": [
            {"reward": result.reward, "done": result.done, "info": result.info}
            | ({"agent_rewards": dict(result.agent_rewards)} if result.agent_rewards else {})
            for result in episode.results
        ],
    }


def records(played: Played, decoders: Sequence[Decode]) -> list[dict[str, Any]]:
    """Writes down all episodes of a play; those that failed earned nothing and have no turns."""
    return [record(e, decoders) for e in played.episodes] + [_failed(e) for e in played.failed]


def _failed(episode: FailedEpisode) -> dict[str, Any]:
    place = {"index": episode.index, "group": episode.group, "member": episode.member}
    nothing: list[Any] = []
    earned = {"task": "", "reward": 0.0, "D": nothing, "turns": nothing, "results": nothing}
    return place | earned | {"failed": episode.why}


def turn_numbers(
    collected: Collected, estimates: Estimates, level: Level, decoders: Sequence[Decode]
) -> Iterator[list[dict[str, Any]]]:
    """Yields for each episode the numbers of its turns.

    A turn has its reward, its value (at token level the value of the first token; None without a
    critic) and its advantage (the mean over its tokens). A sampled turn also has ``pieces``, the
    text that each token adds, and ``logprobs``, the behaviour log-probs of its tokens; at token
    level also ``advantages`` and ``values`` per token.
    """
    values_EJ = estimates.values_EJ
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for i, (e, numbers) in enumerate(chains_of(collected.episodes)):
        end = 0
        for k in numbers:
            turn = collected.episodes[e].turns[k]
            start, end = end, end + (len(turn.action) if level == "token" else 1)
            advantages_A = estimates.advantages_EJ[i, start:end]
            values_A = None if values_EJ is None else values_EJ[i, start:end]
            row = rows[e, k] = {
                "reward": float(collected.rewards[e][k]),
                "value": None if values_A is None else float(values_A[0]),
                "advantage": float(advantages_A.mean()),
            }
            if turn.limit is not None:
                row["pieces"] = pieces(turn.action.tolist(), decoders[turn.agent])
                row["logprobs"] = _short(turn.logprobs)
            if level == "token":
                row["advantages"] = _short(advantages_A)
                row |= {} if values_A is None else {"values": _short(values_A)}
    for e, episode in enumerate(collected.episodes):
        yield [rows[e, k] for k in range(len(episode.turns))]


def _short(values: np.ndarray) -> list[float]:
    return np.round(values.astype(np.float64), 4).tolist()


def render(episode: Episode, decoders: Sequence[Decode] = ()) -> RenderableType:
    """Renders an episode for a ``rich`` console: the task, the turns, the environment's answers.

    Args:
        decoders: of each agent; with them each turn is preceded by its prompt, special tokens
            included.
    """
    task = Panel(Text(printable(episode.task)), title="task", title_align="left")
    parts: list[RenderableType] = [task]
    for step in sorted({turn.step for turn in episode.turns}):
        for turn in (turn for turn in episode.turns if turn.step == step):
            if decoders:
                prompt = printable(decoders[turn.agent](turn.prompt.tolist(), special=True))
                parts.append(Text(f"{turn.name} is shown:\n{prompt}\n", style="dim"))
            parts.append(_panel(turn))
        parts += map(_answer, episode.results[step : step + 1])
    return Group(*parts)


def _answer(result: StepResult) -> RenderableType:
    details = printable("".join(f", {key}: {spelled(v)}" for key, v in result.info.items()))
    return Text(f"reward {result.reward:g}{details}\n", style="dim")


def spelled(value: Any) -> str:
    """Writes a plain value for a person to read.

    >>> spelled([{"agent": "solver", "verdict": "right"}, 2])
    'agent solver, verdict right; 2'
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {spelled(part)}" for key, part in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "; ".join(map(spelled, value))
    return str(value)


def _turns(turns: Sequence[Turn], decoders: Sequence[Decode]) -> Iterator[dict[str, Any]]:
    end = 0
    for turn in turns:
        start, end = end, end + len(turn.action)
        yield {
            "agent": turn.name,
            "step": turn.step,
            "prompt": decoders[turn.agent](turn.prompt.tolist(), special=True),
            "text": turn.text,
            **({} if turn.tool is None else {"tool": turn.tool}),
            **({"calls": [call._asdict() for call in turn.calls]} if turn.calls else {}),
            "ids": turn.action.tolist(),
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
