"""Imports users' code by name, and checks what it raises and returns.

Users' code is trusted, but it makes mistakes. A call of it gives a plain value or a ``Failure``:
one line with the user's file and line. All checks raise ``BadInput``: expected, got.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from marft_jax.errors import BadInput, described, exit_with, place
from marft_jax.formats import jsonlines
from marft_jax.formats.foreign import DEEPEST
from marft_jax.types import StepResult

_T = TypeVar("_T", bound=Callable[..., Any])
_S = TypeVar("_S")

EXTRAS = {
    "env.code": "marft_jax.extras.code.programs",
    "env.judged": "marft_jax.extras.judge.environment",
    "env.open_spiel": "marft_jax.extras.games.open_spiel",
    "env.pettingzoo": "marft_jax.extras.games.pettingzoo",
    "env.reasoning_gym": "marft_jax.extras.gym.environment",
    "env.verifiers": "marft_jax.extras.verifiers.environment",
    "sampler.http": "marft_jax.extras.remote.sampler:HttpSampler",
    "tool.mcp": "marft_jax.extras.mcp.source:source",
    "tool.python": "marft_jax.extras.code.tool:source",
    "sandbox.limits": "marft_jax.extras.code.sandbox.guest.filter",
    "form.check": "marft_jax.extras.structured.grammar:check",
    "form.violates": "marft_jax.extras.structured.grammar:violates",
    "form.constraint": "marft_jax.extras.structured.grammar:constraint",
    "model.gguf": "marft_jax.extras.gguf.source:open_file",
    "logger.wandb": "marft_jax.extras.loggers.packages:make_wandb",
    "logger.trackio": "marft_jax.extras.loggers.packages:make_trackio",
    "logger.mlflow": "marft_jax.extras.loggers.packages:make_mlflow",
    "run.storage": "marft_jax.extras.storage.mirror:Mirror",
    "lora.hub": "marft_jax.extras.export.hub:fetch",
    "step_reward.judge": "marft_jax.extras.judge.verdicts:step_reward",
    "program.source": "marft_jax.extras.gateway.program:source",
    "program.workflow": "marft_jax.extras.gateway.program:program",
    "state.pool": "marft_jax.extras.games.pool:past_selves",
    "evaluation.games": "marft_jax.extras.games.command",
    "command.check": "marft_jax.extras.check.command:main",
    "command.export": "marft_jax.extras.export.command:main",
    "command.plan": "marft_jax.extras.planning.command:main",
    "command.report": "marft_jax.extras.report.command:main",
    "command.serve": "marft_jax.extras.gateway.command:main",
}
"""Where the extras are: a module, or what it defines. ``env.NAME`` is the environment NAME,
``model.SUFFIX`` opens base models in files of that kind, ``sampler.NAME`` is the class of the
sampler NAME, and ``tool.NAME`` makes the tools of NAME from their options and the place of these,
for messages."""
_MOST_PARTS = 100_000  # of an info


def load_extra(name: str) -> Any:
    """Imports an entry of ``EXTRAS``."""
    module, _, attribute = EXTRAS[name].partition(":")
    extra = importlib.import_module(module)
    return getattr(extra, attribute) if attribute else extra


def run_command(name: str, argv: Sequence[str] | None = None) -> None:
    """Runs the command NAME, ``command.NAME`` of ``EXTRAS``."""
    try:
        command = load_extra(f"command.{name}")
    except KeyboardInterrupt:
        exit_with("stopped", code=130)
    command(argv)


def extras_of(kind: str) -> list[str]:
    """Lists the NAMEs of ``kind.NAME`` in ``EXTRAS``."""
    return [key.removeprefix(f"{kind}.") for key in EXTRAS if key.startswith(f"{kind}.")]


PYTHON = "<python>:"
"""Prefix of names that stand for objects of this process."""
_OBJECTS: dict[str, Any] = {}


def name_of(value: Any) -> str:
    """Names an object of Python by a text that stands for it in the settings of this process.

    A class or function that can be imported is ``module:name``, as in a file. For anything else
    ``given_object`` keeps it, under a name that is the same whenever the object is.
    """
    module, name = getattr(value, "__module__", ""), getattr(value, "__name__", "")
    if module != "__main__" and name and getattr(sys.modules.get(module), name, None) is value:
        return f"{module}:{name}"
    digest = hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()
    key = PYTHON + (name or f"{type(value).__name__}-{digest[:12]}")
    _OBJECTS[key] = value
    return key


def given_object(name: str, what: str) -> Any:
    """Returns the object that ``name_of`` named so; None for any other name.

    Raises:
        BadInput: it was given in another process.
    """
    if name.startswith(PYTHON) and name not in _OBJECTS:
        raise BadInput(
            f"{what} {name}: expected a name that can be imported, got an object of a Python "
            "session; continue this run with the same calls in Python; to export it, or to play it "
            f"with another one, add {what}"
        )
    return _OBJECTS.get(name)


def load_plugin(name: str, what: str, known: Iterable[str], kind: str = "function") -> Any:
    """Imports ``package.module:name``, also from the current directory.

    Args:
        name: the value of the setting.
        what, known, kind: the setting, its built-in names, and the kind of thing, for messages.

    Raises:
        BadInput: the name has another form, or cannot be imported.
    """
    if (plugin := given_object(name, what)) is not None:
        return plugin
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        expected = " or ".join(filter(None, (", ".join(known), f"package.module:{kind}")))
        raise BadInput(f"{what}: expected {expected}, got {name!r:.80}")
    if os.getcwd() not in sys.path and "" not in sys.path:  # however Python was started
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module may do anything, sys.exit included
        why = described(error) + place(error)
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(
            f"{error.name}."
        ):
            why += f"; start in its folder ({os.getcwd()} has none), or name that in PYTHONPATH"
        raise BadInput(f"{what} {name}: cannot import {module_name}: {why}") from error
    plugin = getattr(module, attribute, None)
    if plugin is None:
        where = getattr(module, "__file__", None) or module_name  # built-in modules have no file
        raise BadInput(f"{what} {name}: {where} has no {attribute!r}")
    return plugin


def settings_of(plugin: Any, what: str, kind: type[_S], usual: type[_S] | None = None) -> type[_S]:
    """Returns the dataclass of settings that a user's environment, algorithm or sampler declares.

    Args:
        what: the setting that names it, for messages.
        kind: what the dataclass extends.
        usual: the dataclass of one that declares none; None: it must.
    """
    settings = getattr(plugin, "Settings", getattr(plugin, "settings", usual))
    if isinstance(settings, type) and issubclass(settings, kind):
        return settings
    wanted = f"expected settings that extend {kind.__module__}.{kind.__name__}"
    raise BadInput(f"{what}: {wanted}, got {shown(plugin if settings is None else settings)}")


def load_function(name: str, what: str, table: Mapping[str, _T]) -> _T:
    """Finds a function in a table, or imports ``package.module:function``.

    Raises:
        BadInput: there is no such function.
    """
    if name in table:
        return table[name]
    function: _T = load_plugin(name, what, table)
    if not callable(function):
        raise BadInput(f"{what}: {name!r} is no function; name one")
    return function


def check_takes(function: Any, what: str, *parameters: str) -> None:
    """Raises ``BadInput`` for a user's function that cannot be called with these parameters."""
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError:
        got = f"one of {inspect.signature(function)}" if callable(function) else shown(function)
        wanted = f"a function of ({', '.join(parameters)})"
        raise BadInput(f"{what}: expected {wanted}, got {got}{place(function)}") from None
    except ValueError:  # Python does not know its signature
        pass


