"""Builds the page: texts as HTML, numbers as JSON for the page's scripts.

Text of models, users and files stays text: Jinja escapes it, control characters and direction marks
are spelled out, and the page's Content-Security-Policy allows only the scripts whose digests it
lists, and no fetching.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from marft_jax import __version__
from marft_jax.errors import printable
from marft_jax.extras.report.card import Card, card, settings
from marft_jax.extras.report.choosing import Chapter, Group, chapters
from marft_jax.extras.report.curves import charts, curves, summaries
from marft_jax.extras.report.evaluations import Responses, evaluations
from marft_jax.extras.report.reading import RunRecord
from marft_jax.formats import jsonlines

_FILES = Path(__file__).with_name("page")
_PROGRAMS = ("uPlot.js", "curves.js", "dialogues.js", "page.js")  # the last script starts the page
_COLOURS = 8  # of agents and runs, in page.css
_MOST_TASKS = 200  # of "Then and now"


class Part(NamedTuple):
    """What the page shows of one run; ``key`` is part of its addresses."""

    key: str
    run: RunRecord
    card: Card
    chapters: list[Chapter]
    evaluations: list[Responses]


def render(runs: Sequence[RunRecord], span: range | None = None, version: str = "") -> str:
    """Builds the HTML page of some runs.

    Args:
        span: steps whose transcripts are shown; None: all.
        version: version of the files if the page is served; the page then asks for a newer one.
    """
    many = len(runs)
    parts = [
        Part(f"r{i}", run, card(run), chapters(run, many, span), evaluations(run, many))
        for i, run in enumerate(runs)
    ]
    drawn = charts(runs)
    acting = [x["label"] for c in drawn if c["name"].startswith("agent/") for x in c["lines"]]
    agents = list(dict.fromkeys([*(agent for run in runs for agent in run.agents), *acting]))
    data = curves(runs) | {
        "charts": drawn,
        "version": version,
        "agents": agents,
        "read": {p.key: [c.step for c in p.chapters if c.step is not None] for p in parts},
        "shades": _shades(parts),
    }
    scripts = [Markup(_text(name)) for name in _PROGRAMS]
    return _template(agents).render(
        parts=parts,
        settings=settings(runs),
        served=bool(version),
        drawn=len(data["steps"]),
        made=data["made"],
        summaries=summaries(runs, drawn),
        repeated=repeated_tasks(parts),
        data=_embedded(data),
        style=Markup(_text("uPlot.css") + _text("page.css")),
        licence=Markup(_text("uPlot.LICENSE")),
        scripts=scripts,
        policy=" ".join(map(_digest, scripts)),
        written=datetime.datetime.now().isoformat(" ", "seconds"),
        version=__version__,
    )


class Place(NamedTuple):
    """A place of a task on the page; only places of the same ``kind`` are compared."""

    name: str
    address: str
    kind: tuple[str, str]
    reward: float


Repeated = tuple[str, list[Place], tuple[int, int]]


def repeated_tasks(parts: Sequence[Part]) -> list[Repeated]:
    """Finds tasks at several places of the page, largest gain of reward first.

    Returns:
        For each task its places, and the positions of the two places with the largest gain.
    """
    tasks: dict[str, dict[str, Place]] = {}
    for part in parts:
        prefix = f"{part.run.name}: " if len(parts) > 1 else ""
        for chapter in (*part.chapters, *part.evaluations):
            kind = (part.key, chapter.who if isinstance(chapter, Responses) else "")
            for i, group in enumerate(chapter.groups):
                reward = statistics.fmean(e.reward for e in group.episodes)
                name, place = prefix + chapter.title, address(part.key, chapter.key, i)
                tasks.setdefault(group.task, {}).setdefault(name, Place(name, place, kind, reward))
    again = [(task, [*places.values()]) for task, places in tasks.items() if len(places) > 1]
    ranked = [(*_gain(places), task, places) for task, places in again]
    ranked.sort(key=lambda row: (-row[0], -len(row[3])))
    return [(task, places, pair) for _, pair, task, places in ranked][:_MOST_TASKS]


def _gain(places: Sequence[Place]) -> tuple[float, tuple[int, int]]:
    """Returns the largest gain from a place to a later place of its kind, and both positions."""
    pairs = [
        (places[j].reward - places[i].reward, (i, j))
        for i, j in itertools.combinations(range(len(places)), 2)
        if places[i].kind == places[j].kind
    ]
    return max(pairs, key=lambda pair: pair[0], default=(-math.inf, (0, len(places) - 1)))


def _shades(parts: Iterable[Part]) -> dict[str, list[str]]:
    """Lists the numbers by which texts can be shaded: of turns, and of tokens."""
    chapters = [c for part in parts for c in (*part.chapters, *part.evaluations)]
    turns = [t for c in chapters for g in c.groups for e in g.episodes for t in e.turns]
    return {
        "turns": list(dict.fromkeys(name for t in turns for name in t.numbers)),
        "tokens": list(dict.fromkeys(n for t in turns for n in t.tokens or () if n != "lengths")),
    }


def address(part: str, chapter: str, group: int) -> str:
    """Returns the address of a group of episodes on the page."""
    return f"{part}-{chapter}-t{group}"


def _template(agents: Sequence[str]) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FILES), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined, finalize=_shown,
    )  # fmt: skip
    places = {agent: i for i, agent in enumerate(agents)}
    environment.globals |= {"address": address, "flags": _flags, "json": jsonlines.dumps}
    environment.filters["colour"] = lambda agent: places.get(agent, len(agents)) % _COLOURS
    environment.filters["short"] = lambda v: f"{v:.2f}" if abs(v) < 100 else f"{v:.4g}"
    environment.filters["figure"] = lambda value: "–" if value is None else f"{value:.4g}"
    return environment.get_template("page.html")


def _shown(value: Any) -> Any:
    """Spells out control characters and direction marks of a text."""
    return printable(str(value)) if type(value) is str or isinstance(value, Path) else value


def _printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {printable(key): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list) else _shown(value)


def _flags(group: Group) -> str:
    """Returns the words by which the page filters a group."""
    words = {episode.outcome for episode in group.episodes}
    words |= {"truncated"} if any(e.truncated for e in group.episodes) else set()
    words |= {"mixed"} if len({e.reward for e in group.episodes}) > 1 else set()
    return " ".join(sorted(words))


def _embedded(data: Any) -> Markup:
    """Writes JSON that cannot close its HTML element."""
    text = json.dumps(_printable(jsonlines.plain(data)), separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _digest(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _text(name: str) -> str:
    return (_FILES / name).read_text("utf-8")
