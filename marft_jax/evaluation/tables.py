"""Tables of scores: on a narrow terminal names are folded, and numbers are never cut."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from rich import box
from rich.table import Column, Table
from rich.text import Text

from marft_jax.errors import printable
from marft_jax.evaluation.scores import Scores

_NAME = 14  # columns of a name, with the space beside it


def benchmarks(scores: Scores) -> Table:
    """Makes a row for each benchmark and variant of the team."""
    rows = []
    for (name, variant), score in scores.items():
        k = max(score.passed)
        passed = f"@{k} {score.passed[k].mean:.4f}" if k > 1 else ""
        average = score.accuracy if score.graded else f"mean reward {score.reward}"
        rows.append([name, variant, str(score.tasks), f"@{score.samples} {average}", passed])
    return folding(["benchmark", "who"], ["tasks", "avg@n (95 %)", "pass@n"], rows)


def agents(scores: Scores) -> Table:
    """Makes a row for each agent of each benchmark and variant of the team."""
    rows = []
    for (name, variant), score in scores.items():
        for agent, agent_score in score.agents.items():
            right = "" if agent_score.right is None else f"{agent_score.right:.4f}"
            figures = [right, f"{agent_score.tokens:.1f}", f"{agent_score.truncated:.3f}"]
            rows.append([name, variant, agent, *figures])
    return folding(["benchmark", "who", "agent"], ["right", "tokens", "cut off"], rows)


def folding(names: Sequence[str], figures: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Makes a table that folds its names on a narrow terminal, and never cuts its numbers."""
    shown = Table(*(Column(name, overflow="fold") for name in names), box=box.SIMPLE)
    least = _NAME * len(names)
    for i, heading in enumerate(figures, len(names)):
        longest = max(map(len, (heading, *(row[i] for row in rows))))
        shown.add_column(heading, no_wrap=True, min_width=longest)
        least += longest + 3
    for row in rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    if least > shutil.get_terminal_size().columns:  # else rich leaves nothing for the names
        shown.width = least
    return shown
