"""Settings: their defaults, bounds and needs, and their values in words.

rounds: int = setting(2, least=1)
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import datetime
import difflib
import inspect
import itertools
import math
import numbers
import operator
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from marft_jax.errors import BadInput

T = TypeVar("T")
C = TypeVar("C")
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+:/|hub:", re.IGNORECASE)  # one letter is a drive
_LARGEST = 2**31 - 1  # of whole numbers: what a device counts with


def setting(
    default: T,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    needs: str | None = None,
    blank: bool = False,
    path: Callable[[Path], bool] | None = None,
) -> T:
    """A field of a section.

    Args:
        least, above, most: bounds of a number, or of each in a tuple. A number is finite, and a
            whole one from 0 to what a device can count, unless these say otherwise.
        needs: another setting without which nobody reads this one, such as ``algo.kl_coef``; or
            one with its values, such as ``algo.credit per_step``, ``algo.baseline moving or role``.
        blank: texts may be white space alone.
        path: where this is true, a text is a file or folder; a run keeps where it lies.
    """
    metadata = dict(least=least, above=above, most=most, needs=needs, blank=blank, path=path)
    return dataclasses.field(default=default, metadata=metadata)  # type: ignore[return-value]


def section(about: str, default: Any = dataclasses.MISSING) -> Any:
    """A section of the settings; ``about`` is what it is for, in a few words."""
    return dataclasses.field(default=default, metadata={"about": about})


def fault(field: dataclasses.Field[Any], value: Any) -> str | None:
    """Describes a wrong value: ``expected a number at least 1, got 0``; None for a right one."""
    if value == field.default:
        return None
    for part in value if isinstance(value, tuple) else (value,):
        wrong = None
        if isinstance(part, str):
            wrong = _text_fault(part, field.metadata.get("blank", False))
        elif isinstance(part, (int, float)) and not isinstance(part, bool):
            wrong = _number_fault(part, *map(field.metadata.get, ("least", "above", "most")))
        if wrong:
            return wrong
    return None


def _number_fault(
    value: float, least: float | None, above: float | None, most: float | None
) -> str | None:
    if not math.isfinite(value):
        return f"expected a number, got {value}"
    if isinstance(value, int):
        least, most = least or 0, most or _LARGEST
    bounds = {"more than": above, "at least": least, "at most": most}
    low, high = -math.inf if least is None else least, math.inf if most is None else most
    if low <= value <= high and (above is None or value > above):
        return None
    words = " and ".join(f"{how} {bound}" for how, bound in bounds.items() if bound is not None)
    return f"expected a number {words}, got {value!r:.40}"


def _text_fault(value: str, blank: bool) -> str | None:
    if not (value if blank else value.strip()):
        return "expected a text, got an empty one; leave it out"
    if "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
        return f"expected text in UTF-8 without NUL, got {value!r:.60}"
    return None


def settings(config: Any) -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Yields every setting of a config: ``section.name`` and its field."""
    for section in dataclasses.fields(config):
        for field in dataclasses.fields(getattr(config, section.name)):
            yield f"{section.name}.{field.name}", field


def get(config: Any, key: str) -> Any:
    """Returns the value of ``section.name``."""
    return operator.attrgetter(key)(config)


def replaced(config: C, key: str, value: Any) -> C:
    """Returns the config with another value of ``section.name``."""
    section, name = key.split(".")
    changed = dataclasses.replace(getattr(config, section), **{name: value})
    return dataclasses.replace(config, **{section: changed})  # type: ignore[type-var]


def with_absolute_paths(config: C) -> C:
    """Returns the config with the files and folders that it names spelled from the root."""
    for key, field in settings(config):
        is_path, value = field.metadata.get("path"), get(config, key)
        if is_path and value != field.default:
            texts = [value] if isinstance(value, str) else value
            found = [_absolute(text, is_path) for text in texts]
            config = replaced(config, key, found[0] if isinstance(value, str) else tuple(found))
    return config


def _absolute(text: str, is_path: Callable[[Path], bool]) -> str:
    """Spells a file or folder from the root; behind a benchmark's may be samples and heat."""
    name, more = re.findall(r"(?s)^(.+?)((?::\d+)?(?:@[\d.]+)?)\Z", text)[0]
    with contextlib.suppress(OSError):  # too long a name
        if is_path(path := Path(name).expanduser()):
            return f"{os.path.abspath(path)}{more}"
    return text


def check_local(what: str, path: object) -> None:
    """Raises ``BadInput`` for an address, such as ``s3://bucket/run``, where files are written."""
    if _ADDRESS.match(str(path).strip()):
        raise BadInput(
            f"{what}: expected a path on this machine, got {str(path)!r:.80}; object storage and "
            "hubs cannot be written to: name a local path, and copy it from there"
        )


def check_bounds(config: Any) -> None:
    """Raises ``BadInput`` for the first value that is out of its bounds."""
    for key, field in settings(config):
        if wrong := fault(field, get(config, key)):
            raise BadInput(f"--{key}: {wrong}")


