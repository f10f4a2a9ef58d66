"""Fine-tunes a team: ``python -m marft_jax.train [--config FILE ...] [--section.key value ...]``.

Without arguments it runs the quickstart: a planner and a solver on the built-in model learn to add.
With ``--dry_run`` it does all that comes before the first step, plays one task, and ends.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from typing import NoReturn

from rich.console import Console

from marft_jax import cli
from marft_jax.config import Config
from marft_jax.errors import BadInput
from marft_jax.parallel import processes
from marft_jax.run import transcripts
from marft_jax.run.loggers import find_loggers
from marft_jax.run.training import open_training
from marft_jax.types import OnStep


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Leaves with 0: done; 1: could not go on; 2: bad input; 75: stopped by a signal, saved."""
    words = sys.argv[1:] if argv is None else argv
    with cli.boundary():
        config = cli.parse_training([word for word in words if word != _DRY])
        work = rehearse if _DRY in words else train_team
        code = processes.end_together(lambda: work(config))
    sys.exit(code)


_DRY = "--dry_run"


def train_team(config: Config, on_step: OnStep | None = None) -> int:
    """Trains to the last step, from the newest checkpoint of the run directory if there is one.

    Each step plays episodes, credits their turns, learns from them, reports and saves.

    Args:
        on_step: is shown every step when it is finished, and may end the run there; what it raises
            does so as well.

    Returns:
        The exit code: 0, or 75 when a signal or ``on_step`` stopped the run, which is saved.

    Raises:
        BadInput: settings, data, model, team or a saved run that do not fit.
        RunFailed: the run directory cannot be written, too many episodes failed, or training
            collapsed again and again. Whatever is raised, the last finished step is saved.
    """
    _check_samples(config)
    with open_training(config, on_step) as run:
        learner = run.learner
        for step in run.steps():
            played = run.play()
            with run.clock("update_s"):
                batch = learner.pack(played.episodes, played.rewards, seed=run.seed)
                run.state, estimates, learned = learner.learn(run.state, batch, step, run.check)
                run.transcribe(played, estimates)  # while the devices update
                run.wait_for((run.state, learned))
            verdict = run.report(played, batch, learned)
            run.save(verdict)
    return run.exit_code


def rehearse(config: Config) -> int:
    """Opens the run as ``train_team`` does, but anew in a temporary directory, and plays one task.

    Prints each prompt as the model is shown it, and what was written and earned.

    Raises:
        BadInput, RunFailed: what ``train_team`` would raise until then.
    """
    _check_samples(config)
    with tempfile.TemporaryDirectory() as folder:
        find_loggers(config.run.loggers)
        own = dataclasses.replace(config.run, dir=folder, loggers=())
        with open_training(dataclasses.replace(config, run=own)) as run:
            shown = [transcripts.render(episode, run.decode) for episode in run.preview()]
            if processes.is_lead():
                Console().print(*shown)
                print(f"nothing is learned or kept; without {_DRY} this goes to {config.run.dir}")
    return 0


def _check_samples(config: Config) -> None:
    if config.algo.name == "imitation":
        raise BadInput(
            "--algo.name imitation: it learns from demonstrations, see marft_jax.imitate; to go on "
            "from what it learned, choose another --run.dir and --lora.init"
        )


if __name__ == "__main__":
    main()
