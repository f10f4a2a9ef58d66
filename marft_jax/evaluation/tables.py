"""Tables of scores: on a narrow terminal names are folded, and numbers are never cut."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from marft_jax.evaluation.scores import Scores

_NAME = 12  # characters of a name that stay on one line


def benchmarks(scores: Scores) -> Table:
    """Makes a row for each benchmark and variant of the team."""
    rows = []
    for (name, variant), found in scores.items():
        k = max(found.passed)
        passed = f"@{k} {found.passed[k].mean:.4f}" if k > 1 else ""
        rows.append([name, variant, str(found.tasks), f"@{found.samples} {found.accuracy}", passed])
    return folding(["benchmark", "who"], ["tasks", "avg@n (95 %)", "pass@n"], rows)


def agents(scores: Scores) -> Table:
    """Makes a row for each agent of each benchmark and variant of the team."""
    rows = []
    for (name, variant), found in scores.items():
        for agent, own in found.agents.items():
            right = "" if own.right is None else f"{own.right:.4f}"
            figures = [right, f"{own.tokens:.1f}", f"{own.truncated:.3f}"]
            rows.append([name, variant, agent, *figures])
    return folding(["benchmark", "who", "agent"], ["right", "tokens", "cut off"], rows)


def folding(names: Sequence[str], figures: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Makes a table that folds its names on a narrow terminal, and never cuts its numbers."""
    longest = [max(map(len, column)) for column in zip([*names, *figures], *rows, strict=True)]
    shown = Table(box=box.SIMPLE)
    for name, width in zip(names, longest, strict=False):
        shown.add_column(name, overflow="fold", min_width=min(width, _NAME))
    for heading, width in zip(figures, longest[len(names) :], strict=True):
        shown.add_column(heading, no_wrap=True, min_width=width)
    for row in rows:
        shown.add_row(*row)
    return shown
