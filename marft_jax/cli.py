"""From the command line to settings, and from errors to exit codes: the edge of every command.

YAML files are flattened into flags and parsed together with the command line in one go, files
first, so that what comes later wins and a setting means the same wherever it is written:

    python -m marft_jax.train --config configs/gsm8k_smollm2.yaml --algo.lr 3e-5
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypedDict, Unpack

from marft_jax import config as config_lib
from marft_jax import sections as sections_lib
from marft_jax.config import Config
from marft_jax.errors import BadInput, RunFailed, described, exit_with, one_line, place
from marft_jax.formats import documents
from marft_jax.learning import settings as algorithms
from marft_jax.plugins import name_of
from marft_jax.run import inputs
from marft_jax.sections import Words
from marft_jax.setting import from_words, suggestion, words_of
from marft_jax.team import team_files
from marft_jax.team.team_files import Blueprint

Source = str | Path | Mapping[str, Any]
"""Settings in Python: a YAML file, or ``section.name`` to a value."""
_Names = Mapping[str, Any]


class Sections(TypedDict, total=False):
    """Sections in Python: names to values; or a whole one as its dataclass, in which what is not
    named is at its default. Those of ``algo`` are in ``marft_jax.learning.settings``."""

    run: config_lib.Run | _Names
    model: config_lib.Model | _Names
    team: config_lib.Team | _Names
    env: config_lib.EnvSettings | _Names
    lora: config_lib.Lora | _Names
    critic: config_lib.Critic | _Names
    algo: config_lib.Algo | _Names
    rollout: config_lib.Rollout | _Names
    mesh: config_lib.Mesh | _Names
    eval: config_lib.Eval | _Names
    guard: config_lib.Guard | _Names


class _Input(NamedTuple):
    """Settings that were written at one place.

    Attributes:
        file: None for flags.
        saved: those of a run that goes on: what this one does not read is no fault.
    """

    words: Words
    file: str | None = None
    saved: bool = False


def parse(argv: Sequence[str], *, prog: str = "marft_jax.train") -> Config:
    """Command line to a validated ``Config``: files, then flags; what comes later wins.

    A setting that something later has left without effect is at its default in the result.

    Raises:
        BadInput: an unknown key (with the nearest known one), a wrong type or literal, a file that
            is missing or is not YAML, contradictory settings, or one that this run does not read.
    """
    return _resolve(_command_line(argv, prog))


def configure(*sources: Source, **sections: Unpack[Sections]) -> Config:
    """Builds the settings of a training in Python, with their meaning on the command line.

        configure("configs/chain_smollm2.yaml", {"algo.lr": 3e-5}, run={"dir": "runs/mine"})
        configure(run=Run(dir="runs/mine"), algo=Grpo(episodes=32))  # an editor completes these

    Where ``run.dir`` is given and has a checkpoint, what is not given is as it was saved. The
    default directory is continued by the ``train`` command alone.

    Args:
        sources: YAML files, and mappings from ``section.name`` to a value; what comes later wins.
            Where a file has a name, the value may be what it names: a class as ``env.name``, a
            function as ``team.workflow``, a ``Blueprint`` as ``team.file``, rows, a list of
            dicts, as ``env.data``.
        sections: settings by section, which come last.

    Raises:
        BadInput: see ``parse``.
    """
    inputs, run = _in_python(sources, sections), sections.get("run")
    default = isinstance(run, config_lib.Run) and run.dir == config_lib.Run.dir
    is_named = "run.dir" in _merge(inputs) and not default
    return _to_train(inputs) if is_named else _resolve(inputs)


def configure_run(
    of_run: str | Path | None, /, *sources: Source, **sections: Unpack[Sections]
) -> Config:
    """Builds the settings to evaluate or ask the team of a run as ``configure`` does: its own, and
    these on top. Without a run they are those of a bare ``model.base``.

    Raises:
        BadInput: there is no run in that directory, or see ``parse``.
    """
    before = [] if of_run is None else [_read_to_ask(str(of_run))]
    return _resolve([*before, *_in_python(sources, sections)], evaluates=True)


def parse_training(argv: Sequence[str]) -> Config:
    """Parses as ``parse`` does; a run directory with checkpoints has its settings below all others.

    Raises:
        BadInput: see ``parse``.
    """
    return _to_train(_command_line(argv, "marft_jax.train"))


def parse_run(
    run: str | None, base: str | None, flags: Sequence[str], prog: str = "marft_jax.evaluate"
) -> Config:
    """Builds the settings of a run, or the defaults on a base, with flags on top.

    Raises:
        BadInput: there is no run in that directory, or a setting is wrong.
    """
    bare = [] if base is None else [_Input({"model.base": [base]})]
    before = bare if run is None else [_read_to_ask(run)]
    return _resolve([*before, *_command_line(flags, prog)], evaluates=True)


def _in_python(sources: Sequence[Source], sections: Sections) -> list[_Input]:
    inputs = [
        _Input({str(key): _spelled(str(key), value) for key, value in source.items()})
        if isinstance(source, Mapping)
        else _read_file(str(source))
        for source in sources
    ]
    return [*inputs, _Input(_flatten(sections, "configure", _spelled))]


def _spelled(key: str, value: Any) -> list[str]:
    """Spells a value in words; a class, a function, a team or rows by the name of the object."""

    def is_object(part: Any) -> bool:
        is_rows = isinstance(part, list) and part and all(isinstance(row, dict) for row in part)
        return is_rows or isinstance(part, Blueprint) or hasattr(part, "__qualname__")

    several = isinstance(value, list | tuple) and not is_object(value)
    parts = value if several else [value]
    return words_of(key, [name_of(part) if is_object(part) else part for part in parts])


def _command_line(argv: Sequence[str], prog: str) -> list[_Input]:
    """Files, then flags; shows help where it is asked for."""
    files, flags = _split(argv)
    if "help" in flags:
        sections_lib.show_help(prog, flags, *flags["help"][:1])
    if "schema" in flags:
        print(json.dumps(sections_lib.schema(), indent=2))
        raise SystemExit(0)
    return [*map(_read_file, files), _Input(flags)]


def _read_file(file: str) -> _Input:
    """Reads the settings of a YAML file; a team file is looked for beside it, then where we are."""
    words = _flatten(documents.read(file, "--config"), file)
    folders = dict.fromkeys(inputs.folders_of(Path(file).parent))
    sys.path[1:1] = [folder for folder in folders if folder not in sys.path]
    if before := words.pop("run.tensorboard", None):  # of an earlier version
        words.setdefault("run.loggers", ["tensorboard" if before == ["True"] else "none"])
    for name in words.get("team.file", ())[:1]:
        if os.path.isfile(beside := Path(file).parent / name):
            words["team.file"] = [str(beside)]
    return _Input(words, file)


def _read_run(run: str) -> _Input:
    """Reads the settings and the team of a run directory, but not who computes with whom."""
    settings, team = Path(run) / "config.yaml", Path(run) / "team.yaml"
    if not os.path.isfile(settings):
        raise BadInput(f"--run {run}: expected a run directory with config.yaml, found none")
    own = {"run.dir": [run]} | ({"team.file": [str(team)]} if os.path.isfile(team) else {})
    words = _read_file(str(settings)).words | own
    if dropped := [key for key in words if key in _DROPPED]:
        line = f"marft_jax: {settings}: ignores {', '.join(dropped)}, which no longer exists"
        print(line, file=sys.stderr)
    without = (*_OF_A_START, *_DROPPED)
    kept = {key: value for key, value in words.items() if key not in without}
    return _Input(kept, str(settings), saved=True)


def _read_to_ask(run: str) -> _Input:
    """Reads a run as ``_read_run`` does; what it learned from may have changed, with a warning."""
    found = _read_run(run)
    for line in inputs.changed_since(Path(run)):
        print(f"marft_jax: {run} was trained with other files: {one_line(line)}", file=sys.stderr)
    return found


def _to_train(inputs: Sequence[_Input]) -> Config:
    """Builds the config of a training, with what its run has saved below all others."""
    run = [*_merge(inputs).get("run.dir", []), config_lib.Run.dir][0]
    is_run = run.strip() and os.path.isfile(Path(run) / "config.yaml")
    if not is_run or not any(p.name.isdecimal() for p in Path(run).glob("checkpoints/*")):
        return _resolve(inputs)
    before = _read_run(run)
    config = _resolve([before, *inputs])
    given, kept = (Path(one.lora.init or "") for one in (config, _build(before.words)))
    if given.absolute() != kept.absolute():
        raise BadInput(
            f"--lora.init {config.lora.init}: {run} has begun and goes on from its checkpoint; "
            "leave it out, or name another --run.dir"
        )
    return config


def _resolve(inputs: Sequence[_Input], evaluates: bool = False) -> Config:
    """Builds the validated config of these inputs; a fault names what the run has saved of it."""
    try:
        return _validated(inputs, evaluates)
    except BadInput as error:
        raise BadInput(f"{error}{_saved(str(error), inputs)}") from error


def _saved(fault: str, inputs: Sequence[_Input]) -> str:
    """Names settings in a fault that nobody gave: they are those of the run that goes on."""
    words, found = _merge(inputs), list[str]()
    kinds = sections_lib.kinds(words)
    for key in dict.fromkeys(re.findall(r"--(\w+\.\w+)", fault)):
        last = [one for one in inputs if key in one.words][-1:]
        section, _, name = key.partition(".")
        usual = key in words and words[key] == words_of(key, getattr(kinds[section], name, None))
        if last and last[0].saved and (name == "name" or not usual):
            found.append(f"{key} {' '.join(words[key]):.60} comes from {last[0].file}")
    return f" ({'; '.join(found)})" if found else ""


def _validated(inputs: Sequence[_Input], evaluates: bool) -> Config:
    """Builds the config and checks it.

    What is given must have an effect, with what came after it or without: a file's setting of one
    algorithm loses it to a flag that names another, and is at its default then.
    """
    words, dropped = _merge(inputs), list[str]()
    unread = _find_unread(words, evaluates)
    for key, why in unread.items():
        last = max(i for i, one in enumerate(inputs) if key in one.words)
        file = inputs[last].file
        if inputs[last].saved:
            dropped += [] if sections_lib.is_default(key, words[key]) else [key]
        elif key in _find_unread(_merge(inputs[: last + 1]), evaluates):
            where = f"{file}: {key}" if file else f"--{key}"
            raise BadInput(f"{where}: {why}, got {' '.join(words[key]):.60}")
    if dropped:
        line = f"marft_jax: {inputs[0].file}: nothing reads {', '.join(dropped)} here"
        print(line, file=sys.stderr)
    config = _build({key: value for key, value in words.items() if key not in unread})
    config_lib.validate(config)
    algorithms.validate(config.algo, config.critic)
    return config


def _find_unread(words: Words, evaluates: bool) -> dict[str, str]:
    """Finds settings of other environments and algorithms, or that change nothing; and why.

    Raises:
        BadInput: a setting of nobody, or one that is no value.
    """
    kinds, found = sections_lib.kinds(words), dict[str, str]()
    known = [f"{section}.{f.name}" for section, kind in kinds.items() for f in fields(kind)]
    for key in words:
        if key in known:
            continue
        if not (owners := sections_lib.owners(key)):
            raise BadInput(f"unknown setting {key!r:.80}{suggestion(key, known)}")
        section = key.partition(".")[0]
        mine = f"--{section}.name {' '.join(words.get(f'{section}.name', [kinds[section].name]))}"
        found[key] = f"unknown setting for {mine}; it belongs to {' and '.join(owners)}"
    config = _build(words)
    needs = config_lib.find_unread(config, evaluates=evaluates)
    needs |= team_files.without_effect(config.team, config.algo.step_reward, config.env.name)
    why = "this run does not read it; it needs"
    return found | {key: f"{why} {needed}" for key, needed in needs.items()}


class Parser(argparse.ArgumentParser):
    """Flags of one command's own; a wrong one is ``BadInput``, as a wrong setting is."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(
            prog=f"python -m {prog}" if "." in prog else prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; --help lists what there is")


