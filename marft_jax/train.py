"""Fine-tunes a team: ``python -m marft_jax.train [--config FILE ...] [--section.key value ...]``.

Without arguments it runs the quickstart: a planner and a solver on the built-in model learn to add.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import NoReturn

import jax
import numpy as np
from rich.console import Console

from marft_jax import batch as batch_lib
from marft_jax import cli, distributed, jsonlines, memory, transcripts
from marft_jax import config as config_lib
from marft_jax.algorithms import find_algorithm, settle
from marft_jax.algorithms.credit import make_credit
from marft_jax.algorithms.step_rewards import find_step_reward
from marft_jax.benchmarks import Plan, plans
from marft_jax.collect import collect
from marft_jax.curriculum import Curriculum
from marft_jax.durable import explained
from marft_jax.envs import base as envs
from marft_jax.guards import Guard, by_agent
from marft_jax.interop.initial import initial_state
from marft_jax.learner import Learner
from marft_jax.lock import Lock
from marft_jax.metrics import Reporter
from marft_jax.rehearsal import rehearse
from marft_jax.safety import Schedule, best_metric, open_checkpoints, resume, roll_back, watch
from marft_jax.scores import score
from marft_jax.session import Session, make_rollout, open_session, open_source, play_held_out
from marft_jax.summary import Clock, Compilations, metrics_of, turn_numbers
from marft_jax.team.files import Blueprint, dump_team, load_team
from marft_jax.threads import DaemonThreads

EXIT_STOPPED = 75
_DRAWS_PER_ROLLBACK = 1 << 20  # tasks and keys after a rollback are those of steps never reached
_SAMPLE_SHIFT = 24  # sampling keys of an evaluation's further samples: no step comes that far


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Leaves with 0: done; 1: could not go on; 2: bad input; 75: stopped by a signal, saved."""
    with cli.boundary():
        config = cli.parse_training(sys.argv[1:] if argv is None else argv)
        try:
            code = train(config)
        except jax.errors.JaxRuntimeError as error:
            if jax.process_count() == 1:
                raise
            distributed.leave(error)
    sys.exit(code)


def train(config: config_lib.Config) -> int:
    """Trains to the last step, from the newest checkpoint of the run directory if there is one.

    Returns:
        The exit code: 0, or 75 when a signal stopped the run after a save.

    Raises:
        BadInput: settings, data, model, team or a saved run that do not fit.
        RunFailed: the run directory cannot be written, or training collapsed again and again.
    """
    config = settle(config)
    algorithm = find_algorithm(config.algo.name)
    blueprint = load_team(config.team.file)
    check_learns(config, blueprint)
    distributed.start(config.mesh)
    with explained(Path(config.run.dir)), contextlib.ExitStack() as stack:
        run = stack.enter_context(own_directory(config))
        lock = stack.enter_context(Lock(run))
        source = open_source(stack, config, "train")
        held_out = open_held_out(stack, config) if config.eval.every else []
        threads = DaemonThreads()
        session = open_session(config, blueprint)
        team, engine = session.team, session.engine
        credit = make_credit(config.algo, team)
        learner = Learner(config, session.base, team, algorithm, session.mesh)
        guard = Guard(config.guard, team.names, run / "transcripts" / "guard.jsonl")
        checkpoints = stack.enter_context(open_checkpoints(config, session))
        begin = functools.partial(initial_state, config, team)
        state, news = resume(checkpoints, guard, learner.init(), begin)
        step, steps = int(state.step), config.run.steps
        write_settings(run, config, blueprint)
        console = Console(highlight=False, quiet=not distributed.is_lead())
        reporter = stack.enter_context(
            Reporter(run, steps, config.run.tensorboard, step + 1, console)
        )
        for line in [greeting(config, session, step), *news]:
            reporter.event(line)
        curriculum = Curriculum(source, config)
        stopped = stack.enter_context(stopped_by_signal())
        schedule, clock, compilations = Schedule(config.run), Clock(), Compilations()
        clock.seconds["checkpoint_s"] = 0.0

        while step < steps:
            draw = step + guard.rollbacks * _DRAWS_PER_ROLLBACK
            engine.load(state.adapters)
            level = curriculum.level(state.progress)
            rollout = make_rollout(session, curriculum.source(level), threads)
            with clock("rollout_s"):
                collected = collect(rollout, credit, config, draw)
            clock.seconds["reward_s"] = collected.waited_s
            engine.rest()
            memory.give_back_freed()  # before the update, which takes most
            done = step + 1
            with clock("update_s"):
                least = batch_lib.Sizes(*np.asarray(state.sizes).tolist())
                coming = []
                if least == batch_lib.NO_SIZES:  # the first step of a run
                    coming = rehearse(session, source, threads, collected.played, draw)
                    least = learner.room_for(coming)
                seed = config.run.seed, draw
                batch = learner.pack(collected.episodes, collected.rewards, seed=seed, least=least)
                state, prepared, learned = learner.learn(state, batch, step)
                learner.compile_ahead(state, coming, batch.sizes)  # while the devices update
                engine.compile_ahead()
                lock.check()
                checkpoints.check()
                if is_due(config.run.transcripts_every, done, steps):  # while the devices update
                    numbers = turn_numbers(collected, batch, prepared, algorithm.level)
                    file = run / "transcripts" / f"{done}.jsonl"
                    transcripts.write(file, collected.episodes, team.tokenizer.decode, numbers)
                jax.block_until_ready((state, learned))
            memory.drop_programs_when_crowded()
            memory.give_back_freed()
            nonfinite = by_agent(learned.pop("nonfinite"), team)
            metrics = metrics_of(collected, learned, team, clock, config.algo)
            metrics |= compilations.metrics()
            metrics |= {"tokens/reused": float(engine.reused), "tokens/joined": float(batch.joined)}
            metrics |= {"curriculum/level": level} if config.env.curriculum is not None else {}
            progress = curriculum.after(state.progress, metrics["reward/mean"])
            state = state._replace(progress=progress)
            if held_out and is_due(config.eval.every, done, steps):
                engine.load(state.adapters)
                metrics |= evaluation(session, held_out, threads, done)
            verdict = watch(guard, done, collected.played, metrics, nonfinite)
            reporter.log(done, metrics | {"guard/lr_scale": float(state.lr_scale)})
            best = best_metric(config.run.best_metric, metrics, done)
            stop = distributed.any_process(stopped())
            clock = Clock()  # the next line tells how long this save kept the next step waiting
            with clock("checkpoint_s"):
                if verdict is not None:
                    fresh = learner.init()
                    state = roll_back(checkpoints, guard, done, verdict, fresh, begin, config.guard)
                    reporter.rewind(int(state.step) + 1)
                elif schedule.is_due(done) or stop:
                    checkpoints.save(done, state, guard.memory, best, guard.good)
            step = int(state.step)
            if stop:
                reporter.event(f"stopped after step {step}; start again to continue")
                return EXIT_STOPPED
        reporter.event(f"done: {steps} steps in {run}")
    return 0