class Failure(Exception):
    """Failure of a user's code, on one line; ``is_bad_input``: it returned something that we do not
    accept, else it raised."""

    def __init__(self, text: str, is_bad_input: bool = False) -> None:
        super().__init__(text)
        self.text, self.is_bad_input = text, is_bad_input


def failure_of(error: BaseException) -> Failure:
    """Describes an exception of a user's code, with its file and line."""
    return Failure(described(error) + place(error), isinstance(error, BadInput))


def called(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a user's function; an exception of it is one line. Functions of this package fail as
    they do.

    Raises:
        BadInput: the user's function raised something.
    """
    if getattr(function, "__module__", "").partition(".")[0] == __name__.partition(".")[0]:
        return function(*args)
    try:
        return function(*args)
    except (Exception, SystemExit) as error:
        raise BadInput(f"{what}: {failure_of(error).text}") from error


def shown(value: Any) -> str:
    """Writes a value for messages, cut to 60 characters."""
    return f"{value!r:.60}"


def text_of(what: str, value: Any) -> str:
    """Checks a text, and replaces lone surrogates by U+FFFD, so that any tokenizer takes it."""
    if not isinstance(value, str):
        raise BadInput(f"{what}: expected a text, got {shown(value)}")
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


_LARGEST = float(np.finfo(np.float32).max)  # rewards are summed up and learned in float32


def number_of(what: str, value: Any) -> float:
    """Checks that a value is a number, finite in float32."""
    wanted = "a number"
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, (str, bytes)):
            if abs(number := float(value)) <= _LARGEST:
                return number
            wanted = "a finite number"
    raise BadInput(f"{what}: expected {wanted}, got {shown(value)}")


def info_of(what: str, value: Any) -> dict[str, Any]:
    """Checks an info and converts it to plain values for transcripts, within bounds."""
    if not isinstance(value, Mapping):
        raise BadInput(f"{what}: expected a mapping, got {shown(value)}")
    try:
        return jsonlines.plain(dict(value), _MOST_PARTS, DEEPEST // 2)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{what}: expected what JSON can hold: {error}") from error


def result_of(result: Any, acted: Collection[str]) -> StepResult:
    """Checks the result of an environment's step.

    Args:
        result: the value that ``step`` returned.
        acted: names of the agents that acted in the step.
    """
    if not isinstance(result, StepResult):
        raise BadInput(f"expected a marft_jax.types.StepResult, got {shown(result)}")
    if not isinstance(result.done, (bool, np.bool_)):
        raise BadInput(f"done: expected True or False, got {shown(result.done)}")
    paid = result.agent_rewards
    if not isinstance(paid, Mapping):
        raise BadInput(f"agent_rewards: expected names to numbers, got {shown(paid)}")
    for name in paid:
        if name not in acted:
            raise BadInput(
                f"agent_rewards: expected names of agents that acted in this step "
                f"({', '.join(dict.fromkeys(acted))}), got {shown(name)}"
            )
    return StepResult(
        text_of("observation", result.observation),
        number_of("reward", result.reward),
        bool(result.done),
        info_of("info", result.info),
        {str(name): number_of(f"agent_rewards[{name!r}]", paid[name]) for name in paid},
        text_of("feedback", result.feedback),
    )
