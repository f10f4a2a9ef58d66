"""A supervised start: a team learns demonstrations, played through its own workflow."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from marft_jax import random_keys
from marft_jax.cli import unused_settings
from marft_jax.errors import BadInput, one_line
from marft_jax.formats import jsonlines
from marft_jax.learning.credit import make_credit
from marft_jax.learning.settings import Imitation
from marft_jax.learning.state import TrainState
from marft_jax.parallel import processes
from marft_jax.random_keys import Stream
from marft_jax.rollout.collect import Collected
from marft_jax.rollout.recorded import Demonstration, demonstrated, read, replay
from marft_jax.run.loop import learn_from
from marft_jax.run.opening import open_training
from marft_jax.run.playing import make_rollout
from marft_jax.run.signals import EXIT_STOPPED
from marft_jax.run.storage import storage_of
from marft_jax.run.training import Training
from marft_jax.settings.config import SAMPLED, Algo, Config, Guard
from marft_jax.types import Credit, Episode, OnStep

_ALGO = {field.name for field in dataclasses.fields(Imitation)} - {"name"}
_GUARD = {
    field.name: None
    for field in dataclasses.fields(Guard)
    if field.metadata.get("needs") == SAMPLED
}
_OF_HELD_OUT = 10  # one of so many is held out
_MOST = 20  # faults that are shown
_KEPT = "demonstrations.jsonl"


class Wanted(NamedTuple):
    """Which demonstrations: those of files, and so many that the environment generates."""

    files: Sequence[str] = ()
    generated: int = 0
    min_reward: float | None = None


def settings_of(config: Config) -> Config:
    """Training's settings without those that are about the team's own samples."""
    algo = Imitation(**{k: getattr(config.algo, k) for k in _ALGO})
    best = config.run.best_metric
    return dataclasses.replace(
        config,
        algo=algo,
        critic=type(config.critic)(),
        guard=dataclasses.replace(config.guard, **_GUARD),
        rollout=dataclasses.replace(config.rollout, lag=0),
        mesh=dataclasses.replace(config.mesh, rollout=()),
        run=dataclasses.replace(config.run, best_metric=None if best == "reward/mean" else best),
    )


def imitate_team(config: Config, wanted: Wanted, on_step: OnStep | None = None) -> int:
    """Learns to the last step, from the newest checkpoint of the run directory if there is one.

    Args:
        config: settings of a training; those about the team's own samples do not count.
        on_step: see ``train_team``.

    Returns:
        As ``train_team``.

    Raises:
        BadInput: settings, model, team or demonstrations that do not fit.
        RunFailed: the run directory cannot be written.
    """
    given, config = config, settings_of(config)
    lines = _read(storage_of(config.run.dir).path, wanted)
    warning = unused_settings.warning(dataclasses.replace(given, algo=config.algo))
    with open_training(config) as run:
        unused_settings.log(warning)
        episodes, held_out = prepared(run, config, wanted, lines)
        credit, learner = make_credit(Algo(), run.models.team), run.learner
        unseen = None
        if held_out:
            unseen = batch_of(held_out, credit, len(held_out), (config.run.seed, 0))

        def take(state: TrainState, step: int, rollbacks: int) -> tuple[Collected, tuple[()]]:
            run.playing.sampler.release()  # nothing but an evaluation needs it
            return batch_of(episodes, credit, config.algo.episodes, run.seed(step)), ()

        def also(state: TrainState) -> dict[str, Any]:
            if not unseen:
                return {}
            seed = run.seed(int(state.step) - 1)
            batch = learner.pack(unseen.episodes, unseen.rewards, seed=seed)
            return {"heldout_loss": learner.loss(state, batch)}

        learn_from(take, run, on_step, also)
        return 0
    return EXIT_STOPPED


def _read(folder: Path, wanted: Wanted) -> list[Demonstration | str]:
    """Reads the lines of the files, or of those that the run began with."""
    files, kept = wanted.files, folder / _KEPT
    if not files and not wanted.generated:
        if not kept.is_file():
            raise BadInput("expected --data FILE, or --demonstrations N, got neither")
        files = [str(kept)]
    lines = [line for file in files for line in read(file)]
    faults = [line for line in lines if isinstance(line, str)]
    if not wanted.generated and len(faults) == len(lines):
        _check(faults, len(lines))  # before a model is loaded
    return lines


def prepared(
    run: Training, config: Config, wanted: Wanted, lines: Sequence[Demonstration | str]
) -> tuple[list[Episode], list[Episode]]:
    """Replays all demonstrations: returns the episodes to learn from, and a tenth that is only
    measured. The run directory keeps what it begins with.

    Raises:
        BadInput: there are none, they cannot all be replayed, or they are not those of before.
    """
    least = -np.inf if wanted.min_reward is None else wanted.min_reward
    tasks = [
        random_keys.demonstrated_task(config.run.seed, number, run.source.size)
        for number in range(wanted.generated)
    ]
    lines = [*lines, *demonstrated(run.source.create, run.models.team.profiles, tasks)]
    demonstrations = [
        d for d in lines if isinstance(d, Demonstration) and (d.reward is None or d.reward >= least)
    ]
    tried = replay(demonstrations, make_rollout(run.playing, run.source))
    _check([x for x in (*lines, *tried) if isinstance(x, str)], len(lines))
    pairs = zip(demonstrations, tried, strict=True)
    good = [(d, e) for d, e in pairs if isinstance(e, Episode) and e.reward >= least]
    if not good:
        raise BadInput(f"expected good demonstrations, got 0 of {len(lines)}; see --min_reward")
    _keep(run.checkpoints.run / _KEPT, [d.line for d, _ in good], begins=int(run.state.step) == 0)
    graded = [e.reward for d, e in good if d.number is not None or d.reward is not None]
    earned = f"mean reward {np.mean(graded):.3f}" if graded else "not graded"
    earned += f" of the {len(graded)} that are graded" if 0 < len(graded) < len(good) else ""
    order = random_keys.generator(config.run.seed, Stream.HELD_OUT).permutation(len(good))
    algo = config.algo
    held_out = set(order[: min(len(good) // _OF_HELD_OUT, algo.episodes)].tolist())
    run.reporter.event(
        f"{len(good)} of {len(lines)} demonstrations, {earned}, {len(held_out)} held out; a step "
        f"learns from {algo.episodes} in {algo.epochs} x {algo.minibatches} optimiser steps "
        "(--algo.epochs, --algo.minibatches)"
    )
    learned = [episode for i, (_, episode) in enumerate(good) if i not in held_out]
    return learned, [good[i][1] for i in sorted(held_out)]


def _check(faults: Sequence[str], of: int) -> None:
    """Shows each fault on a line, and raises ``BadInput`` if there are any; where all
    demonstrations have one, for the first alone."""
    if faults and len(faults) == of:
        raise BadInput(f"{faults[0]}; none of {of} demonstrations can be replayed")
    for fault in faults[:_MOST]:
        print(f"marft_jax: {one_line(fault, 500)}", file=sys.stderr)
    if faults:
        more = f" (the first {_MOST} above)" if len(faults) > _MOST else ""
        raise BadInput(
            f"{len(faults)} of {of} demonstrations cannot be replayed{more}; correct them, or "
            "leave them out"
        )


def _keep(file: Path, lines: Sequence[str], begins: bool) -> None:
    """Writes the demonstrations of a run that begins; those of one that goes on must be equal."""
    if begins and processes.is_lead():
        jsonlines.write(file, lines)
    text = "".join(f"{line}\n" for line in lines).encode()
    if not begins and not (file.is_file() and file.read_bytes() == text):
        raise BadInput(
            f"{file}: this run began with other demonstrations; leave --data and --demonstrations "
            "out to go on, or choose another --out"
        )


def batch_of(
    episodes: Sequence[Episode], credit: Credit, size: int, seed: tuple[int, int]
) -> Collected:
    """Takes the next demonstrations; each pass over all of them is shuffled anew.

    Args:
        seed: of the run, and how many steps came before.
    """
    first, count = seed[1] * size, len(episodes)
    order = [
        random_keys.generator(seed[0], Stream.DEMONSTRATIONS, number).permutation(count)
        for number in range(first // count, (first + size - 1) // count + 1)
    ]
    chosen = [episodes[i] for i in np.concatenate(order)[first % count :][:size]]
    rewards = [credit.pay(episode) for episode in chosen]
    return Collected(chosen, rewards, chosen, rewards, 0, 0, 0.0)
