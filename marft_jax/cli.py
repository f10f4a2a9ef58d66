"""From the command line to settings, and from errors to exit codes: the edge of every command.

YAML files are flattened into flags and parsed together with the command line in one go, files
first, so that what comes later wins and a setting means the same wherever it is written:

    python -m marft_jax.train --config configs/gsm8k_smollm2.yaml --algo.lr 3e-5
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import difflib
import errno
import inspect
import io
import itertools
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from marft_jax import config as config_lib
from marft_jax.config import Config
from marft_jax.envs import base as envs
from marft_jax.errors import BadInput, RunFailed, described, exit_with, place
from marft_jax.formats import documents
from marft_jax.learning import settings as algorithms
from marft_jax.setting import expected, kind_of, value_of
from marft_jax.team import team_files

Words = dict[str, list[str]]
"""``section.name`` to the words that stand for its value."""
Source = str | Path | Mapping[str, Any]
"""Settings in Python: a YAML file, or ``section.name`` to a value."""


class _Layer(NamedTuple):
    """Settings that were written at one place.

    Attributes:
        file: None for flags.
        lenient: those of a run that goes on: what later ones leave without effect is no fault.
    """

    file: str | None
    words: Words
    lenient: bool = False


def parse(argv: Sequence[str], *, prog: str = "marft_jax.train", evaluates: bool = False) -> Config:
    """Command line to a validated ``Config``: files, then flags; what comes later wins.

    A setting that something later has left without effect is at its default in the result.

    Args:
        evaluates: the command evaluates, so that ``eval.every`` is no condition.

    Raises:
        BadInput: an unknown key (with the nearest known one), a wrong type or literal, a file that
            is missing or is not YAML, contradictory settings, or one that this run does not read.
    """
    return _resolve(_command_line(argv, prog), evaluates)


def configure(*sources: Source, **sections: Mapping[str, Any]) -> Config:
    """Builds the settings of a training in Python, with their meaning on the command line.

        configure("configs/chain_smollm2.yaml", {"algo.lr": 3e-5}, run={"dir": "runs/mine"})

    Where the run directory has a checkpoint, what is not given is as it was saved.

    Args:
        sources: YAML files, and mappings from ``section.name`` to a value; what comes later wins.
        sections: settings by section, which come last.

    Raises:
        BadInput: see ``parse``.
    """
    return _to_train(_in_python(sources, sections))


def configure_run(
    run: str | Path | None, *sources: Source, **sections: Mapping[str, Any]
) -> Config:
    """Builds the settings to evaluate or ask the team of a run as ``configure`` does: its own, and
    these on top. Without a run they are those of a bare ``model.base``.

    Raises:
        BadInput: there is no run in that directory, or see ``parse``.
    """
    layers = [] if run is None else [_run_layer(str(run))]
    return _resolve([*layers, *_in_python(sources, sections)], evaluates=True)


def _in_python(sources: Sequence[Source], sections: Mapping[str, Any]) -> list[_Layer]:
    layers = [
        _Layer(None, {key: _words(value) for key, value in source.items()})
        if isinstance(source, Mapping)
        else _Layer(str(source), _read_words(str(source)))
        for source in sources
    ]
    return [*layers, _Layer(None, _flatten(sections, "configure"))]


def _command_line(argv: Sequence[str], prog: str) -> list[_Layer]:
    """Files, then flags; shows help where it is asked for."""
    files, flags = _split(argv)
    if "help" in flags:
        _show_help(prog, flags, *flags["help"][:1])
    return [*(_Layer(file, _read_words(file)) for file in files), _Layer(None, flags)]


def _resolve(layers: Sequence[_Layer], evaluates: bool = False) -> Config:
    """The validated config of these layers.

    What is given must have an effect, with what came after it or without: a file's setting of one
    algorithm loses it to a flag that names another, and is dropped then.
    """
    words, dropped = _merged(layers), list[str]()
    while lost := _without_effect(words, evaluates):
        for key, why in lost.items():
            last = max(i for i, layer in enumerate(layers) if key in layer.words)
            file, _, lenient = layers[last]
            if not lenient and key in _without_effect(_merged(layers[: last + 1]), evaluates):
                where = f"{file}: {key}" if file else f"--{key}"
                raise BadInput(f"{where}: {why}, got {' '.join(words[key]):.60}")
            dropped += [key] * (lenient and not _is_default(key, words[key]))
        words = {key: value for key, value in words.items() if key not in lost}
    if dropped:
        file = next(layer.file for layer in layers if layer.lenient)
        print(f"marft_jax: {file}: nothing reads {', '.join(dropped)} here", file=sys.stderr)
    config = _typed(words)
    config_lib.validate(config)
    return config


def _without_effect(words: Words, evaluates: bool) -> dict[str, str]:
    """Settings of other environments and algorithms, or else those that change nothing; and why.

    Raises:
        BadInput: a setting of nobody, or one that is no value.
    """
    kinds, lost = _kinds(words), dict[str, str]()
    known = [f"{section}.{name}" for section, kind in kinds.items() for name in _names(kind)]
    for key in words.keys() - set(known):
        section, _, name = key.partition(".")
        if not (owners := [own for own, kind in _family(section).items() if name in _names(kind)]):
            raise BadInput(f"unknown setting {key!r:.80}{_suggest(key, known)}")
        mine = " ".join(words.get(f"{section}.name", [kinds[section].name]))
        lost[key] = (
            f"unknown setting for --{section}.name {mine}; it belongs to {' and '.join(owners)}"
        )
    if lost:
        return lost
    config = _typed(words)
    config_lib.check_bounds(config)
    needs = config_lib.without_effect(config, evaluates=evaluates)
    needs |= team_files.without_effect(config.team, config.algo.step_reward)
    return {key: f"this run does not read it; it needs {needed}" for key, needed in needs.items()}


def _kinds(words: Words) -> dict[str, Any]:
    """Each section's dataclass, those of ``env`` and ``algo`` by their names."""
    kinds = {field.name: type(field.default) for field in dataclasses.fields(Config)}
    for section, default, find in (
        ("env", "arithmetic", envs.settings_type),
        ("algo", "appo", algorithms.settings_type),
    ):
        name = " ".join(words.get(f"{section}.name", [default]))
        kinds[section] = find(name)
    return kinds


