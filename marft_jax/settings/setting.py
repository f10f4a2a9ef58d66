"""Settings: the types of their values, how they are read and described, and what they need.

A section is a frozen dataclass. The type of a field has its bounds, the text below it is its help:

    @dataclasses.dataclass(frozen=True)
    class Debate(Section):
        rounds: Count = 2
        \"\"\"Rounds in which every agent speaks.\"\"\"

Pydantic reads the values, checks them, and writes the JSON schema from which help and errors take
their words.
"""

from __future__ import annotations

import ast
import dataclasses
import datetime
import difflib
import functools
import inspect
import itertools
import numbers
import operator
import os
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from marft_jax.errors import BadInput

T = TypeVar("T")
C = TypeVar("C")
LARGEST = 2**31 - 1
"""Largest whole number that a device counts with."""


def _number(value: object) -> object:
    """Refuses true and false, which Python counts as 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "a number")
    return value


NUMBER = BeforeValidator(_number)
Natural = Annotated[int, Field(ge=0, le=LARGEST), NUMBER]
Count = Annotated[int, Field(ge=1, le=LARGEST), NUMBER]
NonNegative = Annotated[float, Field(ge=0), NUMBER]
Positive = Annotated[float, Field(gt=0), NUMBER]
Fraction = Annotated[float, Field(ge=0, le=1), NUMBER]
Seconds = Annotated[float, Field(ge=0.1), NUMBER]
PathText = Annotated[str, AfterValidator(os.path.expanduser)]
"""A text that is, or may be, a path; ``~`` is the home folder, also where no shell reads it."""

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+:/|hub:", re.IGNORECASE)  # one letter is a drive


class Section:
    """Base of every section: its numbers are finite, and it has no other keys.

    Attributes:
        decides: what its settings decide, unless ``setting`` says another of one: see there.
    """

    decides: ClassVar[str]

    __pydantic_config__ = ConfigDict(allow_inf_nan=False, extra="forbid")


class Derived(int):
    """A number that follows from other settings, because nobody gave one."""


_REQUIRED: Any = dataclasses.MISSING


def setting(
    default: T = _REQUIRED,
    *,
    needs: str | None = None,
    path: Callable[[str], bool] | None = None,
    decides: str | None = None,
) -> T:
    """Returns a field of a section that has more than a type and a default.

    Args:
        needs: the setting without which this one has no effect, such as ``algo.kl_coef``; or that
            setting with its values, such as ``algo.baseline moving or role``; see ``unread``.
            ``agents.past`` is a key of an agent in the team file, ``algo.has_critic`` a fact.
        path: tells if a text is a file or folder; a run keeps its absolute path.
        decides: words for what the setting decides. arrays: what a run has saved, so that it cannot
            change. run: what the files of a run describe, so that it cannot change while the run
            goes on. answers: what a team answers, so that answers are not continued with another
            value. start: where one start runs and what it reads, so that nobody asks if it changed.
            nothing: none of these.
    """
    metadata = {"needs": needs, "path": path, "decides": decides}
    return dataclasses.field(default=default, metadata=metadata)  # type: ignore[return-value]


def settings(config: Any) -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Yields every setting of a config: ``section.name`` and its field."""
    for section in dataclasses.fields(config):
        for field in dataclasses.fields(getattr(config, section.name)):
            yield f"{section.name}.{field.name}", field


def that_decide(what: str, config: Any) -> set[str]:
    """Returns the settings that decide this, see ``setting``.

    Args:
        config: a config, or its class: then only the settings are known that each kind of
            environment, algorithm and sampler has.
    """
    kinds = get_type_hints(config) if isinstance(config, type) else vars(config)
    return {
        f"{section}.{field.name}"
        for section, kind in kinds.items()
        for field in dataclasses.fields(kind)
        if what in (field.metadata.get("decides") or kind.decides).split()
    }


def get(config: Any, key: str) -> Any:
    """Returns the value of ``section.name``."""
    return operator.attrgetter(key)(config)


