"""Who said what in an episode: as JSON Lines for programs, and as panels for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from marft_jax.formats import jsonlines
from marft_jax.printable import printable
from marft_jax.types import Episode, FailedEpisode, Played, Turn


class Decode(Protocol):
    """Token ids to text; ``special`` keeps special tokens."""

    def __call__(self, ids: Sequence[int], /, *, special: bool = False) -> str: ...


Numbers = Sequence[Sequence[float | None]]


class TurnNumbers(NamedTuple):
    """What the learner made of the turns; each is indexed ``[episode][turn]``.

    Ragged lists and padded ``[E, K]`` arrays are both fine: padding is not looked at.

    Attributes:
        rewards: the reward credited to each turn.
        values: the critic's value of each turn.
        advantages: each turn's advantage, as the policy loss used it.
    """

    rewards: Numbers
    values: Numbers
    advantages: Numbers


def write(
    path: str | Path, episodes: Sequence[Episode], decode: Decode, numbers: TurnNumbers | None
) -> None:
    """Writes one episode per line; the file appears whole or not at all.

    Args:
        path: ``transcripts/<step>.jsonl`` of a run directory; its folder is made when missing.
        episodes: the episodes, one line each.
        decode: token ids to text, for the prompts, which keep their special tokens.
        numbers: the learner's numbers; without them they are null.
    """
    lines = (_line(episode, i, decode, numbers) for i, episode in enumerate(episodes))
    jsonlines.write(Path(path), lines)


def record(episode: Episode, decode: Decode) -> dict[str, Any]:
    """An episode as plain values.

    ``prompt`` is what the model read, special tokens included, and ``tool`` what a tool of the
    environment answered to the turn. ``D[i][j]`` is 1 where turn i was shown turn j; ``tokens`` is
    the half-open span of a turn in the episode's action tokens, in acting order.
    """
    return {
        "index": episode.index,
        "group": episode.group,
        "member": episode.member,
        "task": episode.task,
        "reward": episode.reward,
        "D": episode.dependency.astype(int),
        "turns": list(_turns(episode.turns, decode)),
        "results": [
            {"reward": result.reward, "done": result.done, "info": result.info}
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


def render(episode: Episode) -> RenderableType:
    """An episode to print on a ``rich`` console: the task, each turn, the environment's answers."""
    parts: list[RenderableType] = [
        Panel(Text(printable(episode.task)), title="task", title_align="left")
    ]
    for step in sorted({turn.step for turn in episode.turns}):
        parts += [_panel(turn) for turn in episode.turns if turn.step == step]
        if step < len(episode.results):
            result = episode.results[step]
            details = printable("".join(f", {key}: {v}" for key, v in result.info.items()))
            parts.append(Text(f"reward {result.reward:g}{details}\n", style="dim"))
    return Group(*parts)


def _line(episode: Episode, i: int, decode: Decode, numbers: TurnNumbers | None) -> str:
    plain = record(episode, decode)
    for k, turn in enumerate(plain["turns"]):
        turn["reward"] = numbers.rewards[i][k] if numbers else None
        turn["value"] = numbers.values[i][k] if numbers else None
        turn["advantage"] = numbers.advantages[i][k] if numbers else None
    return jsonlines.dumps(plain)


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
    notes = [turn.name]
    notes += ["step " + str(turn.step + 1)] if turn.step else []
    notes += ["answers"] if turn.answers else []
    notes += ["cut off"] if turn.truncated else []
    title = Text(" · ".join(notes))
    style = "green" if turn.answers else "cyan"
    said = printable(turn.text if turn.tool is None else f"{turn.text}\n\ntool: {turn.tool}")
    return Panel(Text(said), title=title, title_align="left", border_style=style)