def run_parser(prog: str, description: str | None, *, base: bool = True) -> Parser:
    """A parser that knows which team is meant: ``--run`` with ``--step``, or a bare ``--base``."""
    parser = Parser(prog, description)
    team = parser.add_mutually_exclusive_group(required=True)
    team.add_argument("--run", metavar="DIR", help="a run directory")
    if base:
        team.add_argument("--base", metavar="MODEL", help="a base model, without a run")
    which = "the checkpoint to take from a run (latest)"
    parser.add_argument("--step", default="latest", metavar="N|best|latest", help=which)
    return parser


@contextlib.contextmanager
def boundary() -> Iterator[None]:
    """Turns faults that are not ours into one line and an exit code, at the edge of a command.

    2: bad configuration or input. 1: a disk that is full, or code of the user's that failed, shown
    with its own file and line. 130: Ctrl-C. Any other fault is ours, and has its traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
    except BadInput as error:
        exit_with(error)
    except RunFailed as error:
        exit_with(error, code=1)
    except KeyboardInterrupt:
        exit_with("interrupted", code=130)
    except BrokenPipeError:  # whoever read our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(141) from None
    except Exception as error:
        if where := place(error, own_only=True):
            exit_with(f"{described(error)}{where}", code=1)
        if isinstance(error, OSError) and errno.errorcode.get(error.errno or 0) in _FILES:
            file = "a file" if error.filename is None else os.fsdecode(error.filename)
            exit_with(f"{file}: cannot be read or written ({error.strerror})", code=1)
        raise


_FILES = (
    "ENOSPC EDQUOT EROFS EACCES EPERM EIO ENOENT ENOTDIR EISDIR EFBIG ELOOP ENAMETOOLONG".split()
)
_OF_A_START = ("mesh.coordinator", "mesh.processes", "mesh.process")
_DROPPED = ("guard.max_cut",)  # settings of earlier releases, in the config.yaml of their runs


def _merge(inputs: Sequence[_Input]) -> Words:
    return dict(item for one in inputs for item in one.words.items())


def _split(argv: Sequence[str]) -> tuple[list[str], Words]:
    """``--config FILE --a.b x y --c.d=z`` to files and ``{"a.b": ["x", "y"], "c.d": ["z"]}``."""
    files: list[list[str]] = []
    flags: Words = {}
    values: list[str] | None = None
    for word in argv:
        if word.startswith("--") or word == "-h":
            key, _, value = ("help" if word == "-h" else word[2:]).partition("=")
            values = [value] if value else []
            files += [values] * (key == "config")
            flags |= {key.replace("-", "_"): values} if key != "config" else {}
        elif values is None:
            raise BadInput(f"expected a flag like --run.steps, got {word!r:.80}; --help lists them")
        else:
            values.append(word)
    if [] in files:
        raise BadInput("--config: expected a YAML file, got nothing")
    return [file for some in files for file in some], flags


def _flatten(tree: Any, file: str, spell: Callable[[str, Any], list[str]] = words_of) -> Words:
    if not isinstance(tree or {}, dict):
        raise BadInput(f"--config {file}: expected sections like `run:`, got {tree!r:.80}")
    flat: Words = {}
    for section, settings in (tree or {}).items():
        if is_dataclass(settings):
            settings = {field.name: getattr(settings, field.name) for field in fields(settings)}
        if not isinstance(settings, dict):
            raise BadInput(f"{file}: expected settings below {section!r:.80}, got {settings!r:.80}")
        for key, value in settings.items():
            if isinstance(value, dict):
                raise BadInput(f"{file}: expected one value for {section}.{key}, got {value!r:.80}")
            flat[f"{section}.{key}"] = spell(f"{section}.{key}", value)
    return flat


def _build(words: Words) -> Config:
    """Turns words into values; names the first setting that does not fit."""
    given = {key: some for key, some in words.items() if some not in _FORMER.get(key, ())}
    sections = sections_lib.kinds(words).items()
    config = Config(**{name: from_words(name, kind, given) for name, kind in sections})
    return config_lib.fit_base(config, given)


_FORMER = {
    "algo.group_size": (["None"], ["none"], ["null"]),
    "critic.mode": (["auto"],),
    **{f"algo.{name}": (["auto"],)
       for name in ("baseline", "entropy_coef", "gae_lambda", "gamma", "normalize", "ratio")},
}  # fmt: skip
"""Spellings of earlier releases for what is now the default of each algorithm."""
