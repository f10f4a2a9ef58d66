"""Fine-tunes a team: ``python -m marft_jax.train [--config FILE ...] [--section.key value ...]``.

Without arguments it runs the quickstart: a planner and a solver on the built-in model learn to add.
With ``--dry_run`` it does all that comes before the first step, plays one task, and ends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from marft_jax import cli

_DRY = "--dry_run"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Exits with 0: done; 1: the run failed; 2: bad input; 75: stopped by a signal, with the
    finished steps saved."""
    words = sys.argv[1:] if argv is None else argv
    with cli.boundary():
        flags = [word for word in words if word.replace("-", "_") != _DRY.replace("-", "_")]
        config = cli.parse_training(flags)
        # after the settings are checked: JAX takes seconds to import
        from marft_jax.parallel import processes
        from marft_jax.run import loop

        work = loop.rehearse if len(flags) < len(words) else loop.train_team
        code = processes.end_together(lambda: work(config))
    sys.exit(code)


if __name__ == "__main__":
    main()
