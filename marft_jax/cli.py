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
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from marft_jax import config as config_lib
from marft_jax import effects
from marft_jax.config import Config
from marft_jax.errors import BadInput, RunFailed, described, exit_with, place
from marft_jax.formats import documents

Words = dict[str, list[str]]
"""``section.name`` to the words that stand for its value."""


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
    argv: Sequence[str],
    *,
    prog: str = "marft_jax.train",
    run: str | None = None,
    evaluating: bool = False,
) -> Config:
    """Command line to a validated ``Config``.

    ``--config FILE`` may stand several times; its settings come before those of the flags, and a
    later one replaces an earlier one. A setting that something later has left without effect is
    at its default in the result.

    Args:
        run: a run directory, whose settings come before all of these.
        evaluating: the command evaluates, so that ``eval.every`` is no condition.

    Raises:
        BadInput: for an unknown key (with the nearest known one), a wrong type or literal, a file
            that is missing or is not YAML, settings that contradict each other, or one that this
            run does not read.
    """
    files, flags = _split_config_flags(argv)
    if {"-h", "--help"} & set(flags):
        _show_help(prog)
    layers = [] if run is None else [_run_layer(run)]
    layers += [_Layer(file, _read_words(file)) for file in files]
    layers += [_Layer(None, _group_flags(flags))]
    known = [key for key, _ in config_lib.settings()]
    for layer in layers:
        for key in layer.words:
            if key not in known:
                where = f"{layer.file}: " if layer.file else ""
                raise BadInput(f"{where}unknown setting {key!r:.80}{_suggest(key, known)}")
    config = _typed(_merged(layers))
    config_lib.validate(config)
    config = _only_what_is_read(config, layers, evaluating)
    config_lib.validate(config)
    return config


def _read_words(file: str) -> Words:
    """The settings of a YAML file; a team file is looked for beside it, then where we are."""
    words = _flatten(documents.read(file, "--config"), file)
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
    files, flags = _split_config_flags(argv)
    layers = [*map(_read_words, files), _group_flags(flags)]
    named = [words["run.dir"] for words in layers if words.get("run.dir")]
    run = named[-1][0] if named else Config().run.dir
    saved = run.strip() and "\0" not in run and (Path(run) / "checkpoints").is_dir()
    begun = saved and any(p.name.isdecimal() for p in (Path(run) / "checkpoints").iterdir())
    known = begun and (Path(run) / "config.yaml").is_file()
    if not known:
        return parse(argv)
    config, before = parse(argv, run=run), _typed(_run_layer(run).words)
    if config.lora.init != before.lora.init:
        raise BadInput(
            f"--lora.init {config.lora.init}: {run} has begun and goes on from its checkpoint; "
            "leave it out, or name another --run.dir"
        )
    return config


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
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run", metavar="DIR", help="a run directory")
    if base:
        which.add_argument("--base", metavar="MODEL", help="a base model, without a run")
    parser.add_argument(
        "--step",
        default="latest",
        metavar="N|best|latest",
        help="the checkpoint to take from a run (latest)",
    )
    return parser


def parse_run(
    run: str | None, base: str | None, flags: Sequence[str], prog: str = "marft_jax.evaluate"
) -> Config:
    """The settings of a run, or the defaults on a base, with flags on top.

    Raises:
        BadInput: there is no run in that directory, or a setting is wrong.
    """
    if run is None:
        flags = [*(("--model.base", base) if base else ()), *flags]
    return parse(flags, prog=prog, run=run, evaluating=True)


@contextlib.contextmanager
def boundary() -> Iterator[None]:
    """The edge of a command: faults that are not ours leave as one line and an exit code.

    2: bad configuration or input. 1: it cannot go on: a disk that is full, code of the user's that
    failed, which is shown with its own file and line. 130: Ctrl-C. What is left is ours, and has
    its traceback.
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
        if isinstance(error, OSError) and error.errno in _FILES:
            file = "a file" if error.filename is None else os.fsdecode(error.filename)
            exit_with(f"{file}: cannot be read or written ({error.strerror})", code=1)
        raise


_FILES = {
    getattr(errno, name)
    for name in "ENOSPC EDQUOT EROFS EACCES EPERM EIO ENOENT ENOTDIR EISDIR EFBIG ELOOP".split()
} | {errno.ENAMETOOLONG}
_OR_AUTO = " | Literal['auto']"
_OF_A_START = ("mesh.coordinator", "mesh.processes", "mesh.process")
_HELP = f"""{Config.__doc__}

