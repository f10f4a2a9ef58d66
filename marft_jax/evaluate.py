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
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from rich import box
from rich.console import Console
from rich.table import Table

from marft_jax import cli
from marft_jax import config as config_lib
from marft_jax.envs import base as envs
from marft_jax.envs.threads import DaemonThreads
from marft_jax.errors import Stopped
from marft_jax.evaluation.benchmarks import Plan, plans
from marft_jax.evaluation.scores import Record, Score, score
from marft_jax.formats import jsonlines
from marft_jax.run import transcripts
from marft_jax.run.setup import Session, open_session, open_source, play_held_out
from marft_jax.run.signals import EXIT_STOPPED, Stop
from marft_jax.run.trained import initial_state, restore_team
from marft_jax.team.profiles import last_answering
from marft_jax.team.team_files import load_team

_REPORT_SECONDS = 10.0  # between two lines of progress


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
        if own.limit is not None and own.limit < 1:
            raise config_lib.BadInput(f"--limit: expected at least 1, got {own.limit}")
        rest += ["--eval.benchmarks", *own.benchmark] if own.benchmark else []
        rest += ["--eval.data", own.data] if own.data is not None else []
        config = cli.parse_run(own.run, own.base, rest)
        specs, folder = config.eval.benchmarks, config.eval.data
        wanted = plans(specs, config, folder, own.samples, own.limit)
        try:
            evaluate(own.run, config, wanted, own.compare, own.out, own.step)
        except Stopped:
            sys.exit(EXIT_STOPPED)
    sys.exit(0)


class Player(NamedTuple):
    """Who plays: the whole team or its last answering agent alone, trained or not."""

    name: str
    alone: bool
    trained: bool


TEAM = Player("team", alone=False, trained=True)
BASE_TEAM = Player("team without adapters", alone=False, trained=False)
SINGLE = Player("single agent", alone=True, trained=True)
BASE = Player("base model", alone=True, trained=False)


def evaluate(
    run: str | None,
    config: config_lib.Config,
    wanted: Sequence[Plan],
    compare: bool = False,
    out: str | None = None,
    step: str = "latest",
) -> dict[tuple[str, str], Score]:
    """Plays benchmarks, prints their figures, and saves every response.

    Args:
        run: a run directory; None for the bare base.
        config: the model, the team, and how it samples.
        wanted: what is played.
        compare: also play the base model and a single agent, each the team's last answering one.
        out: folder for the responses and ``summary.json``; by default ``evaluations`` in the run
            directory, or ``runs/evaluations/MODEL``.
        step: the checkpoint of the run that is used: a number, ``best`` or ``latest``.

    Returns:
        Benchmark and player to score.

    Raises:
        BadInput: settings, data, model or checkpoint that do not fit.
    """
    console = Console(highlight=False, soft_wrap=True, markup=False)
    folder = Path(out or (Path(run) / "evaluations" if run else _default_folder(config)))
    _check_writable(folder)
    trained = [BASE, BASE_TEAM, SINGLE, TEAM] if run else [BASE, BASE_TEAM]
    players = trained if compare else [TEAM if run else BASE_TEAM]
    scores: dict[tuple[str, str], Score] = {}
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Stop("stopped before an answer was saved; start again"))
        threads = DaemonThreads()
        sources = [open_source(stack, plan.config, "eval") for plan in wanted]
        at_once = max(_tasks(plan, source) for plan, source in zip(wanted, sources, strict=True))
        session = open_session(config, load_team(config.team.file), at_once)
        session = session._replace(stop=stop)
        taken = restore_team(session, run, initial_state, step)
        adapters = session.engine.adapters
        zeros = jax.tree.map(jnp.zeros_like, adapters)
        console.print(_who(run, taken, session))
        stop.plan = "stopping: saved answers stay, the same command goes on from there"
        stop.save = lambda: None  # it is on the disk
        for plan, source in zip(wanted, sources, strict=True):
            for player in players:
                session.engine.load(adapters if player.trained else zeros)
                playing = _as_player(session, player)._replace(config=plan.config)
                file = folder / _file_name(plan, taken if run else None, player)
                play = _Play(playing, source, threads, plan, file)
                with console.status(f"{plan.name}: compiling ...") as status:
                    records = play.all(console.print, status.update)
                scores[plan.name, player.name] = score(records)
                who = f", {player.name}" if compare else ""
                console.print(f"{plan.name}{who}: {scores[plan.name, player.name]}")
                console.print(f"responses: {file}")
    _write_summary(folder / "summary.json", scores)
    console.print(table(scores))
    console.print(agents_table(scores))
    return scores


