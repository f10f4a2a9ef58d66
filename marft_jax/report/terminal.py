"""Reads the dialogues of a run in a terminal, as over SSH: one sample at a time, by short words."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

from rich.console import Console, Group
from rich.padding import Padding
from rich.text import Text

from marft_jax.errors import BadInput, printable
from marft_jax.report.episodes import ShownEpisode, episode
from marft_jax.report.reading import RunRecord, rows

HELP = """\
Enter  next sample    p  previous    w  next wrong    /words  next that has them
a  next agent alone, then all        s N  step N      ?  this       q  leave"""
_COLOURS = ("cyan", "yellow", "green", "magenta", "red", "blue")
_OUTCOMES = {"right": "green", "wrong": "red", "failed": "red", "played": "", "ungraded": "dim"}

Place = tuple[int, int]
"""Number of a step among those with a transcript, and of an episode in it."""


def read(run: RunRecord, console: Console) -> None:
    """Shows samples until the reader leaves.

    Raises:
        BadInput: the run has no transcripts.
    """
    reader = Reader(run)
    console.print(HELP, style="dim", markup=False)
    console.print(reader.shown())
    while True:
        try:
            words = console.input("[bold]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if words == "q":
            return
        problem = reader.follow(words)
        console.print(problem if problem else reader.shown(), markup=False)


class Reader:
    """Where a reader is in a run, and what is shown there."""

    def __init__(self, run: RunRecord) -> None:
        self._run, self._steps = run, list(run.transcripts)
        self._place, self._agent = (0, 0), 0  # the agent that is shown alone; 0 shows all
        self._read = functools.lru_cache(4)(self._episodes)
        first = next(self._after((0, -1)), None)
        if first is None:
            raise BadInput(f"--terminal: {run.folder} has no transcripts to read yet")
        self._place = first

    def follow(self, words: str) -> str:
        """Does what the reader asks for; returns why not, or ""."""
        if words == "":
            return self._go(self._after(self._place), lambda _: True)
        if words == "p":
            return self._go(self._before(self._place), lambda _: True)
        if words == "w":
            return self._go(self._after(self._place), lambda e: e.outcome in ("wrong", "failed"))
        if words.startswith("/"):
            wanted = words[1:].lower()
            return self._go(self._after(self._place), lambda e: wanted in _words(e))
        if words == "a":
            self._agent = (self._agent + 1) % (len(self._agents) + 1)
            return ""
        kind, _, step = words.partition(" ")
        if kind == "s" and step.isdecimal() and int(step) in self._steps:
            at = self._steps.index(int(step))
            return self._go(self._after((at, -1)), lambda _: True)
        return HELP if kind != "s" else f"steps: {', '.join(map(str, self._steps))}"

    def shown(self) -> Group:
        """The sample, with the turns of the agent that is looked at or of all."""
        step, number = self._place
        episodes = self._read(step)
        one, agents = episodes[number], self._agents
        head = Text.assemble(
            (f"step {self._steps[step]}, sample {number + 1} of {len(episodes)}  ", "bold"),
            (one.outcome, _OUTCOMES[one.outcome]),
            f"  {'' if one.outcomes else 'reward '}{printable(one.earned)}",
            f"  expected {printable(one.expected)}" if one.expected is not None else "",
        )
        parts: list[Text | Padding] = [head, Text(printable(one.task), "italic")]
        parts += [Text(printable(one.failed), "red")] if one.failed is not None else []
        for turn in one.turns:
            place = agents.index(turn.agent)
            if self._agent not in (0, place + 1):
                continue
            numbers = [f"{name} {value:.4g}" for name, value in turn.numbers.items()]
            numbers += ["cut off"] if turn.truncated else []
            name = Text(printable(turn.agent), f"bold {_COLOURS[place % len(_COLOURS)]}")
            parts.append(Text.assemble(name, ("  " + ", ".join(numbers), "dim")))
            texts = [turn.text] + ([f"tool: {turn.tool}"] if turn.tool is not None else [])
            parts += [Padding(Text(printable(text)), (0, 0, 0, 2)) for text in texts]
        return Group("", *parts)

    @property
    def _agents(self) -> list[str]:
        step, number = self._place
        return list(dict.fromkeys(turn.agent for turn in self._read(step)[number].turns))

    def _episodes(self, step: int) -> list[ShownEpisode]:
        file = self._run.transcripts[self._steps[step]]
        return [episode(row, self._run.agents) for row in rows(file, self._run.notes)]

    def _after(self, place: Place) -> Iterator[Place]:
        step, number = place
        for at in range(step, len(self._steps)):
            begin = number + 1 if at == step else 0
            yield from ((at, n) for n in range(begin, len(self._read(at))))

    def _before(self, place: Place) -> Iterator[Place]:
        step, number = place
        for at in range(step, -1, -1):
            end = number if at == step else len(self._read(at))
            yield from ((at, n) for n in reversed(range(end)))

    def _go(self, places: Iterator[Place], fits: Callable[[ShownEpisode], bool]) -> str:
        found = next((place for place in places if fits(self._read(place[0])[place[1]])), None)
        if found is None:
            return "no more of these"
        self._place = found
        self._agent = self._agent if self._agent <= len(self._agents) else 0
        return ""


def _words(one: ShownEpisode) -> str:
    texts = itertools.chain([one.task], *((t.text, t.tool or "") for t in one.turns))
    return "\n".join(texts).lower()
