"""Scores and responses of evaluations, computed from the saved responses."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

from marft_jax.errors import described, one_line
from marft_jax.evaluation.scores import Score, score
from marft_jax.extras.report.choosing import BYTES, Group, chosen_groups
from marft_jax.extras.report.episodes import episode
from marft_jax.extras.report.reading import Row, RunRecord, rows

_VARIANTS = ("base model", "team without adapters", "single agent", "team")


class Responses(NamedTuple):
    """Responses to one benchmark in one file.

    Attributes:
        step: of the checkpoint; None for a base without a run.
        who: variant of the team, such as ``team`` or ``single agent``.
        score: None if responses are incomplete.
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


def evaluations(run: RunRecord, runs: int) -> list[Responses]:
    """Reads all evaluations of a run, ordered by benchmark, step and variant of the team."""
    listed: list[Responses] = []
    for number, file in enumerate(run.evaluations):
        by_name = defaultdict[str, list[Row]](list)
        for row in rows(file, run.notes):
            by_name[str(row.get("benchmark", file.stem))].append(row)
        share = BYTES / runs / len(run.evaluations)
        for name, responses in by_name.items():
            episodes = [episode(row, run.agents) for row in responses]
            groups, choice = chosen_groups(episodes, share / len(by_name))
            figures, which = _score(run, file.name, responses), _which(file.stem, name)
            listed.append(Responses(f"e{number}", name, *which, figures, choice, groups))
    order = {who: i for i, who in enumerate(_VARIANTS)}
    return sorted(listed, key=lambda r: (r.benchmark, r.step or 0, order.get(r.who, len(order))))


def _which(stem: str, benchmark: str) -> tuple[int | None, str]:
    """Reads step and variant, which follow the benchmark in the name of a file."""
    rest = stem.removeprefix(benchmark.replace(":", ".").replace("/", "-"))
    step = re.match(r"-(\d{1,15})(?=-|$)", rest)
    who = rest[step.end() :] if step else rest
    return int(step[1]) if step else None, who.lstrip("-").replace("_", " ") or "team"


def _score(run: RunRecord, name: str, responses: list[Row]) -> Score | None:
    try:
        return score(responses)
    except Exception as error:  # a record may lack anything
        why = one_line(described(error), 100)
        run.notes.append(f"evaluations/{name}: no scores, its responses are incomplete ({why})")
        return None