def _check_writable(folder: Path) -> None:
    """Before anything is loaded and played."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise config_lib.BadInput(
            f"--out {folder}: responses cannot be written there ({why}); name a folder where they "
            "can"
        ) from error


def table(scores: dict[tuple[str, str], Score]) -> Table:
    """One line for each benchmark and player."""
    shown = Table("benchmark", "who", "tasks", "avg@n (95 %)", "pass@n", box=box.SIMPLE)
    for (name, player), found in scores.items():
        k = max(found.passed)
        passed = f"@{k} {found.passed[k]}" if k > 1 else ""
        shown.add_row(name, player, str(found.tasks), f"@{found.samples} {found.accuracy}", passed)
    return shown


def agents_table(scores: dict[tuple[str, str], Score]) -> Table:
    """One line for each agent of each of these."""
    shown = Table("benchmark", "who", "agent", "right", "tokens", "cut off", box=box.SIMPLE)
    for (name, player), found in scores.items():
        for agent, own in found.agents.items():
            right = "" if own.right is None else f"{own.right:.4f}"
            shown.add_row(name, player, agent, right, f"{own.tokens:.1f}", f"{own.truncated:.3f}")
    return shown


class _Play:
    """One benchmark with one player; what was already answered is not asked again."""

    def __init__(
        self, session: Session, source: envs.EnvSource, threads: Any, plan: Plan, file: Path
    ) -> None:
        self._session, self._source, self._threads = session, source, threads
        self._plan, self._file = plan, file
        self._tasks = _tasks(plan, source)
        self._block = max(16, 4 * session.engine.shape.slots)
        self._key = _key(session, plan, self._source.size)

    def all(self, say: Callable[[str], None], show: Callable[[str], None]) -> list[Record]:
        """Every record of the benchmark, the missing ones played now.

        Args:
            say: given a line to print, at most every ten seconds.
            show: given what is to be seen right now.
        """
        found = self._saved()
        name, told = self._plan.name, time.monotonic()
        kept = f", {len(found)} of {self._total} were already answered" if found else ""
        say(f"{name}: {self._tasks} tasks{kept}")

        def report(over: int) -> None:
            nonlocal told
            mean = sum(record["reward"] for record in found.values()) / max(len(found), 1)
            so_far = f", {mean:.4f} so far" if found else ""
            line = f"{name}: {len(found) + over}/{self._total} played{so_far}"
            show(line)
            if time.monotonic() - told > _REPORT_SECONDS:
                told = time.monotonic()
                say(line)

        for sample, start, stop in self._missing(found):
            for record in self._played(sample, start, stop, report):
                found[record["sample"], record["index"]] = record
        return [found[place] for place in sorted(found)]

    @property
    def _total(self) -> int:
        return self._plan.samples * self._tasks

    def _saved(self) -> dict[tuple[int, int], Record]:
        """Records of the same settings; others, and a half-written line, leave the file."""
        if not self._file.exists():
            return {}
        text = self._file.read_text(encoding="utf-8", errors="replace")
        lines = text.removesuffix("\n").split("\n")  # a task may hold other ends of lines
        found: dict[tuple[int, int], Record] = {}
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                place = record["sample"], record["index"]
                fits = record["index"] < self._tasks and record["sample"] < self._plan.samples
                if record["key"] == self._key and fits:
                    found[place] = record
        if len(found) < len(lines):
            jsonlines.write(self._file, map(jsonlines.dumps, found.values()))
        return found

    def _missing(self, found: dict[tuple[int, int], Record]) -> Iterator[tuple[int, int, int]]:
        """Stretches of tasks to play: sample, first and last plus one."""
        for sample in range(self._plan.samples):
            start = 0
            while start < self._tasks:
                stop = start
                while stop < min(start + self._block, self._tasks) and (sample, stop) not in found:
                    stop += 1
                if stop > start:
                    yield sample, start, stop
                start = max(stop, start + 1)

    def _played(
        self, sample: int, start: int, stop: int, report: Callable[[int], None]
    ) -> list[Record]:
        """Plays a stretch and saves it."""
        episodes = play_held_out(
            self._session, self._source, self._threads, sample, stop, start, report
        )
        decode = self._session.team.tokenizer.decode
        where = {"benchmark": self._plan.name, "sample": sample, "key": self._key}
        lines = [jsonlines.dumps(where | transcripts.record(e, decode)) for e in episodes]
        jsonlines.append(self._file, lines)
        return [json.loads(line) for line in lines]


def _tasks(plan: Plan, source: envs.EnvSource) -> int:
    """How many there are to play."""
    return plan.tasks if source.size is None else min(plan.tasks, source.size)


def _as_player(session: Session, player: Player) -> Session:
    """The session of the whole team, or of its last answering agent alone."""
    if not player.alone:
        return session
    opener = last_answering(session.team.profiles)
    return session._replace(workflow="solo", team=session.team._replace(opener=opener, messages=()))


def _key(session: Session, plan: Plan, size: int | None) -> str:
    """A digest of all that decides what is said: a record with another key is another's."""
    config, team = plan.config, session.team
    parts = [
        session.base.source, session.workflow, team.profiles, team.sampling, team.messages,
        team.shared, team.anonymous, team.rounds, team.max_steps, team.context, config.run.seed,
        config.eval.temperature, dataclasses.asdict(config.env), size,
        [float(jnp.sum(jnp.abs(leaf))) for leaf in jax.tree.leaves(session.engine.adapters)],
    ]  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _who(run: str | None, step: int, session: Session) -> str:
    who = f"{run}, step {step}" if run else f"{session.config.model.base} without adapters"
    return f"{' -> '.join(session.team.names)}: {who}"


def _default_folder(config: config_lib.Config) -> Path:
    return Path("runs") / "evaluations" / (Path(config.model.base).stem or "base")


def _file_name(plan: Plan, step: int | None, player: Player) -> str:
    parts = [plan.name.replace(":", ".").replace("/", "-")]
    parts += [str(step)] if step is not None else []
    parts += [player.name.replace(" ", "_")] if player != TEAM else []
    return "-".join(parts) + ".jsonl"


def _write_summary(path: Path, scores: dict[tuple[str, str], Score]) -> None:
    """``summary.json``: all figures, those of earlier evaluations in the folder too."""
    rows: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        rows = json.loads(path.read_text(encoding="utf-8"))
    for (name, player), found in scores.items():
        agents = {agent: own._asdict() for agent, own in found.agents.items()}
        rows[f"{name}, {player}"] = found.metrics(name) | {
            "tasks": found.tasks,
            "samples": found.samples,
            "interval": [found.accuracy.low, found.accuracy.high],
            "failed": found.failed,
            "agents": agents,
        }
    jsonlines.write(path, [jsonlines.dumps(rows)])


if __name__ == "__main__":
    main()
