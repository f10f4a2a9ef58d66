"""Fine-tunes a team: ``python -m marft_jax.train [--config FILE ...] [--section.key value ...]``.

Without arguments it runs the quickstart: a planner and a solver on the built-in model learn to add.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import jax

from marft_jax import cli
from marft_jax.config import Config
from marft_jax.errors import BadInput
from marft_jax.parallel import processes
from marft_jax.run.training import open_training


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Leaves with 0: done; 1: could not go on; 2: bad input; 75: stopped by a signal, saved."""
    with cli.boundary():
        config = cli.parse_training(sys.argv[1:] if argv is None else argv)
        code = processes.end_together(lambda: train(config))
    sys.exit(code)


def train(config: Config) -> int:
    """Trains to the last step, from the newest checkpoint of the run directory if there is one.

    Each step plays episodes, credits their turns, learns from them, reports and saves.

    Returns:
        The exit code: 0, or 75 when a signal stopped the run after a save.

    Raises:
        BadInput: settings, data, model, team or a saved run that do not fit.
        RunFailed: the run directory cannot be written, too many episodes failed, or training
            collapsed again and again. Whatever is raised, the last finished step is saved.
    """
    if config.algo.name == "imitation":
        raise BadInput(
            "--algo.name imitation: it learns from demonstrations, see marft_jax.imitate; to go on "
            "from what it learned, choose another --run.dir and --lora.init"
        )
    with open_training(config) as run:
        learner = run.learner
        for step in run.steps():
            played = run.play()
            with run.clock("update_s"):
                batch = learner.pack(played.episodes, played.rewards, seed=run.seed)
                run.state, estimates, learned = learner.learn(run.state, batch, step)
                run.transcribe(played, estimates)  # while the devices update
                jax.block_until_ready((run.state, learned))
            verdict = run.report(played, batch, learned)
            run.save(verdict)
    return run.exit_code


if __name__ == "__main__":
    main()
