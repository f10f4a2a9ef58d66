"""All commands under one name: ``marft train``, or ``python -m marft_jax train``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from marft_jax import __version__
from marft_jax.errors import exit_with

COMMANDS = {
    "check": "try an environment of yours, or show the tasks of your data",
    "train": "fine-tune a team",
    "imitate": "fine-tune a team on demonstrations",
    "evaluate": "play benchmarks or held-out tasks",
    "chat": "ask a trained team questions",
    "serve": "answer other programs, as an OpenAI endpoint",
    "export": "take a trained team out of a run",
    "report": "write a page: dialogues, curves, evaluations",
    "plan": "say what a configuration needs on hardware that is not here",
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs ``marft_jax.COMMAND`` with the rest of the command line."""
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        print("marft COMMAND [--help] [--section.key value ...]\n")
        print("\n".join(f"  {name:10s}{what}" for name, what in COMMANDS.items()))
        sys.exit(0)
    if command == "--version":
        print(f"marft_jax {__version__}")
        sys.exit(0)
    if command not in COMMANDS:
        exit_with(f"expected a command ({', '.join(COMMANDS)}), got {command!r:.60}")
    try:
        module = importlib.import_module(f"marft_jax.{command}")
    except KeyboardInterrupt:
        exit_with("stopped", code=130)
    module.main(rest)
    sys.exit(0)


if __name__ == "__main__":
    main()
