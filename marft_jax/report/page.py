"""Builds the page: texts as HTML that needs no program, numbers as data for the one in it.

Whatever a model, a user or a file wrote is text: Jinja escapes it, control characters and marks
that turn the direction of writing are spelled out, and the page's own policy lets nothing run but
the programs whose digests it names, and nothing be fetched.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from marft_jax import __version__
from marft_jax.errors import printable
from marft_jax.formats import jsonlines
from marft_jax.report.card import Card, card, settings
from marft_jax.report.choosing import Chapter, Group, chapters
from marft_jax.report.curves import charts, curves, summaries
from marft_jax.report.evaluations import Played, evaluations
from marft_jax.report.reading import Run

_FILES = Path(__file__).with_name("page")
_PROGRAMS = ("uPlot.js", "curves.js", "dialogues.js", "page.js")  # the last one starts
_COLOURS = 8  # of agents and runs, in page.css
_MEETINGS = 200  # tasks that are offered for comparison


class Part(NamedTuple):
    """All that the page shows of one run; ``key`` is part of its addresses."""

    key: str
    card: Card
    chapters: list[Chapter]
    evaluations: list[Played]


class Meeting(NamedTuple):
    """A task that is played at several places: their names and addresses."""

    task: str
    places: list[tuple[str, str]]


def render(runs: Sequence[Run]) -> str:
    """The page of some runs, as HTML."""
    parts = [
        Part(f"r{i}", card(run), chapters(run, len(runs)), evaluations(run, len(runs)))
        for i, run in enumerate(runs)
    ]
    drawn = charts(runs)
    acting = [line.label for chart in drawn if chart.name[:6] == "agent/" for line in chart.lines]
    agents = list(dict.fromkeys([*(agent for run in runs for agent in run.agents), *acting]))
    data = curves(runs) | {
        "charts": [c._asdict() | {"lines": [x._asdict() for x in c.lines]} for c in drawn],
        "agents": agents,
        "read": {p.key: [c.step for c in p.chapters if c.step is not None] for p in parts},
        "shades": _shades(parts),
    }
    scripts = [Markup(_text(name)) for name in _PROGRAMS]
    template = _environment(agents).get_template("page.html")
    return template.render(
        parts=parts,
        settings=settings(runs),
        width=data["width"],
        summaries=summaries(runs, drawn),
        meetings=meetings(parts),
        data=_embedded(data),
        style=Markup(_text("uPlot.css") + _text("page.css")),
        licence=Markup(_text("uPlot.LICENSE")),
        scripts=scripts,
        policy=" ".join(map(_digest, scripts)),
        written=datetime.datetime.now().isoformat(" ", "seconds"),
        version=__version__,
    )


def meetings(parts: Sequence[Part]) -> list[Meeting]:
    """Tasks that stand at several places of the page, those at most places first."""
    found: dict[str, list[tuple[str, str]]] = {}
    for part in parts:
        prefix = f"{part.card.name}: " if len(parts) > 1 else ""
        for chapter in (*part.chapters, *part.evaluations):
            first: dict[str, int] = {}
            for i, group in enumerate(chapter.groups):
                first.setdefault(group.task, i)
            for task, i in first.items():
                place = prefix + chapter.title, address(part.key, chapter.key, i)
                found.setdefault(task, []).append(place)
    again = [Meeting(task, places) for task, places in found.items() if len(places) > 1]
    return sorted(again, key=lambda one: -len(one.places))[:_MEETINGS]


def _shades(parts: Iterable[Part]) -> dict[str, list[str]]:
    """The numbers that texts can be shaded by: those of turns, and those of their tokens."""
    chapters = [c for part in parts for c in (*part.chapters, *part.evaluations)]
    turns = [t for c in chapters for g in c.groups for e in g.episodes for t in e.turns]
    return {
        "turns": list(dict.fromkeys(name for t in turns for name in t.numbers)),
        "tokens": list(dict.fromkeys(n for t in turns for n in t.tokens or () if n != "lengths")),
    }


def address(part: str, chapter: str, group: int) -> str:
    """Where a group of episodes stands on the page."""
    return f"{part}-{chapter}-t{group}"


def _environment(agents: Sequence[str]) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FILES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
    )
    environment.globals |= {"address": address, "flags": _flags, "json": jsonlines.dumps}
    environment.filters["colour"] = lambda agent: (
        (agents.index(agent) if agent in agents else len(agents)) % _COLOURS
    )
    environment.filters["figure"] = _figure
    return environment


def _shown(value: Any) -> Any:
    """Text of others with everything that would act on its surroundings spelled out."""
    return printable(value) if type(value) is str else value


def _printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {printable(key): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list) else _shown(value)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _flags(group: Group) -> str:
    """Words that the page filters a group by."""
    words = {episode.outcome for episode in group.episodes}
    words |= {"truncated"} if any(e.truncated for e in group.episodes) else set()
    words |= {"mixed"} if len({e.reward for e in group.episodes}) > 1 else set()
    return " ".join(sorted(words))


def _embedded(data: Any) -> Markup:
    """JSON that cannot end the element that it stands in, of texts as they are shown."""
    text = json.dumps(_printable(jsonlines.plain(data)), separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _digest(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _text(name: str) -> str:
    return (_FILES / name).read_text("utf-8")
