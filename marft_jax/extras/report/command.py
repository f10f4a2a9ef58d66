"""Writes one page, to read offline, about what teams wrote and how they learned.

    python -m marft_jax.report --run runs/*                             how far each is, here
    python -m marft_jax.report --run runs/quickstart --out report.html
    python -m marft_jax.report --run runs/seed0 runs/seed1 runs/other --out report.html
    python -m marft_jax.report --run runs/quickstart --out report.html --watch
    python -m marft_jax.report --run runs/quickstart --serve            follow it while it goes on

Several runs are drawn over each other; those that differ in nothing but their seed are drawn as
their mean with a band. The page is made from the files of the run directories alone, also while a
run goes on or after it broke: what is missing is named.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.table import Table

from marft_jax import cli
from marft_jax.errors import BadInput, printable
from marft_jax.evaluation.tables import folding
from marft_jax.extras.report.card import card
from marft_jax.extras.report.page import render
from marft_jax.extras.report.reading import RunRecord, changes, read_runs, span_of
from marft_jax.extras.report.serving import serve
from marft_jax.formats import jsonlines
from marft_jax.setting import check_local

_SECONDS = 10.0  # between two looks at the files


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Leaves with 0: written; 1: the page cannot be written; 2: bad input."""
    parser = cli.Parser("marft_jax.report", __doc__)
    parser.add_argument("--run", nargs="+", required=True, metavar="DIR", help="run directories")
    parser.add_argument("--out", metavar="FILE.html", help="the page; without it, a table is shown")
    parser.add_argument("--steps", metavar="FIRST:LAST", help="only dialogues of these steps")
    again = "write it anew when a run goes on, until Ctrl-C"
    parser.add_argument("--watch", action="store_true", help=again)
    follow = "follow the runs at a local address, until Ctrl-C"
    parser.add_argument("--serve", nargs="?", const=8000, type=int, metavar="PORT", help=follow)
    with cli.boundary():
        own = parser.parse_args(argv)
        folders = [Path(run) for run in own.run]
        if own.serve is not None:
            serve(folders, own.serve)
        elif own.out is not None:
            out, span = _file(own.out), span_of(own.steps)
            write(folders, out, span)
            if own.watch:
                _watch(folders, out, span)
        elif own.watch:
            raise BadInput("--watch: expected --out too, the page to write anew")
        else:
            console = Console()
            console.print(overview(read_runs(folders), console.width))
    sys.exit(0)


def overview(runs: Sequence[RunRecord], width: int) -> Table:
    """Table of how far each run is, its last and its best reward, and when it last wrote."""
    rows = []
    for one in map(card, runs):
        best = "" if one.best is None else f"{one.best[1]:.3f} at {one.best[0]}"
        reward = "" if one.reward is None else f"{one.reward:.3f}"
        state = one.state.removeprefix("step ") + (", done" if one.finished else "")
        rows.append([printable(one.run.name), state, reward, best, one.written])
    return folding(["run"], ["step", "reward", "best", "last line"], rows, width)


def write(folders: Sequence[Path], out: Path, span: range | None = None) -> None:
    """Reads the run directories and replaces the page, whole or not at all."""
    html = render(read_runs(folders), span)
    jsonlines.write(out, [html])
    print(f"{printable(str(out))}: {len(html.encode()) / 1e6:.1f} MB", flush=True)


def _watch(folders: Sequence[Path], out: Path, span: range | None) -> None:
    before = changes(folders)
    with contextlib.suppress(KeyboardInterrupt):  # the way in which a watch ends
        while True:
            time.sleep(_SECONDS)
            if (now := changes(folders)) != before:
                write(folders, out, span)
                before = now


def _file(name: str) -> Path:
    check_local("--out", name)
    path = Path(name)
    if "\0" in name or path.is_dir() or not path.parent.is_dir():
        raise BadInput(f"--out {name}: expected a file name like report.html in a folder that is")
    return path