--config FILE [--config FILE ...]: settings from YAML files, before the flags."""
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
}
"""Names that other programs give to settings."""


def _show_help(prog: str) -> NoReturn:
    import tyro

    plain = (tyro.conf.FlagConversionOff,)
    tyro.cli(Config, prog=f"python -m {prog}", args=["--help"], config=plain, description=_HELP)
    raise SystemExit(0)


def _merged(layers: Sequence[_Layer]) -> Words:
    merged: Words = {}
    for layer in layers:
        merged |= layer.words
    return merged


def _only_what_is_read(config: Config, layers: Sequence[_Layer], evaluating: bool) -> Config:
    """The config with settings that nothing reads at their defaults.

    Raises:
        BadInput: a flag is not read; or a setting of a file is read neither now nor without what
            came after that file.
    """
    while left := effects.unread(config, evaluating):
        for key, condition in left.items():
            last = max(i for i, layer in enumerate(layers) if key in layer.words)
            if layers[last].lenient:
                continue
            then = _typed(_merged(layers[: last + 1]))
            if key in effects.unread(then, evaluating):
                value = config_lib.get(config, key)
                raise effects.refusal(key, value, condition, layers[last].file)
        for key in left:
            config = config_lib.replaced(config, key, config_lib.get(Config(), key))
    return config


def _suggest(key: str, known: Sequence[str]) -> str:
    section, _, name = key.rpartition(".")
    same = [k for k in known if k.endswith(f".{name}")]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    other = _ALSO_CALLED.get(name)
    named = f"{section}.{other.partition('.')[2]}" if other else None
    found = [*([named] if named in known else []), *([other] if other else []), *same, *near]
    return f"; did you mean {found[0]!r}?" if found else "; --help lists them all"


def _split_config_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    files, rest, words = [], [], list(argv)
    while words:
        word = words.pop(0)
        name, _, value = word.partition("=")
        if name != "--config":
            rest.append(word)
        elif value or words:
            files.append(value or words.pop(0))
        else:
            raise BadInput("--config: expected a YAML file, got nothing")
    return files, rest


def _group_flags(words: Sequence[str]) -> Words:
    """``--a.b x y --c.d=z`` to ``{"a.b": ["x", "y"], "c.d": ["z"]}``."""
    grouped: Words = {}
    values: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            key, _, value = word[2:].partition("=")
            values = grouped[key.replace("-", "_")] = [value] if value else []
        elif values is None:
            raise BadInput(f"expected a flag like --run.steps, got {word!r:.80}; --help lists them")
        else:
            values.append(word)
    return grouped


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
            values = value if isinstance(value, list) else [value]
            flat[f"{section}.{key}"] = [str(item) for item in values]
    return flat


def _typed(settings: Words) -> Config:
    """Words to values, by the types of the fields; names the first setting that does not fit."""
    fields = dict(config_lib.settings())
    config: dict[str, dict[str, Any]] = {}
    for key, words in settings.items():
        section, name = key.split(".")
        kind = str(fields[key].type)
        try:
            config.setdefault(section, {})[name] = _value(kind, words)
        except ValueError:
            got = repr(" ".join(words)) if words else "nothing"
            raise BadInput(f"--{key}: expected {_expected(kind)}, got {got:.80}") from None
    sections: dict[str, Any] = {
        field.name: type(field.default) for field in dataclasses.fields(Config)
    }
    return Config(**{name: sections[name](**values) for name, values in config.items()})


def _value(kind: str, words: Sequence[str]) -> Any:
    """What words mean where this type is wanted; raises ``ValueError`` where they mean nothing."""
    if kind.startswith("tuple["):
        empty = [word.lower() for word in words] in (["none"], ["null"])
        return (
            () if empty else tuple(_scalar(kind[len("tuple[") : -len(", ...]")], w) for w in words)
        )
    [word] = words
    return _scalar(kind, word)


def _scalar(kind: str, word: str) -> Any:
    if kind.endswith(_OR_AUTO):
        return word if word == "auto" else _scalar(kind.removesuffix(_OR_AUTO), word)
    if kind.endswith(" | None"):
        return None if word.lower() in ("none", "null") else _scalar(kind[: -len(" | None")], word)
    if kind.startswith("Literal"):
        return _choices(kind)[_choices(kind).index(word)]
    if kind == "bool":
        return ("false", "true").index(word.lower()) == 1
    return {"int": int, "float": float, "str": str}[kind](word)


def _choices(kind: str) -> list[str]:
    return ast.literal_eval(kind[len("Literal") :])


def _expected(kind: str) -> str:
    """What a setting takes, in words: ``a number or none``."""
    words = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}
    words |= {"None": "none", "tuple[int, ...]": "whole numbers", "tuple[str, ...]": "words"}
    words |= {"tuple[float, ...]": "numbers", "Literal['auto']": "auto"}
    if kind.startswith("Literal"):
        return f"one of {', '.join(_choices(kind))}"
    return " or ".join(words[part] for part in kind.split(" | "))
