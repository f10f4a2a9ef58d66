"""Writes one HTML page about runs: dialogues, curves, evaluations. The page works offline.

    python -m marft_jax.report --run runs/*                             prints a table of runs
    python -m marft_jax.report --run runs/quickstart --out report.html
    python -m marft_jax.report --run runs/seed0 runs/seed1 runs/other --out report.html
    python -m marft_jax.report --run runs/quickstart --serve            follows it in a browser

Several runs share the charts. Runs that differ only in their seed are drawn as their mean with a
band. The page is made from the files of the run directories alone, also while a run goes on or
after it failed; the page lists missing and broken files.
"""

from __future__ import annotations

import sys
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
from marft_jax.extras.report.reading import RunRecord, check_runs, read_runs, span_of
from marft_jax.extras.report.serving import serve
from marft_jax.formats import jsonlines
from marft_jax.run.storage import storage_of
from marft_jax.settings.setting import check_local


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Exits with 0: done; 1: the page cannot be written; 2: bad input."""
    parser = cli.Parser("marft_jax.report", __doc__)
    parser.add_argument("--run", nargs="+", required=True, metavar="DIR", help="run directories")
    parser.add_argument("--out", metavar="FILE.html", help="page to write; without it: a table")
    parser.add_argument("--steps", metavar="FIRST:LAST", help="only dialogues of these steps")
    follow = "serve the page on 127.0.0.1 until Ctrl-C; default port: 8000"
    parser.add_argument("--serve", nargs="?", const=8000, type=int, metavar="PORT", help=follow)
    with cli.boundary():
        args = parser.parse_args(argv)
        places = [storage_of(run) for run in args.run]
        folders = [place.path for place in places]
        for place in places:
            place.fetch("*")
        if args.serve is not None:
            serve(places, args.serve)
        elif args.out is not None:
            write(folders, _file(args.out), span_of(args.steps))
        else:
            table = overview(read_runs(folders))
            check_runs(folders)
            Console().print(table)
    sys.exit(0)


def overview(runs: Sequence[RunRecord]) -> Table:
    """Makes a table of runs: step, last and best reward, and time of the last step."""
    rows = []
    for one in map(card, runs):
        best = "" if one.best is None else f"{one.best[1]:.3f} at {one.best[0]}"
        reward = "" if one.reward is None else f"{one.reward:.3f}"
        state = one.state.removeprefix("step ") + (f", {one.ended}" if one.ended else "")
        rows.append([one.run.name, state, reward, best, one.written])
    return folding(["run"], ["step", "reward", "best", "written"], rows)


def write(folders: Sequence[Path], out: Path, span: range | None = None) -> None:
    """Reads the run directories and replaces the page atomically."""
    html = render(read_runs(folders), span)
    check_runs(folders)
    jsonlines.write(out, [html])
    print(f"{printable(str(out))}: {len(html.encode()) / 1e6:.1f} MB", flush=True)


def _file(name: str) -> Path:
    check_local("--out", name)
    path = Path(name)
    start = path.read_bytes()[:99].lower() if path.is_file() else b""
    if start and b"<!doctype html" not in start:
        raise BadInput(f"--out {name}: expected a new file or an HTML page, got another file")
    if "\0" in name or path.is_dir() or not path.parent.is_dir():
        raise BadInput(f"--out {name}: expected a file name like report.html in an existing folder")
    return path