def replaced(config: C, key: str, value: Any) -> C:
    """Returns the config with another value of ``section.name``."""
    section, name = key.split(".")
    changed = dataclasses.replace(getattr(config, section), **{name: value})
    return dataclasses.replace(config, **{section: changed})  # type: ignore[type-var]


def with_absolute_paths(tree: T, folder: str | Path = "") -> T:
    """Returns settings with absolute paths of the files and folders that they name.

    Args:
        tree: a dataclass of settings, with others in tuples and mappings.
        folder: where relative paths are; "": the current directory.
    """

    def absolute(value: Any, is_path: Callable[[str], bool] | None = None) -> Any:
        if isinstance(value, tuple):
            return tuple(absolute(part, is_path) for part in cast(tuple[Any, ...], value))
        if isinstance(value, dict):
            return {name: absolute(part) for name, part in cast(dict[str, Any], value).items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changed = {
                field.name: absolute(part, field.metadata.get("path") if given else None)
                for field in dataclasses.fields(value)
                for part in [getattr(value, field.name)]
                for given in [part != field.default]
            }
            return dataclasses.replace(value, **changed)
        return _absolute(value, is_path, folder) if is_path and isinstance(value, str) else value

    return absolute(tree)


def _absolute(text: str, is_path: Callable[[str], bool], folder: str | Path) -> str:
    """Makes a path absolute; a benchmark's may end with samples and temperature."""
    name, more = re.findall(r"(?s)^(.+?)((?::\d+)?(?:@[\d.]+)?)\Z", text)[0]
    path = os.path.join(folder, name)
    return f"{os.path.abspath(path)}{more}" if is_path(path) else text


def check_local(what: str, path: object, *, is_run: bool = False) -> None:
    """Raises ``BadInput`` for an address, such as ``s3://bucket/run``, where files are written.

    Args:
        is_run: it is a run directory, which object storage can hold.
    """
    if _ADDRESS.match(str(path).strip()) and not (is_run and is_address(path)):
        advice = "an address is s3://BUCKET/PATH" if is_run else "name one, and copy it from there"
        raise BadInput(f"{what}: expected a path on this machine, got {str(path)!r:.80}; {advice}")


def is_address(run: object) -> bool:
    """True for a run directory in object storage, such as ``s3://bucket/run``."""
    return bool(re.match(r"(?!file:)[a-z][a-z0-9+.-]+://[^/]", str(run), re.IGNORECASE))


def words_of(key: str, value: Any) -> list[str]:
    """Spells a value from YAML or from Python in words, as the command line has them.

    Raises:
        BadInput: it is nothing that words stand for.
    """
    parts = value if isinstance(value, list | tuple) else [value]
    for part in parts:
        if not isinstance(part, _PLAIN):
            wanted = "text, a number, true, false or none"
            raise BadInput(f"--{key}: expected {wanted}, got {part!r:.60}")
    return [str(part) for part in parts]


def needs_of(field: dataclasses.Field[Any]) -> str:
    """Returns what a setting needs, as help and warnings show it, or ""."""
    return re.sub(r"\b(?!agents|algo.has_)(\w+\.\w)", r"--\1", field.metadata.get("needs") or "")


def spelled(value: Any) -> str:
    """Spells a value as help and warnings show it."""
    return " ".join(words_of("", value)).lower() or "none"


def from_words(section: str, kind: type[T], words: Mapping[str, Sequence[str]]) -> T:
    """Builds a section from its settings, each under ``section.name``.

    Raises:
        BadInput: the first that is not a value of its type.
    """
    given: dict[str, Any] = {}
    adapter, known = _adapter(kind), properties(kind)
    for name, schema in known.items():
        if (key := f"{section}.{name}") in words:
            given[name] = _value(key, words[key], schema)
    try:
        return adapter.validate_python(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        wrong = _wrong(f"{section}.{name}", words[f"{section}.{name}"], known[name])
        is_large = first.get("ctx", {}).get("le") == LARGEST
        raise BadInput(f"{wrong}; the largest is {LARGEST}") if is_large else wrong from None


def _value(key: str, words: Sequence[str], schema: Mapping[str, Any]) -> Any:
    """Turns words into what pydantic reads: a text, several, or None."""
    parts = schema.get("anyOf", [schema])
    types, several = [part.get("type") for part in parts], "items" in schema
    if len(words) == 1 and words[0].lower() in ("none", "null") and (several or "null" in types):
        return () if several else None
    if "None" in words:  # of YAML: a key without a value
        raise BadInput(f"--{key}: expected {expected(schema)}, got nothing; leave it out")
    is_text = "string" in types or several and schema["items"]["type"] == "string"
    for word in words if is_text else ():
        if not (word if several else word.strip()) and word != schema["default"]:
            raise BadInput(f"--{key}: expected text, got an empty one; leave it out")
        if "\0" in word or any("\ud800" <= c <= "\udfff" for c in word):
            raise BadInput(f"--{key}: expected text in UTF-8 without NUL, got {word!r:.60}")
    if not several and len(words) != 1:
        raise _wrong(key, words, schema)
    return tuple(words) if several else words[0]


def checked(what: str, kind: TypeAdapter[T], value: object) -> T:
    """Returns a value of a type.

    Raises:
        BadInput: it is another kind of value, or out of bounds.
    """
    try:
        return kind.validate_python(value, strict=True)
    except ValidationError as error:
        raise BadInput(f"{what}: {fault_of(error)}") from None


def read(kind: type[T], tree: object, where: str) -> T:
    """Reads a tree of plain values as a dataclass of settings.

    Raises:
        BadInput: the first value that does not fit, with its place.
    """
    try:
        return _adapter(kind).validate_python(tree)
    except ValidationError as error:
        raise BadInput(f"{where}: {fault_of(error, kind)}") from None


def fault_of(error: ValidationError, kind: Any = None) -> str:
    """Describes a fault of pydantic's in a value of this type: where, what was expected, and
    what came. An unknown key comes first: it may be why another one is missing."""
    faults = error.errors(include_url=False)
    unknown = [fault for fault in faults if fault["type"] in _UNKNOWN]
    first = (unknown or faults)[0]
    place = first["loc"]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    if unknown:
        return f"{where.lstrip('.')}: {unknown_key(str(place[-1]), _keys(_at(kind, place[:-1])))}"
    what = re.sub("^(Input should be|Value error,) ", "", first["msg"])
    if first["type"] != "value_error" and (part := _at(kind, place)) is not None:
        what = expected(TypeAdapter(part).json_schema())
    return f"{where.lstrip('.')}: expected {what}, got {first['input']!r:.60}".removeprefix(": ")


def _at(kind: Any, place: Sequence[int | str]) -> Any:
    """Returns the type at a place of a type, such as ``("bases", "large")``; or None."""
    for part in place:
        inner = get_args(_bare(kind))  # of a list, or of a mapping of any names
        kind = inner[0 if inner[-1] is ... else -1] if inner else _keys(kind).get(str(part))
    return kind


def _keys(kind: Any) -> dict[str, Any]:
    """Returns the types of the keys of a dataclass or a named tuple."""
    bare = _bare(kind)
    hints = get_type_hints(bare, include_extras=True) if isinstance(bare, type) else {}
    return {name: hint for name, hint in hints.items() if get_origin(hint) is not ClassVar}


def _bare(kind: Any) -> Any:
    """Returns a type without bounds and none."""
    while get_origin(kind) in (Annotated, Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not NoneType)
    return kind


def unknown_key(key: str, known: Collection[str]) -> str:
    """Says that there is no such key, with the nearest that there is, or with all."""
    near = nearest(key, known)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
    return f"unknown key; {hint}"


def nearest(name: str, known: Collection[str]) -> list[str]:
    """Returns the name that begins like this, or that is spelled nearly so; or none."""
    longer = sorted((k for k in known if len(name) > 1 and k.startswith(name)), key=len)
    return longer[:1] or difflib.get_close_matches(name, known, n=1, cutoff=0.65)


def _wrong(key: str, words: Sequence[str], schema: Mapping[str, Any]) -> BadInput:
    got = repr(" ".join(words)) if words else "nothing"
    return BadInput(f"--{key}: expected {expected(schema)}, got {got:.80}")


@functools.cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)


@functools.cache
def properties(kind: type) -> dict[str, dict[str, Any]]:
    """Returns the JSON schema of each setting of a section."""
    return _adapter(kind).json_schema()["properties"]


def expected(schema: Mapping[str, Any]) -> str:
    """Names the values of a type by its JSON schema: ``a number from 0 or none``."""
    if parts := schema.get("anyOf"):
        return " or ".join(" or ".join(p["enum"]) if "enum" in p else expected(p) for p in parts)
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    if "const" in schema:
        return schema["const"]
    if "items" in schema:
        item = schema["items"]
        several = _SEVERAL.get(item.get("type"), "a list")
        return several + _bounds(item) + _bounds(schema)
    kind = "object" if "$ref" in schema else schema.get("type", "")
    return _ONE.get(kind, "a value of its type") + _bounds(schema)


def _bounds(schema: Mapping[str, Any]) -> str:
    words = {
        "minimum": "from",
        "exclusiveMinimum": "above",
        "maximum": "to",
        "maxItems": "of at most",
    }
    given = {name: schema[name] for name in words if schema.get(name, LARGEST) != LARGEST}
    return "".join(f" {words[name]} {bound}" for name, bound in given.items())


def texts(kind: type) -> dict[str, str]:
    """Returns the text below each setting of a section."""
    by_name: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for field, text in itertools.pairwise(body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(words))):
                    by_name[name] = " ".join(words.split())
    return by_name


