"""Evaluation of a team, beside its base and one of its agents; every response is saved."""

from __future__ import annotations

import contextlib
import os
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console

from marft_jax import cli
from marft_jax.envs.base import open_source
from marft_jax.errors import BadInput, printable, reason
from marft_jax.evaluation import tables
from marft_jax.evaluation.benchmarks import BenchmarkPlan, plans
from marft_jax.evaluation.scores import Record, Scores, score
from marft_jax.formats import foreign, jsonlines
from marft_jax.run.directory import numbered_folder
from marft_jax.run.opening import open_team
from marft_jax.run.reporters import Progress
from marft_jax.run.saved_answers import Answers, key_of
from marft_jax.run.signals import Stop
from marft_jax.run.storage import RunStorage, storage_of
from marft_jax.sampling.protocol import version_of
from marft_jax.settings import config as config_lib
from marft_jax.settings.setting import check_local
from marft_jax.team.profiles import last_answering
from marft_jax.team.prompts import Team
from marft_jax.team.workflows import NEED_ENV


class Variant(NamedTuple):
    """Variant of a team: the whole one, or its last answering agent ``alone``, trained or not."""

    name: str
    alone: bool
    trained: bool


TEAM = Variant("team", alone=False, trained=True)
UNTRAINED = (Variant("base model", True, False), Variant("team without adapters", False, False))
TRAINED = (Variant("single agent", True, True), TEAM)


def evaluate_team(
    run: str | Path | None,
    config: config_lib.Config | None = None,
    *,
    step: int | str = "latest",
    samples: int = 1,
    limit: int | None = None,
    compare: bool = False,
    out: str | Path | None = None,
) -> Scores:
    """Plays benchmarks, prints and returns their figures, and saves every response.

    Args:
        run: a run directory; None for the bare base.
        config: the model, the team, how it samples, and in ``eval`` what is played; by default as
            the run has it, see ``configure_run``.
        step: the checkpoint of the run that is used: a number, ``best`` or ``latest``.
        samples: answers to each task.
        limit: the first so many tasks of each benchmark only.
        compare: also play the base model and a single agent, each the team's last answering one,
            but not in a game or a program, and the team without adapters.
        out: folder for the responses and ``summary.json``; by default ``evaluations`` in the run
            directory, or ``runs/evaluations/MODEL``.

    Raises:
        BadInput: settings, data, model or checkpoint that do not fit.
        Stopped: a signal came; what was answered is saved.
    """
    if limit is not None and limit < 1:
        raise BadInput(f"--limit: expected at least 1, got {limit}")
    config = config or cli.configure_run(run)
    wanted = plans(config.eval.benchmarks, config, config.eval.data, samples, limit)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    storage, scores = storage_of(run or ""), Scores()
    folder = writable_folder(out, storage if run else None, config.model.base)
    variants = (*UNTRAINED, *TRAINED) if run else UNTRAINED
    variants = variants if compare else variants[-1:]
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Stop("stopped before an answer was saved; start again"))
        stack.enter_context(storage.keeping("evaluations"))
        sources = [stack.enter_context(open_source(plan.config.env, "eval")) for plan in wanted]
        pairs = list(zip(wanted, sources, strict=True))
        at_once = max(plan.count(source.size) for plan, source in pairs)
        models, playing, state = stack.enter_context(open_team(config, run, step, at_once, stop))
        team, sampler = playing.team, playing.sampler
        variants = [v for v in variants if not v.alone or team.workflow not in NEED_ENV]
        at_step, adapters = int(state.step) if run else None, state.adapters
        del state  # optimisers and critic make room
        stop.expect("stopping: saved answers stay, the same command goes on from there")
        stop.protect(storage.push)
        who = f"{run}, step {at_step}" if run else f"{config.model.base} without adapters"
        console.print(printable(f"{' -> '.join(team.names)}: {who}"))
        zeros = jax.tree.map(jnp.zeros_like, adapters)
        for (plan, source), variant in product(pairs, variants):
            loaded = adapters if variant.trained else zeros
            sampler.load(loaded, version_of(loaded))
            file, members = folder / _file_name(plan, at_step, variant), _as_variant(team, variant)
            key = key_of(plan.config, models.bases, members, loaded, source.size)
            answers = Answers(playing._replace(team=members), plan, source, file, key)
            scored = score(_played(answers, plan.name, console))
            scores[plan.name, variant.name] = scored
            which = f", {variant.name}" if compare else ""
            console.print(printable(f"{plan.name}{which}: {scored}\nresponses: {file}"))
    _write_summary(folder / "summary.json", scores)
    storage.push()
    console.print(tables.benchmarks(scores), tables.agents(scores))
    console.print("what to do with them: marft_jax/README.md#when-it-goes-wrong")
    return scores


def _played(answers: Answers, name: str, console: Console) -> list[Record]:
    """Plays what is not answered yet, and shows how far it is."""
    kept = f", {len(answers.records)} of {answers.total} were already answered"
    console.print(printable(f"{name}: {answers.tasks} tasks{kept if answers.records else ''}"))
    with Progress(f"playing {name}", console) as progress:

        def report(count: int) -> None:
            rewards = [record["reward"] for record in answers.records.values()]
            so_far = f", reward {sum(rewards) / len(rewards):.4f} so far" if rewards else ""
            progress(count, answers.total, so_far or (", compiling ..." if not count else ""))

        return answers.play(report)


def writable_folder(out: str | Path | None, run: RunStorage | None, base: str) -> Path:
    """Makes the folder of the responses, and tries it before anything is loaded and played."""
    default = run.path / "evaluations" if run else Path("runs/evaluations") / Path(base).stem
    check_local("--out", out or default)
    folder = Path(out or default)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, ValueError) as error:
        raise BadInput(
            f"--out {folder}: responses cannot be written there ({reason(error)}); name a folder "
            "where they can"
        ) from error
    return folder


def _as_variant(team: Team, variant: Variant) -> Team:
    """Returns the whole team, or its last answering agent alone."""
    if not variant.alone:
        return team
    answering, none = last_answering(team.profiles), ("",) * len(team.profiles)
    return team._replace(workflow="solo", opener=answering, messages=none)


def _file_name(plan: BenchmarkPlan, step: int | None, variant: Variant) -> str:
    name = plan.name.replace(":", ".").replace("/", "-")
    which = "" if variant == TEAM else "-" + variant.name.replace(" ", "_")
    return f"{name}{'' if step is None else f'-{step}'}{which}.jsonl"


def _write_summary(path: Path, scores: Scores) -> None:
    """``summary.json``: all figures, those of earlier evaluations in the folder too."""
    rows: dict[str, Any] = {}
    try:
        rows = foreign.read_settings(path) if path.exists() else {}
    except BadInput:  # it is somebody else's, or torn
        os.replace(path, numbered_folder(path.parent, "earlier") / path.name)
    for (name, variant), scored in scores.items():
        rows[f"{name}, {variant}"] = scored.metrics(name) | {
            "tasks": scored.tasks,
            "samples": scored.samples,
            "interval": [*scored.accuracy[1:]],
            "interval of the reward": [*scored.reward[1:]],
            "failed": scored.failed,
            "agents": {name: figures._asdict() for name, figures in scored.agents.items()},
        }
    jsonlines.write(path, [jsonlines.dumps(rows)])
