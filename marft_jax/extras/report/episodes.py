"""Episodes as the page shows them, made from records that may lack anything."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from marft_jax.errors import printable
from marft_jax.extras.report.reading import number
from marft_jax.formats import jsonlines

LONGEST = 20_000
"""Most characters that are shown of a text; of a longer text its beginning and end."""

_OF_TURNS = ("reward", "value", "advantage")
_OF_TOKENS = {"logprobs": "log-prob", "advantages": "advantage", "values": "value",
              "ratios": "ratio", "entropies": "entropy"}  # fmt: skip


class ShownTurn(NamedTuple):
    """A turn.

    Attributes:
        prompt: the text before the agent's system prompt, the system prompt, and the text after it.
        numbers: reward, value and advantage, if recorded.
        move: the move that a game read in the text, in words; else "".
        tokens: ``lengths`` of the tokens in characters, and recorded numbers of each by name.
    """

    agent: str
    step: int
    text: str
    prompt: tuple[str, str, str]
    tool: str | None
    move: str
    sees: list[int]
    truncated: bool
    answers: bool
    numbers: dict[str, float]
    size: int | None
    tokens: dict[str, list[float]] | None


class ShownEpisode(NamedTuple):
    """An episode.

    Attributes:
        verdicts: of the grader: ``agent``, ``verdict``, and the ``answer`` found in its text.
        expected: reference answer; None if the environment gives none.
        remarks: what else the environment noted at each step, as JSON.
        boards: of a game: the board after each step; "" if there is none.
        outcomes: of a game, by seat: each player's outcome in words, and its return.
        branch: of a branch: the turn at which it starts, and its number there.
    """

    index: int
    group: int
    member: int
    task: str
    reward: float
    turns: list[ShownTurn]
    verdicts: list[dict[str, str]]
    expected: str | None
    remarks: list[str]
    boards: list[str]
    outcomes: dict[str, tuple[str, float]]
    failed: str | None
    branch: tuple[int, int] | None

    @property
    def outcome(self) -> str:
        """One of ``failed``, ``right``, ``wrong``, ``played`` (a game) and ``ungraded``."""
        if self.failed is not None:
            return "failed"
        if not self.verdicts:
            return "played" if self.outcomes else "ungraded"
        return "right" if any(v["verdict"] == "right" for v in self.verdicts) else "wrong"

    @property
    def earned(self) -> str:
        """Reward in words; in a game of each player."""
        each = (f"{name} {verb} ({paid:+.4g})" for name, (verb, paid) in self.outcomes.items())
        return ", ".join(each) or f"{self.reward:.4g}"

    @property
    def truncated(self) -> bool:
        return any(turn.truncated for turn in self.turns)

    @property
    def size(self) -> int:
        """Estimate of its bytes on the page, with markup."""
        parts = [(t.text, *t.prompt, t.tool or "") for t in self.turns]
        tokens = sum(8 * len(t.tokens["lengths"]) * len(t.tokens) for t in self.turns if t.tokens)
        texts = sum(map(_bytes, itertools.chain([self.task], self.remarks, self.boards, *parts)))
        return 900 + 1100 * len(self.turns) + tokens + texts


def episode(row: Mapping[str, Any], systems: Mapping[str, str]) -> ShownEpisode:
    """Reads an episode of a transcript or an evaluation, or a demonstration.

    Args:
        row: a line of the file; missing and malformed parts are left out.
        systems: system prompts by agent.
    """
    steps = [r.get("info") for r in _mappings(row.get("results"))]
    infos = [info for info in steps if isinstance(info, dict)]
    outcomes = next((o for i in infos if isinstance(o := i.get("outcomes"), dict)), {})
    expected = [i.get("reference", i.get("answer")) for i in infos]
    failed, branch = row.get("failed"), _list(row.get("branch"))
    number_of_game = f", game {_whole(row.get('index')) + 1}" if outcomes else ""
    return ShownEpisode(
        index=_whole(row.get("index")),
        group=_whole(row.get("group")),
        member=_whole(row.get("sample", row.get("member"))),
        task=shortened(_text(row.get("task")) + number_of_game),
        reward=number(row.get("reward")) or 0.0,
        turns=[_turn(turn, systems, steps) for turn in _mappings(row.get("turns"))],
        verdicts=[_verdict(row) for info in infos for row in _mappings(info.get("verdicts"))],
        expected=next((shortened(_text(e)) for e in reversed(expected) if e is not None), None),
        remarks=[shortened(rest) for info in infos if (rest := _remarks(info)) != "{}"],
        boards=[
            shortened(_text(info.get("board"))) if isinstance(info, dict) else "" for info in steps
        ],
        outcomes={_text(name): _outcome(outcome) for name, outcome in outcomes.items()},
        failed=None if failed is None else shortened(_text(failed)),
        branch=(_whole(branch[0]), _whole(branch[1])) if len(branch) == 2 else None,
    )


def shortened(text: str) -> str:
    """Replaces the middle of a long text by a line that says so."""
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def _verdict(row: Mapping[str, Any]) -> dict[str, str]:
    return {key: shortened(_text(row.get(key))) for key in ("agent", "verdict", "answer")}


def _outcome(row: Any) -> tuple[str, float]:
    row = row if isinstance(row, dict) else {}
    words = {"win": "won", "draw": "drew", "loss": "lost"}
    return words.get(_text(row.get("outcome")), "played"), number(row.get("return")) or 0.0


def _move(agent: str, info: Any) -> str:
    info = info if isinstance(info, dict) else {}
    if agent in _list(info.get("illegal")):
        return "no legal move"
    moves = info.get("moves")
    return f"plays {_text(moves[agent])}" if isinstance(moves, dict) and agent in moves else ""


def _turn(row: Mapping[str, Any], systems: Mapping[str, str], infos: list[Any]) -> ShownTurn:
    agent, prompt = _text(row.get("agent")), _text(row.get("prompt"))
    system = systems.get(agent, "")
    whole = ("", "", prompt)
    before, system, after = prompt.partition(system) if system and system in prompt else whole
    text, tool, tokens = _text(row.get("text")), row.get("tool"), _tokens(row)
    if tokens:
        text = "".join(map(_text, row["pieces"]))  # with white space at its ends
    step = max(_whole(row.get("step")), 0)
    return ShownTurn(
        agent=agent,
        step=step,
        text=shortened(text),
        prompt=(shortened(before), shortened(system), shortened(after)),
        tool=None if tool is None else shortened(_text(tool)),
        move=shortened(_move(agent, infos[step])) if step < len(infos) else "",
        sees=[i for i in _list(row.get("sees")) if type(i) is int and i >= 0],
        truncated=row.get("truncated") is True,
        answers=row.get("answers") is True,
        numbers={name: n for name in _OF_TURNS if (n := number(row.get(name))) is not None},
        size=_span(row.get("tokens")),
        tokens=tokens if len(text) <= LONGEST else None,
    )


def _span(value: Any) -> int | None:
    """Returns the length of a span of tokens."""
    return _whole(value[1]) - _whole(value[0]) if len(value := _list(value)) == 2 else None


def _tokens(row: Mapping[str, Any]) -> dict[str, list[float]] | None:
    """Returns the shown length of each token, and the numbers recorded of it."""
    pieces, text = _list(row.get("pieces")), _text(row.get("text"))
    if not pieces or "".join(map(_text, pieces)).strip() != text.strip():
        return None
    tokens: dict[str, list[float]] = {"lengths": [len(printable(_text(piece))) for piece in pieces]}
    for key, name in _OF_TOKENS.items():
        values = [number(value) for value in _list(row.get(key))]
        if len(values) == len(pieces):
            tokens[name] = [0.0 if v is None else float(f"{v:.4g}") for v in values]
    return tokens


def _remarks(info: Mapping[str, Any]) -> str:
    rest = {k: v for k, v in info.items() if k not in ("reference", "verdicts", "board")}
    return jsonlines.dumps(rest)


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "replace")) + 4 * sum(map(text.count, "<>&'\"\x1b"))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mappings(value: Any) -> Iterable[Mapping[str, Any]]:
    return [item for item in _list(value) if isinstance(item, dict)]


def _whole(value: Any) -> int:
    return value if type(value) is int and abs(value) < 1 << 53 else 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)
