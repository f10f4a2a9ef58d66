"""Reports a team's accuracy on held-out tasks.

    python -m marft_jax.evaluate --run runs/quickstart
    python -m marft_jax.evaluate --base tiny --env.name arithmetic --samples 4

``--run`` takes a trained team with its settings, ``--base`` a model without adapters. Further flags
are those of training: ``--eval.episodes`` (how many tasks), ``--eval.temperature``, ``--env.data``.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
from rich.console import Console

from marft_jax import config as config_lib
from marft_jax import transcripts
from marft_jax.envs import base as envs
from marft_jax.session import open_session, play_held_out
from marft_jax.team.files import load_team
from marft_jax.threads import DaemonThreads
from marft_jax.trained import arguments, restore_team, settings_of
from marft_jax.types import Episode


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Leaves with 0: done; 2: bad configuration or input."""
    parser = arguments("marft_jax.evaluate", __doc__)
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="answers per task")
    parser.add_argument("--out", metavar="FILE", help="where all responses go (.jsonl)")
    own, rest = parser.parse_known_args(argv)
    try:
        config = settings_of(own.run, own.base, rest)
        evaluate(own.run, config, own.samples, own.out, own.step)
    except config_lib.BadInput as error:
        config_lib.exit_with(error)
    sys.exit(0)


def evaluate(
    run: str | None, config: config_lib.Config, samples: int, out: str | None, step: str = "latest"
) -> float:
    """Plays the held-out tasks, prints the accuracy, and saves every response.

    Args:
        run: a run directory; None for the bare base.
        config: ``eval.episodes`` tasks are played at ``eval.temperature``.
        samples: how often each task is played.
        out: file for the responses; ``DIR/evaluations/<env>-<step>.jsonl`` where there is a run.
        step: the checkpoint of the run that is used: a number, ``best`` or ``latest``.

    Returns:
        The mean reward over all tasks and samples.

    Raises:
        BadInput: settings, data, model or checkpoint that do not fit.
    """
    if samples < 1:
        raise config_lib.BadInput(f"--samples: expected at least 1, got {samples}")
    if samples > 1 and config.eval.temperature == 0:
        raise config_lib.BadInput(
            "--samples: several greedy answers are all the same; add --eval.temperature 1"
        )
    console = Console(highlight=False)
    with contextlib.ExitStack() as stack:
        source = envs.make(config, "eval")
        stack.callback(source.close)
        threads = DaemonThreads()
        session = open_session(config, load_team(config.team.file))
        trained = restore_team(session, run, step)
        rounds = []
        for sample in range(samples):
            rounds.append(play_held_out(session, source, threads, sample, config.eval.episodes))
            console.print(f"round {sample + 1}/{samples}: {report(rounds[-1:])}")
    who = f"{run}, step {trained}" if run else f"{config.model.base} without adapters"
    console.print(f"{config.env.name}, {' -> '.join(session.team.names)}, {who}")
    console.print(report(rounds))
    default = Path(run) / "evaluations" / f"{config.env.name}-{trained}.jsonl" if run else None
    if file := Path(out) if out else default:
        episodes = [episode for episodes in rounds for episode in episodes]
        transcripts.write(file, episodes, session.team.tokenizer.decode, None)
        console.print(f"responses: {file}")
    return float(np.mean([[episode.reward for episode in r] for r in rounds]))


def report(rounds: Sequence[Sequence[Episode]]) -> str:
    """Accuracy with its standard error over tasks; with several samples also pass@n."""
    rewards_SE = np.array([[episode.reward for episode in episodes] for episodes in rounds])
    samples, tasks = rewards_SE.shape
    per_task_E = rewards_SE.mean(0)
    error = per_task_E.std(ddof=1) / math.sqrt(tasks) if tasks > 1 else math.nan
    text = f"accuracy {per_task_E.mean():.4f} ± {error:.4f} ({tasks} tasks"
    if samples == 1:
        return text + ")"
    passed = float((rewards_SE.max(0) > 0).mean())
    return f"{text} x {samples} samples), pass@{samples} {passed:.4f}"


if __name__ == "__main__":
    main()