def unmet_needs(config: Any, known: Mapping[str, str]) -> dict[str, str]:
    """Finds settings that are not at their default and lack what they need, with what that is.

    Args:
        known: settings of which that is known already.
    """
    found: dict[str, str] = {}
    for key, field in settings(config):
        if get(config, key) == field.default:
            continue
        needed = field.metadata.get("needs") or ""
        if key in known:
            found[key] = known[key]
        elif needed and (needed.partition(" ")[0] in found or not _is_on(config, needed)):
            found[key] = f"--{needed}"
    return found


def _is_on(config: Any, needed: str) -> bool:
    """Tells if ``section.name`` is set, or ``section.name value`` is its value."""
    key, _, value = needed.partition(" ")
    return get(config, key) in value.split(" or ") if value else bool(get(config, key))


def kind_of(field: dataclasses.Field[Any]) -> str:
    """Returns the type of a field as its source spells it."""
    kind: Any = field.type
    if isinstance(kind, str):
        return kind
    return kind.__name__ if type(kind) is type else str(kind).replace("typing.", "")


def value_of(kind: str, words: Sequence[str]) -> Any:
    """Reads a value of a field's type from words; raises ``ValueError`` where they mean none."""
    if kind.startswith("tuple["):
        item = kind.removeprefix("tuple[").removesuffix(", ...]")
        none = len(words) == 1 and words[0].lower() in _NONE
        return () if none else tuple(value_of(item, [word]) for word in words)
    [word] = words
    for part in reversed(kind.split(" | ")):  # of `float | None` the none first
        with contextlib.suppress(ValueError):
            return _choice(part, word) if part.startswith("Literal") else _READ[part](word)
    raise ValueError


def _choice(kind: str, word: str) -> str:
    choices = _choices(kind)
    return choices[choices.index(word)]


def _choices(kind: str) -> list[str]:
    return ast.literal_eval(kind.removeprefix("Literal"))


def words_of(key: str, value: Any) -> list[str]:
    """Spells a value from YAML or from Python in the words that ``value_of`` reads.

    Raises:
        BadInput: it is nothing that words stand for.
    """
    parts = value if isinstance(value, list | tuple) else [value]
    for part in parts:
        long = isinstance(part, int) and abs(part) >> 1024
        if long or not isinstance(part, _PLAIN):
            got = "one of hundreds of digits" if long else f"{part!r:.60}"
            raise BadInput(f"--{key}: expected text, a number, true, false or none, got {got}")
    return [str(part) for part in parts]


def from_words(section: str, kind: type[T], words: Mapping[str, Sequence[str]]) -> T:
    """Builds a section from its settings, each under ``section.name``.

    Raises:
        BadInput: the first that is no value of its type.
    """
    given: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        key, wanted = f"{section}.{field.name}", kind_of(field)
        if key in words:
            try:
                given[field.name] = value_of(wanted, words[key])
            except ValueError:
                got = repr(" ".join(words[key])) if words[key] else "nothing"
                raise BadInput(f"--{key}: expected {expected(wanted)}, got {got:.80}") from None
    return kind(**given)


def help_lines(section: str, kind: Any) -> Iterator[str]:
    """Yields help on a section's settings: each with its values, its default and its text."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for field, text in itertools.pairwise(body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(words))):
                    texts[name] = " ".join(words.split())
    for field in dataclasses.fields(kind):
        default = " ".join(words_of(field.name, field.default)).lower() or "none"
        needs = f"; needs --{needed}" if (needed := field.metadata.get("needs")) else ""
        yield f"    --{section}.{field.name}  {expected(kind_of(field))} ({default}{needs})"
        text = texts.get(field.name, "")
        yield from textwrap.wrap(text, 92, initial_indent=" " * 8, subsequent_indent=" " * 8)


def suggestion(key: str, known: Sequence[str]) -> str:
    """Suggests a setting: by another program's name, in another section, or the nearest."""
    section, _, name = key.rpartition(".")
    other = _ALSO_CALLED.get(name, "")
    own = f"{section}.{other.partition('.')[2]}"
    same = [k for k in known if k.endswith(f".{name}")]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    found = [k for k in (own, other, *same, *near) if k in known]
    return f"; did you mean {found[0]!r}?" if found else "; --help lists them"


def expected(kind: str) -> str:
    """Names the values of a type: ``a number or none``."""
    if kind.startswith("Literal") and " | " not in kind:
        return f"one of {', '.join(_choices(kind))}"
    return " or ".join(_IN_WORDS.get(p) or " or ".join(_choices(p)) for p in kind.split(" | "))


def _none(word: str) -> None:
    if word.lower() not in _NONE:
        raise ValueError


_NONE = ("none", "null")
_READ: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": lambda word: ("false", "true").index(word.lower()) == 1,
    "None": _none,
}
_IN_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "None": "none",
    "tuple[int, ...]": "whole numbers",
    "tuple[float, ...]": "numbers",
    "tuple[str, ...]": "words",
}
_PLAIN = (str, bool, np.bool_, numbers.Real, os.PathLike, datetime.date, type(None))
_ALSO_CALLED = {
    "learning_rate": "algo.lr",
    "lr_scheduler_type": "algo.lr_schedule",
    "warmup_steps": "algo.lr_warmup",
    "lr_warmup_steps": "algo.lr_warmup",
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
