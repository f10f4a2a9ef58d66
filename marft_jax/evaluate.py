"""Reports how well a team does on benchmarks, or on the held-out tasks of its own environment.

    python -m marft_jax.evaluate --run runs/quickstart
    python -m marft_jax.evaluate --run DIR --benchmark math500 aime2024:16@0.6 gsm8k humaneval --data FOLDER
    python -m marft_jax.evaluate --run DIR --benchmark gsm8k --compare
    python -m marft_jax.evaluate --base tiny --env.name arithmetic --samples 4 --eval.temperature 1

``--run`` takes a trained team with its settings, ``--base`` a model without adapters. Further flags
are those of training: ``--eval.temperature``, ``--env.name``, ``--team.max_new_tokens``, ... Every
response is saved as it comes: started again, the same command goes on where it ended.
"""  # noqa: E501

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Executor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from rich.console import Console

from marft_jax import cli
from marft_jax import config as config_lib
from marft_jax.envs import base as envs
from marft_jax.envs.threads import DaemonThreads
from marft_jax.errors import BadInput, Stopped, reason
from marft_jax.evaluation import tables
from marft_jax.evaluation.benchmarks import Plan, plans
from marft_jax.evaluation.scores import Record, Scores, score
from marft_jax.formats import foreign, jsonlines
from marft_jax.models.lora import Adapters
from marft_jax.run import transcripts
from marft_jax.run.progress import Progress
from marft_jax.run.setup import Session, open_session, open_source, play_held_out, restore_state
from marft_jax.run.signals import EXIT_STOPPED, Stop
from marft_jax.team.profiles import last_answering
from marft_jax.team.team_files import load_team


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Leaves with 0: done; 1: nothing can be written; 2: bad configuration or input; 75: stopped by
    a signal."""
    parser = cli.run_parser("marft_jax.evaluate", __doc__)
    parser.add_argument(
        "--benchmark", nargs="+", default=[], metavar="NAME[:SAMPLES][@TEMPERATURE]",
        help="benchmarks by name, or files; without it what training evaluates on",
    )  # fmt: skip
    parser.add_argument("--data", metavar="FOLDER", help="where their files are; else the hub")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="answers per task")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N tasks of each only")
    parser.add_argument(
        "--compare", action="store_true",
        help="also the base model and a single agent, in one table",
    )  # fmt: skip
    parser.add_argument("--out", metavar="FOLDER", help="where all responses and figures go")
    with cli.boundary():
        own, rest = parser.parse_known_args(argv)
        rest += ["--eval.benchmarks", *own.benchmark] if own.benchmark else []
        rest += ["--eval.data", own.data] if own.data is not None else []
        config = cli.parse_run(own.run, own.base, rest)
        how = dict(samples=own.samples, limit=own.limit, compare=own.compare, out=own.out)
        try:
            evaluate_team(own.run, config, step=own.step, **how)
        except Stopped:
            sys.exit(EXIT_STOPPED)
    sys.exit(0)


class Player(NamedTuple):
    """Who plays: the whole team or its last answering agent ``alone``, trained or not."""

    name: str
    alone: bool
    trained: bool


TEAM = Player("team", alone=False, trained=True)
UNTRAINED = (Player("base model", True, False), Player("team without adapters", False, False))
TRAINED = (Player("single agent", True, True), TEAM)


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
        compare: also play the base model and a single agent, each the team's last answering one.
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
    folder = _writable_folder(out, run, config.model.base)
    players = (*UNTRAINED, *TRAINED) if run else UNTRAINED
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Stop("stopped before an answer was saved; start again"))
        games = [(plan, open_source(stack, plan.config, "eval")) for plan in wanted]
        at_once = max(plan.count(source.size) for plan, source in games)
        session = open_session(config, load_team(config.team.file), at_once)._replace(stop=stop)
        state = restore_state(session, run, step)
        at_step, adapters = int(state.step), state.adapters
        del state  # optimisers and critic make room
        stop.plan = "stopping: saved answers stay, the same command goes on from there"
        stop.save = lambda: None  # it is on the disk
        who = f"{run}, step {at_step}" if run else f"{config.model.base} without adapters"
        console.print(f"{' -> '.join(session.team.names)}: {who}")
        players = players if compare else players[-1:]
        shown_step = at_step if run else None
        scores = _play_all(session, adapters, games, players, console, folder, shown_step)
    _write_summary(folder / "summary.json", scores)
    console.print(tables.benchmarks(scores, console.width), tables.agents(scores, console.width))
    return scores


def _play_all(
    session: Session,
    adapters: Adapters,
    games: Sequence[tuple[Plan, envs.EnvSource]],
    players: Sequence[Player],
    console: Console,
    folder: Path,
    step: int | None,
) -> Scores:
    """Plays every benchmark with every player, and prints each score as it is known."""
    scores: Scores = {}
    threads = DaemonThreads()
    zeros = jax.tree.map(jnp.zeros_like, adapters)
    for (plan, source), player in product(games, players):
        session.engine.load(adapters if player.trained else zeros)
        playing = _as_player(session, player)._replace(config=plan.config)
        file = folder / _file_name(plan, step, player)
        play = _Play(playing, source, threads, plan, file)
        with Progress(f"playing {plan.name}", console) as progress:
            found = scores[plan.name, player.name] = score(play.all(console.print, progress))
        who = f", {player.name}" if len(players) > 1 else ""
        console.print(f"{plan.name}{who}: {found}\nresponses: {file}")
    return scores


def _writable_folder(out: str | Path | None, run: str | Path | None, base: str) -> Path:
    """Where responses go, made and tried before anything is loaded and played."""
    default = Path(run) / "evaluations" if run else Path("runs/evaluations") / Path(base).stem
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


class _Play:
    """A benchmark with one player; what was already answered is not asked again."""

    def __init__(
        self, session: Session, source: envs.EnvSource, threads: Executor, plan: Plan, file: Path
    ) -> None:
        self._session, self._source, self._threads = session, source, threads
        self._plan, self._file = plan, file
        self._tasks = plan.count(source.size)
        self._block = max(16, 4 * session.engine.shape.slots)
        self._key = _key(session, plan, source.size)

    def all(self, log: Callable[[str], None], progress: Progress) -> list[Record]:
        """Every record of the benchmark, the missing ones played now; ``log`` prints a line."""
        found = self._saved()
        total = self._plan.samples * self._tasks
        kept = f", {len(found)} of {total} were already answered" if found else ""
        log(f"{self._plan.name}: {self._tasks} tasks{kept}")

        def report(over: int) -> None:
            mean = sum(record["reward"] for record in found.values()) / max(len(found), 1)
            so_far = f", reward {mean:.4f} so far" if found else "" if over else ", compiling ..."
            progress(len(found) + over, total, so_far)

        for sample, start, stop in self._missing(found):
            for record in self._played(sample, start, stop, report):
                found[record["sample"], record["index"]] = record
        return [found[place] for place in sorted(found)]

    def _saved(self) -> dict[tuple[int, int], Record]:
        """Records of the same settings; others, and a half-written line, leave the file."""
        found: dict[tuple[int, int], Record] = {}

        def keep(record: Record) -> bool:
            place = record["sample"], record["index"]
            fits = record["index"] < self._tasks and record["sample"] < self._plan.samples
            if record["key"] != self._key or not fits or place in found:
                return False
            found[place] = record
            return True

        jsonlines.keep(self._file, keep)
        return found

    def _missing(self, found: Container[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        """Stretches of tasks to play: sample, first and last plus one."""
        starts = range(0, self._tasks, self._block)
        for sample, start in product(range(self._plan.samples), starts):
            block = range(start, min(start + self._block, self._tasks))
            if missing := [index for index in block if (sample, index) not in found]:
                yield sample, missing[0], missing[-1] + 1

    def _played(
        self, sample: int, start: int, stop: int, report: Callable[[int], None]
    ) -> list[Record]:
        """Plays a stretch and saves it."""
        played = play_held_out(
            self._session, self._source, self._threads, sample, stop, start, report
        )
        decode = self._session.team.tokenizer.decode
        where = {"benchmark": self._plan.name, "sample": sample, "key": self._key}
        lines = [jsonlines.dumps(where | row) for row in transcripts.records(played, decode)]
        jsonlines.append(self._file, lines)
        return [json.loads(line) for line in lines]


def _as_player(session: Session, player: Player) -> Session:
    """The session of the whole team, or of its last answering agent alone."""
    if not player.alone:
        return session
    opener = last_answering(session.team.profiles)
    return session._replace(workflow="solo", team=session.team._replace(opener=opener, messages=()))


def _key(session: Session, plan: Plan, size: int | None) -> str:
    """A digest of all that decides the responses: another key is of other settings."""
    config, team = plan.config, session.team
    parts = [
        session.base.source, session.workflow, team.profiles, team.sampling, team.messages,
        team.shared, team.anonymous, team.rounds, team.max_steps, team.context, config.run.seed,
        config.eval.temperature, dataclasses.asdict(config.env), size,
        [float(jnp.sum(jnp.abs(leaf))) for leaf in jax.tree.leaves(session.engine.adapters)],
    ]  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _file_name(plan: Plan, step: int | None, player: Player) -> str:
    name = plan.name.replace(":", ".").replace("/", "-")
    which = "" if player == TEAM else "-" + player.name.replace(" ", "_")
    return f"{name}{'' if step is None else f'-{step}'}{which}.jsonl"


def _write_summary(path: Path, scores: Scores) -> None:
    """``summary.json``: all figures, those of earlier evaluations in the folder too."""
    rows: dict[str, Any] = {}
    with contextlib.suppress(BadInput):
        rows = foreign.read_settings(path)
    for (name, player), found in scores.items():
        rows[f"{name}, {player}"] = found.metrics(name) | {
            "tasks": found.tasks,
            "samples": found.samples,
            "interval": [found.accuracy.low, found.accuracy.high],
            "failed": found.failed,
            "agents": {agent: own._asdict() for agent, own in found.agents.items()},
        }
    jsonlines.write(path, [jsonlines.dumps(rows)])


if __name__ == "__main__":
    main()
