"""Measuring a training step: its numbers, transcripts and evaluations, and the guard's verdict."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from marft_jax.formats import jsonlines
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.batch import Batch
from marft_jax.learning.estimates import Estimates
from marft_jax.learning.state import TrainState
from marft_jax.parallel import compilation
from marft_jax.rollout.collect import Collected
from marft_jax.run.guard import Verdict, by_agent
from marft_jax.run.metrics import Clock, check_best_metric, metrics_of
from marft_jax.run.training import Training
from marft_jax.run.transcripts import record, turn_numbers
from marft_jax.sampling.protocol import version_of
from marft_jax.team.prompts import Team
from marft_jax.types import MAIN

LOGGER = logging.getLogger("marft_jax")


def transcribe(run: Training, done: int, collected: Collected, estimates: Estimates) -> None:
    """Writes the transcripts of a step where they are due; the devices may still update."""
    config, decoders = run.config, run.models.team.decoders
    if not _is_due(run, config.run.transcripts_every, done):
        return
    level = find_algorithm(config.algo.name).level
    numbers = turn_numbers(collected, estimates, level, decoders)
    rows = [record(e, decoders, x) for e, x in zip(collected.episodes, numbers, strict=True)]
    for call in (call for row in rows for turn in row["turns"] for call in turn.get("calls", ())):
        del call["seconds"]  # a run that continues would differ
    jsonlines.write(run.folder / "transcripts" / f"{done}.jsonl", map(jsonlines.dumps, rows))


_IF_SO = (
    "if this goes on, take easier or harder tasks, a supervised start (marft_jax.imitate), a "
    "higher --team.temperature or more samples of a task (said once)"
)


def warn_without_gradient(
    done: int, collected: Collected, estimates: Estimates, team: Team
) -> bool:
    """Warns of a step in which no adapter moves, as no agent that learns acted or all advantages
    are 0; returns True then."""
    acted = {turn.agent for episode in collected.episodes for turn in episode.turns}
    if not any(team.profiles[agent].learns for agent in acted):
        who = ", ".join(sorted(team.names[agent] for agent in acted))
        what = f"no agent that learns acted, only {who}, so no adapter moves"
        LOGGER.warning("step %d: %s; see --team.workflow (said once)", done, what)
        return True
    if np.any(estimates.advantages_EJ):
        return False
    earned, groups = zip(*((e.reward, e.group) for e in collected.episodes), strict=True)
    which = f"in each of {len({*groups})} groups all samples that are compared earned the same"
    if len({*earned}) == 1:
        which = f"all {len(earned)} episodes earned {earned[0]:g}"
    LOGGER.warning("step %d: no gradient: %s, so no adapter moves; %s", done, which, _IF_SO)
    return True


def measure(
    run: Training,
    done: int,
    collected: Collected,
    batch: Batch,
    learned: Mapping[str, Any],
    clock: Clock,
) -> dict[str, float]:
    """Returns the numbers of the step after which ``done`` steps are done."""
    seconds = {**clock.seconds, **collected.seconds, "step_s": clock.total_s}
    metrics = metrics_of(done, collected, batch, learned, seconds, run.models.team, run.config)
    compiled = run.compilations.metrics()
    if compiled["device/compiled"]:
        compilation.give_back_freed()
    return metrics | compiled


def report(
    run: Training,
    state: TrainState,
    collected: Collected,
    metrics: Mapping[str, float],
    learned: Mapping[str, Any],
) -> tuple[dict[str, float], Verdict | None]:
    """Reports the numbers of a step and, where one is due, of an evaluation.

    Returns:
        All numbers, and a verdict where the run must go back.
    """
    done, reported = int(state.step), dict(metrics)
    if _is_due(run, run.config.eval.every, done):
        reported |= run.pipeline.run_exclusive(lambda: _evaluate(run, state))
    nonfinite = by_agent(learned["nonfinite"], run.models.team)
    numbers, verdict = run.guard.look(done, collected.played, reported, nonfinite)
    settings, scale = run.models.learning, float(state.lr_scale)
    factor = scale * float(settings.rate_factor(done - 1))
    names = {base: "lr" if base == MAIN else f"lr/{base}" for base in settings.lr}
    rates = {names[base]: rate * factor for base, rate in settings.lr.items()}
    reported |= numbers | {"guard/lr_scale": scale} | rates
    check_best_metric(run.config.run.best_metric, {*reported, *run.evaluation.metric_names})
    run.reporter.log(done, reported)
    return reported, verdict


def _evaluate(run: Training, state: TrainState) -> dict[str, float]:
    run.playing.sampler.load(state.adapters, version_of(state.adapters))
    return run.evaluation.evaluate(run.playing, int(state.step), run.reporter)


def _is_due(run: Training, every: int, done: int) -> bool:
    """True every so many steps, after the first and the last; never if ``every`` is 0."""
    return every > 0 and (done % every == 0 or done in (1, run.config.run.steps))