def schema_of(kind: type) -> dict[str, Any]:
    """Returns the JSON schema of a section, with the text of each setting.

    In YAML a single value may stand for a list of one, and ``none`` for an empty list.
    """
    text, by_name = texts(kind), dict[str, Any]()
    for name, schema in properties(kind).items():
        if "items" in schema:
            several = {"type": "array", "items": schema["items"]}
            schema = {"anyOf": [several, schema["items"], {"type": "null"}]}
        by_name[name] = {"description": text.get(name, "")} | schema
    return {"type": "object", "properties": by_name, "additionalProperties": False}


def help_lines(before: str, kind: type) -> Iterator[str]:
    """Yields help on the settings of a dataclass: each, with this ``before`` its name, with its
    values, its default and its text."""
    text = texts(kind)
    for field in dataclasses.fields(kind):
        needs = f"; needs {needed}" if (needed := needs_of(field)) else ""
        values = expected(properties(kind)[field.name])
        default = "" if field.default is dataclasses.MISSING else spelled(field.default)
        yield f"    {before}{field.name}  {values} ({default or 'no default'}{needs})"
        yield from textwrap.wrap(text.get(field.name, ""), 92, **_INDENTED)


def suggestion(key: str, known: Sequence[str]) -> str:
    """Suggests settings: of this name in other sections, the nearest in its section, or in all."""
    section, _, name = key.rpartition(".")
    names = {k: k.partition(".")[2] for k in known}
    of_section = {k: n for k, n in names.items() if k.startswith(f"{section}.")}
    searched = [(names, [name]), (of_section, nearest(name, of_section.values()))]
    searched += [(names, nearest(name, names.values()))]
    similar = next(filter(None, ([k for k in at if at[k] in like] for at, like in searched)), [])
    like = " or ".join(map(repr, similar[:3]))
    return f"; did you mean {like}?" if similar else "; --help lists them"


_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden", "invalid_key")
_INDENTED: Any = {"initial_indent": " " * 8, "subsequent_indent": " " * 8}
_ONE = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "null": "none",
    "array": "a list",
    "object": "a mapping",
}
_SEVERAL = {"integer": "whole numbers", "number": "numbers", "string": "words"}
_PLAIN = (str, np.bool_, numbers.Real, os.PathLike, datetime.date, type(None))
