"""Tables and responses of evaluations, computed anew from the saved responses."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

from marft_jax.errors import described, one_line
from marft_jax.evaluation.scores import Score, score
from marft_jax.extras.report.choosing import RESPONSES, Group, chosen_groups
from marft_jax.extras.report.episodes import episode
from marft_jax.extras.report.reading import Row, RunRecord, rows

_VARIANTS = ("base model", "team without adapters", "single agent", "team")


class Responses(NamedTuple):
    """Responses in one file to one benchmark.

    Attributes:
        step: of the checkpoint; None without a run.
        who: the variant of the team, such as ``team`` or ``single agent``.
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


def evaluations(run: RunRecord, runs: int) -> list[Responses]:
    """Every evaluation of a run, by benchmark, step and variant of the team."""
    found: list[Responses] = []
    for number, file in enumerate(run.evaluations):
        by_name = defaultdict[str, list[Row]](list)
        for row in rows(file, run.notes):
            by_name[str(row.get("benchmark", file.stem))].append(row)
        share = RESPONSES / runs / len(run.evaluations)
        for name, responses in by_name.items():
            own = [episode(row, run.agents) for row in responses]
            groups, choice = chosen_groups(own, share / len(by_name), {})
            figures, which = _score(run, file.name, responses), _which(file.stem, name)
            found.append(Responses(f"e{number}", name, *which, figures, choice, groups))
    return sorted(found, key=_order)


def _which(stem: str, benchmark: str) -> tuple[int | None, str]:
    """Step and variant, which the name of a file has after the benchmark's."""
    rest = stem.removeprefix(benchmark.replace(":", ".").replace("/", "-"))
    step = re.match(r"-(\d{1,15})(?=-|$)", rest)
    who = rest[step.end() :] if step else rest
    return int(step[1]) if step else None, who.lstrip("-").replace("_", " ") or "team"


def _score(run: RunRecord, name: str, responses: list[Row]) -> Score | None:
    try:
        return score(responses)
    except Exception as error:  # a record may lack anything
        why = one_line(described(error), 100)
        run.notes.append(f"evaluations/{name}: no figures, its responses are not whole ({why})")
        return None


def _order(one: Responses) -> tuple[str, int, int]:
    return one.benchmark, one.step or 0, (*_VARIANTS, one.who).index(one.who)
