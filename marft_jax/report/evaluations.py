"""Tables and responses of evaluations, computed anew from the saved responses."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

from marft_jax.errors import one_line
from marft_jax.evaluation.scores import Score, score
from marft_jax.report.choosing import RESPONSES, Group, chosen_groups
from marft_jax.report.episodes import episode
from marft_jax.report.reading import Row, Run, rows

_PLAYERS = ("base model", "team without adapters", "single agent", "team")


class Played(NamedTuple):
    """A file of responses.

    Attributes:
        step: of the checkpoint; None without a run.
        who: the player, such as ``team`` or ``single agent``.
        score: None where the responses are not whole.
    """

    key: str
    benchmark: str
    step: int | None
    who: str
    score: Score | None
    choice: str
    groups: list[Group]

    @property
    def title(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.benchmark}{step}, {self.who}"


def evaluations(run: Run, runs: int) -> list[Played]:
    """Every evaluation of a run, by benchmark, step and player."""
    found: list[Played] = []
    for number, file in enumerate(run.evaluations):
        by_name = defaultdict[str, list[Row]](list)
        for row in rows(file, run.notes):
            by_name[str(row.get("benchmark", file.stem))].append(row)
        share = RESPONSES / runs / len(run.evaluations)
        for name, responses in by_name.items():
            step, who = _which(file.stem, name)
            own = [episode(row, run.agents) for row in responses]
            groups, choice = chosen_groups(own, share / len(by_name), {})
            figures = _score(run, file.name, responses)
            found.append(Played(f"e{number}", name, step, who, figures, choice, groups))
    return sorted(found, key=_order)


def _which(stem: str, benchmark: str) -> tuple[int | None, str]:
    """Step and player, which the name of a file has after the benchmark's."""
    rest = stem.removeprefix(benchmark.replace(":", ".").replace("/", "-"))
    step = re.match(r"-(\d{1,15})(?=-|$)", rest)
    who = rest[step.end() :] if step else rest
    return int(step[1]) if step else None, who.lstrip("-").replace("_", " ") or "team"


def _score(run: Run, name: str, responses: list[Row]) -> Score | None:
    try:
        return score(responses)
    except (
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
        ZeroDivisionError,
    ) as error:
        why = one_line(f"{type(error).__name__}: {error}", 100)
        run.notes.append(f"evaluations/{name}: no figures, its responses are not whole ({why})")
        return None


def _order(played: Played) -> tuple[str, int, int]:
    place = _PLAYERS.index(played.who) if played.who in _PLAYERS else len(_PLAYERS)
    return played.benchmark, played.step or 0, place
