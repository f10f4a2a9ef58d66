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
from collections.abc import Iterator, Sequence
from typing import NoReturn

from rich.console import Console

from marft_jax import cli
from marft_jax.envs.base import Grade, Task, question_source
from marft_jax.envs.threads import DaemonThreads
from marft_jax.errors import BadInput, RunFailed, printable
from marft_jax.run import transcripts
from marft_jax.run.setup import Session, open_session, play_held_out, restore_state
from marft_jax.team.team_files import load_team

_UNGRADED = Grade(0.0, "not graded")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Leaves with 0: done; 2: bad configuration or input."""
    parser = cli.run_parser("marft_jax.chat", __doc__)
    with cli.boundary():
        own, rest = parser.parse_known_args(argv)
        config = cli.parse_run(own.run, own.base, rest, prog="marft_jax.chat")
        session = open_session(config, load_team(config.team.file))
        session.engine.load(restore_state(session, own.run, own.step).adapters)
        with contextlib.suppress(KeyboardInterrupt):
            chat(session)
    sys.exit(0)


def chat(session: Session) -> None:
    """Answers questions from standard input until it ends."""
    console = Console(highlight=False)
    threads = DaemonThreads()
    for number, question in enumerate(_questions(console)):
        task = Task(question, "")
        source = question_source(lambda _, task=task: task, lambda *_: _UNGRADED, horizon=1)
        try:
            [episode] = play_held_out(session, source, threads, number, 1).episodes
        except (BadInput, RunFailed) as error:  # too long a question: say so, go on
            console.print(printable(str(error)), markup=False)
        else:
            console.print(transcripts.render(episode._replace(results=())))


def _questions(console: Console) -> Iterator[str]:
    asking = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):  # what is typed need not be UTF-8
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    while True:
        if asking:
            console.print("\nquestion (empty to leave): ", end="", style="bold")
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


if __name__ == "__main__":
    main()
