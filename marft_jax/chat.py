"""Asks a trained team questions and shows every agent's answer.

    python -m marft_jax.chat --run runs/quickstart
    echo "3+5+9=?" | python -m marft_jax.chat --run runs/quickstart

One question per line; an empty line or end of file ends it. Further flags are those of training,
such as ``--eval.temperature 0.7``.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from rich.console import Console, RenderableType

from marft_jax import cli
from marft_jax.errors import BadInput, RunFailed, printable


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Leaves with 0: done; 2: bad configuration or input."""
    parser = cli.run_parser("marft_jax.chat", __doc__)
    with cli.boundary():
        args, rest = parser.parse_known_args(argv)
        config = cli.parse_run(args.run, args.base, rest, "marft_jax.chat", plays_tasks=False)
        # after the settings are checked: JAX takes seconds to import
        from marft_jax.run.loaded_team import LoadedTeam
        from marft_jax.run.transcripts import render

        team = LoadedTeam(args.run, config, args.step)
        with contextlib.suppress(KeyboardInterrupt):
            chat(lambda question: render(team.ask(question)))
    sys.exit(0)


def chat(answer: Callable[[str], RenderableType]) -> None:
    """Answers questions from standard input until it ends."""
    console = Console(highlight=False)
    for question in _questions(console):
        try:
            console.print(answer(question))
        except (BadInput, RunFailed) as error:  # too long a question: say so, go on
            console.print(printable(str(error)), markup=False)


def _questions(console: Console) -> Iterator[str]:
    asking = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):  # what is typed need not be UTF-8
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="replace")
    while True:
        if asking:
            console.print("\nquestion (empty to leave): ", end="", style="bold")
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


if __name__ == "__main__":
    main()
