"""Fine-tunes a team: ``python -m marft_jax.train [--config FILE ...] [--section.key value ...]``.

Without arguments it runs the quickstart: a planner and a solver on the built-in model learn to add.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import NoReturn

import jax
from rich.console import Console

from marft_jax import cli
from marft_jax import config as config_lib
from marft_jax.envs import base as envs
from marft_jax.evaluation.benchmarks import Plan, plans
from marft_jax.evaluation.scores import score
from marft_jax.formats import jsonlines
from marft_jax.interop.initial import initial_state
from marft_jax.learning.algorithms import find_algorithm, settle
from marft_jax.learning.credit import make_credit
from marft_jax.learning.learner import Learner
from marft_jax.learning.step_rewards import find_step_reward
from marft_jax.parallel import compilation, processes
from marft_jax.rollout.collect import collect
from marft_jax.rollout.curriculum import Curriculum
from marft_jax.rollout.rollout import Stopped
from marft_jax.rollout.threads import DaemonThreads
from marft_jax.run import transcripts
from marft_jax.run.checkpoints import Checkpoints
from marft_jax.run.files import explained
from marft_jax.run.guard import Guard, by_agent
from marft_jax.run.lock import Lock
from marft_jax.run.metrics import (
    Clock,
    Compilations,
    CutOff,
    metric_names,
    metrics_of,
    turn_numbers,
)
from marft_jax.run.reporters import Reporter
from marft_jax.run.safety import (
    Schedule,
    check_best_metric,
    open_checkpoints,
    resume,
    roll_back,
    watch,
)
from marft_jax.run.setup import Session, make_rollout, open_session, open_source, play_held_out
from marft_jax.run.signals import EXIT_STOPPED, Stop
from marft_jax.team.team_files import Blueprint, dump_team, load_team

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
            processes.leave(error)
    sys.exit(code)


def train(config: config_lib.Config) -> int:
    """Trains to the last step, from the newest checkpoint of the run directory if there is one.

    Returns:
        The exit code: 0, or 75 when a signal stopped the run after a save.

    Raises:
        BadInput: settings, data, model, team or a saved run that do not fit.
        RunFailed: the run directory cannot be written, or training collapsed again and again.
        EpisodesFailed: too many episodes failed. Whatever is raised, the last finished step is
            saved.
    """
    config = settle(config)
    algorithm = find_algorithm(config.algo.name)
    blueprint = load_team(config.team.file)
    check_learns(config, blueprint)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Stop("stopped before a step was finished; start again"))
        processes.start(config.mesh)
        stack.enter_context(explained(Path(config.run.dir)))
        run = stack.enter_context(own_directory(config))
        lock = stack.enter_context(Lock(run))
        source = open_source(stack, config, "train")
        held_out = open_held_out(stack, config) if config.eval.every else []
        agents, evaluations = [p.name for p in blueprint.agents], [plan for plan, _ in held_out]
        check_best_metric(config.run.best_metric, metric_names(config, agents, evaluations))
        threads = DaemonThreads()
        session = open_session(config, blueprint)._replace(stop=stop)
        team, engine = session.team, session.engine
        credit = make_credit(config.algo, team)
        learner = Learner(config, session.base, team, algorithm, session.mesh)
        guard = Guard(config.guard, team.names, run / "transcripts" / "guard.jsonl")
        checkpoints = stack.enter_context(open_checkpoints(config, session))
        begin = functools.partial(initial_state, config, team)
        state, news = resume(checkpoints, guard, learner.init(), begin)
        step, steps = int(state.step), config.run.steps
        write_settings(run, config, blueprint)
        console = Console(highlight=False, quiet=not processes.is_lead())
        reporter = stack.enter_context(
            Reporter(run, steps, config.run.tensorboard, step + 1, console)
        )
        for line in [greeting(config, session, step), *news]:
            reporter.event(line)
        if step < steps:
            reporter.event(f"compiling ... (step {step + 1} takes longer than those after it)")
        curriculum = Curriculum(source, config)
        schedule, clock, compilations = Schedule(config.run), Clock(), Compilations()
        clock.seconds["checkpoint_s"] = 0.0
        cut_off = CutOff(team)
        stop.plan, stop.save = plan_of(step), checkpoints.flush
        stack.enter_context(stopped_in_order(checkpoints, reporter))
        if jax.process_count() > 1:  # the others come to a stop when their episodes are played
            stop.grace_s = config.mesh.wait_seconds

        while step < steps:
            done, stop.plan = step + 1, plan_of(step)
            draw = step + guard.rollbacks * _DRAWS_PER_ROLLBACK
            reporter.doing("playing")
            engine.load(state.adapters)
            level = curriculum.level(state.progress)
            rollout = make_rollout(session, curriculum.source(level), threads)
            with clock("rollout_s"):
                collected = collect(rollout, credit, config, draw)
            clock.seconds["reward_s"] = collected.waited_s
            reporter.doing("learning")
            engine.rest()
            compilation.give_back_freed()  # before the update, which takes most
            with clock("update_s"):
                seed = config.run.seed, draw
                batch = learner.pack(collected.episodes, collected.rewards, seed=seed)
                state, estimates, learned = learner.learn(state, batch, step)
                lock.check()
                checkpoints.check()
                if is_due(config.run.transcripts_every, done, steps):  # while the devices update
                    numbers = turn_numbers(collected, batch, estimates, algorithm.level)
                    file = run / "transcripts" / f"{done}.jsonl"
                    transcripts.write(file, collected.episodes, team.tokenizer.decode, numbers)
                jax.block_until_ready((state, learned))
            compilation.drop_programs_when_crowded()
            compilation.give_back_freed()
            nonfinite = by_agent(learned.pop("nonfinite"), team)
            metrics = metrics_of(collected, learned, team, clock, config.algo)
            metrics |= compilations.metrics()
            metrics |= {"tokens/reused": float(engine.reused), "tokens/joined": float(batch.joined)}
            metrics |= {"curriculum/level": level} if config.env.curriculum is not None else {}
            progress = curriculum.after(state.progress, metrics["reward/mean"])
            state = state._replace(progress=progress)
            if held_out and is_due(config.eval.every, done, steps):
                engine.load(state.adapters)
                metrics |= evaluation(session, held_out, threads, done, reporter)
            verdict = watch(guard, done, collected.played, metrics, nonfinite)
            cut_off.look(done, collected.played, metrics)
            reporter.log(done, metrics | {"guard/lr_scale": float(state.lr_scale)})
            best = metrics.get(config.run.best_metric or "")
            clock = Clock()  # the next line tells how long this save kept the next step waiting
            with clock("checkpoint_s"):
                if verdict is not None:
                    fresh, settings = learner.init(), config.guard
                    state = roll_back(checkpoints, guard, done, verdict, fresh, begin, settings)
                    reporter.rewind(int(state.step) + 1)
                else:
                    checkpoints.hold(done, state, guard.memory, best, guard.good)
                    if schedule.is_due(done):
                        checkpoints.save_held()
            step = int(state.step)
            if processes.any_process(stop()):
                raise Stopped
        reporter.event(f"done: {steps} steps in {run}")
        return 0
    return EXIT_STOPPED


@contextlib.contextmanager
def stopped_in_order(checkpoints: Checkpoints, reporter: Reporter) -> Iterator[None]:
    """Where a signal stops what happens inside, the last finished step is saved."""
    try:
        yield
    except Stopped:
        checkpoints.flush()
        reporter.event(f"stopped after step {reporter.step}; start again to continue")


def plan_of(step: int) -> str:
    """What a signal leads to in the step after this one."""
    saved = f"saving step {step}, " if step else "nothing is finished yet, "
    return f"stopping: {saved}what is begun of step {step + 1} is thrown away"


@contextlib.contextmanager
def own_directory(config: config_lib.Config) -> Iterator[Path]:
    """The run directory; a passing one for processes beside the first, who reads and writes
    nothing of the run but its checkpoints."""
    if processes.is_lead():
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
    reporter: Reporter,
) -> dict[str, float]:
    """The team's accuracy, and pass@k where tasks are played several times, as metrics."""
    decode = session.team.tokenizer.decode
    metrics: dict[str, float] = {}
    for plan, source in held_out:
        playing = session._replace(config=plan.config)
        keys = [step + (sample << _SAMPLE_SHIFT) for sample in range(plan.samples)]
        total = plan.tasks if source.size is None else min(plan.tasks, source.size)
        doing = functools.partial(reporter.doing, f"evaluating {plan.name}", total=total)
        reporter.doing(f"evaluating {plan.name}")
        rounds = [
            play_held_out(playing, source, threads, key, plan.tasks, report=doing) for key in keys
        ]
        records = [transcripts.record(episode, decode) for round in rounds for episode in round]
        found = score(records)
        reporter.event(f"step {step}: {plan.name}: {found}")
        metrics |= found.metrics(plan.name)
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


if __name__ == "__main__":
    main()
