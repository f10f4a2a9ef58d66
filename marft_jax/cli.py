"""From the command line to settings, and from errors to exit codes: the edge of every command.

YAML files are flattened into flags and parsed together with the command line in one go, files
first, so that what comes later wins and a setting means the same wherever it is written:

    python -m marft_jax.train --config configs/gsm8k_smollm2.yaml --algo.lr 3e-5
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import errno
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from marft_jax import config as config_lib
from marft_jax import effects
from marft_jax.config import Config
from marft_jax.errors import BadInput, RunFailed, described, exit_with, place
from marft_jax.formats import documents
from marft_jax.setting import expected, value_of

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


def parse(
    argv: Sequence[str], *, prog: str = "marft_jax.train", evaluating: bool = False
) -> Config:
    """Command line to a validated ``Config``: files, then flags; what comes later wins.

    A setting that something later has left without effect is at its default in the result.

    Args:
        evaluating: the command evaluates, so that ``eval.every`` is no condition.

    Raises:
        BadInput: an unknown key (with the nearest known one), a wrong type or literal, a file that
            is missing or is not YAML, contradictory settings, or one that this run does not read.
    """
    return _resolve(_command_line(argv, prog), evaluating)


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
    return _resolve([*layers, *_in_python(sources, sections)], evaluating=True)


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
        _show_help(prog, *flags["help"][:1])
    return [*(_Layer(file, _read_words(file)) for file in files), _Layer(None, flags)]


def _resolve(layers: Sequence[_Layer], evaluating: bool = False) -> Config:
    known = [key for key, _ in config_lib.settings()]
    for layer in layers:
        for key in layer.words:
            if key not in known:
                where = f"{layer.file}: " if layer.file else ""
                raise BadInput(f"{where}unknown setting {key!r:.80}{_suggest(key, known)}")
    config_lib.validate(_typed(_merged(layers)))
    config = _only_what_is_read(layers, evaluating)
    config_lib.validate(config)
    return config


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
    run = [*_merged(layers).get("run.dir", []), Config().run.dir][0]
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
    return _resolve([*layers, *_command_line(flags, prog)], evaluating=True)


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


def _show_help(prog: str, topic: str = "") -> NoReturn:
    """The sections; with a ``topic`` the settings of that one, or of ``all``."""
    sections = {field.name: field for field in dataclasses.fields(Config)}
    if topic not in ("", "all", *sections):
        raise BadInput(f"--help: expected all or one of {', '.join(sections)}, got {topic!r:.40}")
    if not topic:
        print(_USAGE.format(prog=prog, about=Config.__doc__))
        for name, field in sections.items():
            print(f"  {name:<15}  {field.metadata['about']}")
        raise SystemExit(0)
    import tyro  # late: only help needs it

    names = sections if topic == "all" else [topic]
    shown = [(name, type(sections[name].default), sections[name].default) for name in names]
    tyro.cli(
        dataclasses.make_dataclass("Settings", shown),
        prog=f"python -m {prog}",
        args=["--help"],
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff,),
        description=Config.__doc__,
    )
    raise SystemExit(0)


def _merged(layers: Sequence[_Layer]) -> Words:
    return dict(item for layer in layers for item in layer.words.items())


def _only_what_is_read(layers: Sequence[_Layer], evaluating: bool) -> Config:
    """The config with settings that nothing reads at their defaults.

    Raises:
        BadInput: a flag is not read; or a setting of a file is read neither now nor without what
            came after that file.
    """
    words = _merged(layers)
    while left := effects.unread(config := _typed(words), evaluating):
        for key, condition in left.items():
            last = max(i for i, layer in enumerate(layers) if key in layer.words)
            then = _typed(_merged(layers[: last + 1]))
            if not layers[last].lenient and key in effects.unread(then, evaluating):
                where = f"{file}: {key}" if (file := layers[last].file) else f"--{key}"
                raise BadInput(
                    f"{where}: this run does not read it, got {' '.join(words[key]):.60}; it is "
                    f"read {condition.says}: change that, or leave this out"
                )
        words = {key: value for key, value in words.items() if key not in left}
    return config


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
    config, fields = Config(), dict(config_lib.settings())
    for key, words in settings.items():
        kind = str(fields[key].type)
        try:
            config = config_lib.replaced(config, key, value_of(kind, words))
        except ValueError:
            got = repr(" ".join(words)) if words else "nothing"
            raise BadInput(f"--{key}: expected {expected(kind)}, got {got:.80}") from None
    return config
