"""The edge of every command: from the command line to settings, from errors to exit codes.

A setting means the same in a YAML file, on the command line and in Python. Files come before flags,
and the later value wins:

    python -m marft_jax.train --config configs/gsm8k_smollm2.yaml --algo.lr 3e-5
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from marft_jax.cli import sections as sections_lib
from marft_jax.cli import unused_settings
from marft_jax.cli.merging import (
    flatten,
    merge,
    read_file,
    read_run,
    resolve,
    to_train,
)
from marft_jax.cli.sections import Words
from marft_jax.errors import (
    FILE_SYSTEM,
    BadInput,
    RunFailed,
    described,
    exit_with,
    logged_to,
    one_line,
    place,
    printable,
)
from marft_jax.learning.checking import check_team, check_training
from marft_jax.plugins import name_of
from marft_jax.settings import config as config_lib
from marft_jax.settings.config import Config
from marft_jax.settings.setting import replaced, words_of
from marft_jax.team.team_files import Blueprint

Source = str | Path | Mapping[str, Any]
"""Settings in Python: a YAML file, or ``section.name`` to a value."""


def parse(argv: Sequence[str], *, prog: str = "marft_jax.train") -> Config:
    """Builds a validated config from a command line: files, then flags; the later value wins.

    Raises:
        BadInput: a setting is unknown (the nearest known one is suggested), has a wrong value, or
            contradicts another; or a file is missing or not YAML.
    """
    return resolve(_command_line(argv, prog))


def configure(*sources: Source, **sections: Any) -> Config:
    """Builds the config of a training in Python.

        configure("configs/chain_smollm2.yaml", {"algo.lr": 3e-5}, run={"dir": "runs/mine"})
        configure(run=Run(dir="runs/mine"), algo=Grpo(episodes=32))

    If ``run.dir`` is given and a run has begun there, the other settings default to its own. Only
    the ``train`` command continues the default directory.

    Where a file has a name, Python may give the object: an environment class as ``env.name``, a
    workflow function as ``team.workflow``, a ``marft_jax.team.Blueprint`` as ``team.file``, rows (a
    list of dicts) as ``env.data``.

    Args:
        sources: YAML files, and mappings from ``section.name`` to a value; the later value wins.
        sections: settings by section, which come after all sources: each a mapping from names to
            values, or its dataclass, in which every setting counts as given. The dataclasses of
            ``algo`` are in ``marft_jax.learning.settings``.

    Raises:
        BadInput: see ``parse``.
    """
    layers, run = _in_python(sources, sections), sections.get("run")
    default = isinstance(run, config_lib.Run) and run.dir == config_lib.Run.dir
    is_named = "run.dir" in merge(layers) and not default
    return to_train(layers) if is_named else resolve(layers)


def configure_run(of_run: str | Path | None, /, *sources: Source, **sections: Any) -> Config:
    """Builds the config with which the team of a run is evaluated or asked: the run's settings,
    then these, as for ``configure``. Without a run the settings start from the defaults.

    Raises:
        BadInput: there is no run in that directory, or see ``parse``.
    """
    before = [] if of_run is None else [read_run(str(of_run))]
    return _to_play([*before, *_in_python(sources, sections)])


def parse_training(argv: Sequence[str]) -> Config:
    """Parses as ``parse`` does; the settings of a run that has begun come before all others.

    Raises:
        BadInput: see ``parse`` and ``check_training``.
    """
    config = to_train(_command_line(argv, "marft_jax.train"))
    check_training(config)
    return config


def parse_run(
    run: str | Path | None, base: str | None, flags: Sequence[str],
    prog: str = "marft_jax.evaluate", *, plays_tasks: bool = True,
) -> Config:  # fmt: skip
    """Builds the config of a run, or of a bare base, with flags that come after.

    Args:
        plays_tasks: else an environment of the user is not imported, only named.

    Raises:
        BadInput: there is no run in that directory, or a setting is wrong.
    """
    bare: list[Words] = [] if base is None else [{"model.base": [base]}]
    layers = [*(bare if run is None else [read_run(str(run))]), *_command_line(flags, prog)]
    name = " ".join(merge(layers).get("env.name", []))
    if alone := not plays_tasks and ":" in name:
        layers = [{k: v for k, v in one.items() if k[:4] != "env."} for one in layers]
    config = _to_play(layers)
    check_team(config)
    return replaced(config, "env.name", name) if alone else config


def _to_play(layers: Sequence[Words]) -> Config:
    """Builds the config of a team that plays on all devices and learns nothing."""
    config = resolve(layers)
    unused_settings.log(unused_settings.warning(config, evaluates=True))
    return replaced(config, "mesh.rollout", ())


def _in_python(sources: Sequence[Source], sections: Mapping[str, Any]) -> list[Words]:
    layers = [
        {str(key): _spelled(str(key), value) for key, value in source.items()}
        if isinstance(source, Mapping)
        else read_file(str(source))
        for source in sources
    ]
    return [*layers, flatten(sections, "configure", _spelled)]


def _spelled(key: str, value: Any) -> list[str]:
    """Turns a value into words; a class, a function, a team and rows become names of objects."""

    def is_object(part: Any) -> bool:
        if isinstance(part, list):
            return bool(part) and all(isinstance(row, dict) for row in part)
        return isinstance(part, Blueprint) or callable(part)

    several = isinstance(value, list | tuple) and not is_object(value)
    parts = value if several else [value]
    names = [name_of(part) if is_object(part) else part for part in parts]
    if len({*map(str, names)}) < len(set(map(id, filter(is_object, parts)))):
        raise BadInput(f"--{key}: expected functions of different names, got {names}")
    return words_of(key, names)


def _command_line(argv: Sequence[str], prog: str) -> list[Words]:
    """Reads files, then flags; or prints the help or the schema, and exits."""
    files, flags = split(argv)
    if "help" in flags:
        sections_lib.show_help(prog, flags, *flags["help"][:1])
    if "schema" in flags:
        print(json.dumps(sections_lib.schema(*flags["schema"][:1]), indent=2))
        raise SystemExit(0)
    return [*map(read_file, files), flags]


class Parser(argparse.ArgumentParser):
    """Parser of one command's flags; a wrong one raises ``BadInput``, as a wrong setting does."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(
            prog=f"python -m {prog}" if "." in prog else prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses the flags, with the home folder for ``~``, also where a shell leaves it."""
        words = sys.argv[1:] if args is None else args
        at_home = functools.partial(re.sub, r"^(--\w+=|)~(?=/|$)", _home)
        return super().parse_known_args([*map(at_home, words)], namespace)

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; --help lists what there is")


def _home(match: re.Match[str]) -> str:
    return match[1] + os.path.expanduser("~")


def run_parser(prog: str, description: str | None, *, base: bool = True) -> Parser:
    """Returns a parser with the flags that name a team: ``--run`` and ``--step``, or ``--base``."""
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
    """Turns errors of input, disks and users' code into one line and an exit code.

    2: bad configuration or input. 1: a run that cannot go on, a file that cannot be read or
    written, or users' code that failed, shown with its file and line. 130: Ctrl-C. Any other error
    is a bug of this package, and keeps its traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with logged_to(_Lines(), level=logging.WARNING):
            yield
    except BadInput as error:
        exit_with(error)
    except RunFailed as error:
        exit_with(error, code=1)
    except KeyboardInterrupt:
        exit_with("interrupted", code=130)
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(141) from None
    except Exception as error:
        if where := place(error):
            exit_with(f"{described(error)}{where}", code=1)
        if isinstance(error, OSError) and error.errno in FILE_SYSTEM:
            file = "a file" if error.filename is None else os.fsdecode(error.filename)
            exit_with(f"{file}: cannot be read or written ({error.strerror})", code=1)
        raise


class _Lines(logging.Handler):
    """Prints what is logged where no run is open, as other lines of a command."""

    def emit(self, record: logging.LogRecord) -> None:
        text = printable(one_line(record.getMessage(), 2000))
        print(f"marft_jax: {text}", file=sys.stderr, flush=True)


def split(argv: Sequence[str]) -> tuple[list[str], Words]:
    """Splits ``--config FILE --a.b x y --c.d=z`` into ``[FILE]`` and ``{"a.b": ["x", "y"], "c.d":
    ["z"]}``."""
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