def _family(section: str) -> dict[str, Any]:
    """The dataclasses that a section may have, by the names of the environments or algorithms."""
    if section == "env":
        named = {name: envs.settings_type(name) for name in envs.BUILT_IN}
        return named | {"package.module:Class": envs.Own}
    return dict(algorithms.SETTINGS) if section == "algo" else {}


def _names(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _is_default(key: str, words: list[str]) -> bool:
    """True where an environment or algorithm that has the setting has it at this by default."""
    section, _, name = key.partition(".")
    fields = (
        field
        for kind in _family(section).values()
        for field in dataclasses.fields(kind)
        if field.name == name
    )
    defaults = {tuple(_words(field.default)) for field in fields}
    return tuple(words) in {*defaults, ("auto",), ("None",)}


def _read_words(file: str) -> Words:
    """The settings of a YAML file; a team file is looked for beside it, then where we are."""
    words = _flatten(documents.read(file, "--config"), file)
    if before := words.pop("run.tensorboard", None):  # of an earlier version
        words.setdefault("run.loggers", ["tensorboard" if before == ["True"] else "none"])
    for name in words.get("team.file", ())[:1]:
        if name and "\0" not in name and (Path(file).parent / name).is_file():
            words["team.file"] = [str(Path(file).parent / name)]
    return words


def _run_layer(run: str) -> _Layer:
    """The settings and the team that a run directory holds, but not who computes with whom."""
    settings, team = Path(run) / "config.yaml", Path(run) / "team.yaml"
    if "\0" in run or not settings.is_file():
        raise BadInput(f"--run {run}: expected a run directory with config.yaml, found none")
    own = {"run.dir": [run]} | ({"team.file": [str(team)]} if team.is_file() else {})
    words = _read_words(str(settings)) | own
    kept = {key: value for key, value in words.items() if key not in _OF_A_START}
    return _Layer(str(settings), kept, lenient=True)


def parse_training(argv: Sequence[str]) -> Config:
    """Parses as ``parse`` does; a run directory with checkpoints has its settings below all others.

    Raises:
        BadInput: see ``parse``.
    """
    return _to_train(_command_line(argv, "marft_jax.train"))


def _to_train(layers: Sequence[_Layer]) -> Config:
    run = [*_merged(layers).get("run.dir", []), config_lib.Run().dir][0]
    if not _has_begun(run):
        return _resolve(layers)
    before = _run_layer(run)
    config = _resolve([before, *layers])
    if config.lora.init != _typed(before.words).lora.init:
        raise BadInput(
            f"--lora.init {config.lora.init}: {run} has begun and goes on from its checkpoint; "
            "leave it out, or name another --run.dir"
        )
    return config


def _has_begun(run: str) -> bool:
    """True for a directory with the settings and a checkpoint of a run."""
    if not run.strip() or "\0" in run or not (Path(run) / "config.yaml").is_file():
        return False
    return any(path.name.isdecimal() for path in Path(run).glob("checkpoints/*"))


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


def parse_run(
    run: str | None, base: str | None, flags: Sequence[str], prog: str = "marft_jax.evaluate"
) -> Config:
    """The settings of a run, or the defaults on a base, with flags on top.

    Raises:
        BadInput: there is no run in that directory, or a setting is wrong.
    """
    bare = [] if base is None else [_Layer(None, {"model.base": [base]})]
    layers = bare if run is None else [_run_layer(run)]
    return _resolve([*layers, *_command_line(flags, prog)], evaluates=True)


@contextlib.contextmanager
def boundary() -> Iterator[None]:
    """The edge of a command: faults that are not ours leave as one line and an exit code.

    2: bad configuration or input. 1: a disk that is full, or code of the user's that failed, shown
    with its own file and line. 130: Ctrl-C. Any other fault is ours, and has its traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
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
_ALSO_CALLED = {
    "learning_rate": "algo.lr",
    "batch_size": "algo.episodes",
    "num_generations": "algo.group_size",
    "num_steps": "run.steps",
    "max_steps": "run.steps",
    "output_dir": "run.dir",
    "model_name_or_path": "model.base",
    "beta": "algo.kl_coef",
    "lora_alpha": "lora.alpha",
    "max_tokens": "team.max_new_tokens",
    "report_to": "run.loggers",
    "tensorboard": "run.loggers",
}
"""Names that other programs give to settings."""
_USAGE = """usage: python -m {prog} [--config FILE ...] [--SECTION.NAME VALUE ...]

{about}

  --config FILE    settings of YAML files, before the flags; later ones win
  --help SECTION   the settings of one section; of all: --help all

sections:"""


def _show_help(prog: str, flags: Words, topic: str = "") -> NoReturn:
    """The sections; with a ``topic`` the settings of that one, or of ``all``."""
    sections = {field.name: field.metadata["about"] for field in dataclasses.fields(Config)}
    if topic not in ("", "all", *sections):
        raise BadInput(f"--help: expected all or one of {', '.join(sections)}, got {topic!r:.40}")
    print(_USAGE.format(prog=prog, about=Config.__doc__))
    for section, kind in _kinds(flags).items():
        print(f"  {section:<15}  {sections[section]}")
        if topic in ("all", section):
            if family := _family(section):
                print(f"{'':19}(of --{section}.name {kind.name}; there are {', '.join(family)})")
            print(*_described(section, kind), sep="\n")
    raise SystemExit(0)


def _described(section: str, kind: Any) -> Iterator[str]:
    """Help on the settings of a section: each with its values, its default and its text."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for field, text in itertools.pairwise(body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(words))):
                    texts[name] = " ".join(words.split())
    for field in dataclasses.fields(kind):
        default = " ".join(_words(field.default)).lower() or "none"
        yield f"    --{section}.{field.name}  {expected(kind_of(field))} ({default})"
        yield from textwrap.wrap(texts.get(field.name, ""), 92, initial_indent=" " * 8,
                                 subsequent_indent=" " * 8)  # fmt: skip


def _merged(layers: Sequence[_Layer]) -> Words:
    return dict(item for layer in layers for item in layer.words.items())


def _suggest(key: str, known: Sequence[str]) -> str:
    """The setting that was meant: by another program's name, in another section, or the nearest."""
    section, _, name = key.rpartition(".")
    other = _ALSO_CALLED.get(name, "")
    own = f"{section}.{other.partition('.')[2]}"
    same = [k for k in known if k.endswith(f".{name}")]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    found = [k for k in (own, other, *same, *near) if k in known]
    return f"; did you mean {found[0]!r}?" if found else "; --help lists them"


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


def _flatten(tree: Any, file: str) -> Words:
    if not isinstance(tree or {}, dict):
        raise BadInput(f"--config {file}: expected sections like `run:`, got {tree!r:.80}")
    flat: Words = {}
    for section, settings in (tree or {}).items():
        if not isinstance(settings, dict):
            raise BadInput(f"{file}: expected settings below {section!r:.80}, got {settings!r:.80}")
        for key, value in settings.items():
            if isinstance(value, dict):
                raise BadInput(f"{file}: expected one value for {section}.{key}, got {value!r:.80}")
            flat[f"{section}.{key}"] = _words(value)
    return flat


def _words(value: Any) -> list[str]:
    return [str(item) for item in (value if isinstance(value, list | tuple) else [value])]


def _typed(settings: Words) -> Config:
    """Words to values, by the types of the fields; names the first setting that does not fit."""
    given: dict[str, dict[str, Any]] = {}
    kinds = _kinds(settings)
    for section, kind in kinds.items():
        given[section] = {}
        for field in dataclasses.fields(kind):
            key = f"{section}.{field.name}"
            if key not in settings or _is_former_default(key, kind_of(field), settings[key]):
                continue
            words, wanted = settings[key], kind_of(field)
            try:
                given[section][field.name] = value_of(wanted, words)
            except ValueError:
                got = repr(" ".join(words)) if words else "nothing"
                raise BadInput(f"--{key}: expected {expected(wanted)}, got {got:.80}") from None
    return Config(**{section: kind(**given[section]) for section, kind in kinds.items()})


def _is_former_default(key: str, kind: str, words: list[str]) -> bool:
    """True for ``auto`` and for no ``group_size``, with which earlier releases spelled what is now
    the default of each algorithm."""
    if key == "algo.group_size" and words and words[0].lower() in ("none", "null"):
        return True
    return words == ["auto"] and key.startswith(("algo.", "critic.")) and "auto" not in kind