@contextlib.contextmanager
def own_directory(config: config_lib.Config) -> Iterator[Path]:
    """The run directory; a passing one for processes beside the first, who reads and writes
    nothing of the run but its checkpoints."""
    if distributed.is_lead():
        yield Path(config.run.dir)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            yield Path(scratch)


def is_due(every: int, done: int, steps: int) -> bool:
    """Every so many steps, after the first and after the last; never if ``every`` is 0."""
    return every > 0 and (done % every == 0 or done in (1, steps))


def open_held_out(
    stack: contextlib.ExitStack, config: config_lib.Config
) -> list[tuple[Plan, envs.EnvSource]]:
    """What evaluations play: the benchmarks of the settings, or else the held-out tasks."""
    limit = config.eval.episodes
    wanted = plans(config.eval.benchmarks, config, config.eval.data, 1, limit)
    return [(plan, open_source(stack, plan.config, "eval")) for plan in wanted]


def evaluation(
    session: Session,
    held_out: Sequence[tuple[Plan, envs.EnvSource]],
    threads: Executor,
    step: int,
) -> dict[str, float]:
    """The team's accuracy, and pass@k where tasks are played several times, as metrics."""
    decode = session.team.tokenizer.decode
    metrics: dict[str, float] = {}
    for plan, source in held_out:
        playing = session._replace(config=plan.config)
        keys = [step + (sample << _SAMPLE_SHIFT) for sample in range(plan.samples)]
        rounds = [play_held_out(playing, source, threads, key, plan.tasks) for key in keys]
        records = [transcripts.record(episode, decode) for round in rounds for episode in round]
        metrics |= score(records).metrics(plan.name)
    return metrics


def check_learns(config: config_lib.Config, blueprint: Blueprint) -> None:
    """Raises ``BadInput`` where a profile's step reward is none, or its samples teach nothing."""
    for profile in blueprint.agents:
        if profile.reward is not None:
            find_step_reward(profile.reward)
        if profile.trainable and profile.sampling(config.team).temperature == 0:
            raise config_lib.BadInput(
                f"agent {profile.name!r}: expected a temperature above 0 in training, got 0: "
                "greedy samples teach nothing; raise --team.temperature, or its own"
            )


def write_settings(run: Path, config: config_lib.Config, blueprint: Blueprint) -> None:
    """``config.yaml`` and ``team.yaml``: the run directory explains itself."""
    own = config_lib.replaced(config, "team.file", "team.yaml")  # beside it
    jsonlines.write(run / "team.yaml", [dump_team(blueprint)])
    jsonlines.write(run / "config.yaml", [config_lib.dump(own)])


def greeting(config: config_lib.Config, session: Session, start: int) -> str:
    """One line: what is about to happen."""
    shape = "x".join(str(size) for size in session.mesh.shape.values())
    where = f"{session.mesh.devices.flat[0].device_kind} mesh {shape}"
    who = f"{', '.join(session.team.names)} ({session.workflow})"
    what = f"{who} on {session.base.source}, {config.env.name}"
    begin = f"continuing after step {start}" if start else "from the beginning"
    return f"{config.algo.name}: {what}; {where}; {config.run.dir}, {begin}"


@contextlib.contextmanager
def stopped_by_signal() -> Iterator[Callable[[], bool]]:
    """Tells whether SIGTERM or SIGINT came; a second one ends the process at once."""
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)

    old = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
