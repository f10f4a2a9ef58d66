"""Members of a team: their prompts, their sampling, and their adapters."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np

from marft_jax import config
from marft_jax.errors import BadInput
from marft_jax.types import MAIN, Sampling

_Check = tuple[str, Callable[[Any], bool]]


def is_list(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def is_whole(value: Any) -> bool:
    """Tells if a value is a whole number, of Python or NumPy."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return is_whole(value) or isinstance(value, (float, np.floating))


_LONGEST = 60  # characters of a name: at most 4 bytes each, and a folder's name has at most 255
_TAKEN = re.compile(
    r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³])(\..*)?|base|team\.yaml|team\.py|turns\.json|readme\.md",
    re.IGNORECASE,
)
"""Reserved names: devices of Windows, and what an export writes beside the agents' folders."""


def _is_name(value: Any) -> bool:
    """Tells if a name is valid as a folder on every system, and not reserved."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= _LONGEST
        and value == value.strip()
        and value.isprintable()
        and not set(value) & set('<>:"/\\|?*')
        and not value.startswith(".")
        and not value.endswith(".")
        and not _TAKEN.fullmatch(value)
    )


_MOST_STOPS, _LONGEST_STOP = 16, 1000
_COLDEST = 1e-30  # least temperature above 0 (greedy): logits stay finite in float32


def _is_tuple(value: Any) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(value, tuple)


def _are_stops(value: Any) -> bool:
    few = _is_tuple(value) and len(value) <= _MOST_STOPS
    return few and all(isinstance(stop, str) and 0 < len(stop) <= _LONGEST_STOP for stop in value)


def _is_temperature(value: Any) -> bool:
    return _is_number(value) and (value == 0 or _COLDEST <= value <= config.HOTTEST)


SAMPLING: dict[str, _Check] = {
    "max_new_tokens": ("a whole number > 0", lambda v: is_whole(v) and v > 0),
    "temperature": (f"0, or a number from {_COLDEST} to {config.HOTTEST}", _is_temperature),
    "top_p": ("a number with 0 < top_p <= 1", lambda v: _is_number(v) and 0 < v <= 1),
    "top_k": ("a whole number from 0 to 2³¹ - 1", lambda v: is_whole(v) and 0 <= v < 1 << 31),
    "min_p": ("a number from 0 to 1", lambda v: _is_number(v) and 0 <= v <= 1),
    "stop": (f"up to {_MOST_STOPS} texts of 1 to {_LONGEST_STOP} characters", _are_stops),
}
"""For each field of ``types.Sampling``: the expected value in words, and its test."""
_TEXT: _Check = "text", lambda v: isinstance(v, str)
_TRUTH: _Check = "true or false", lambda v: isinstance(v, bool)
_NAME: _Check = (
    f'a name that a folder can have: at most {_LONGEST} characters, none of <>:"/\\|?*, no dot or '
    "space at its ends, and not base or a device's",
    _is_name,
)
_FIELDS: dict[str, _Check] = {
    **SAMPLING,
    "name": _NAME,
    "prompt": _TEXT,
    "description": _TEXT,
    "answers": _TRUTH,
    "adapter": _NAME,
    "trainable": _TRUTH,
    "past": _NAME,
    "init": ("a folder with an adapter", lambda v: isinstance(v, str) and v != ""),
    "reward": ("a step reward's name", lambda v: isinstance(v, str) and v != ""),
    "tools": (
        "a list of functions as package.module:function",
        lambda v: _is_tuple(v) and all(isinstance(name, str) for name in v),
    ),
    "base": (f"{MAIN}, the base of --model.base: a team has one base", lambda v: v == MAIN),
}


@dataclasses.dataclass(frozen=True)
class Profile:
    """A member of a team.

    Raises:
        BadInput: a field has the wrong type or is out of range.
    """

    name: str  # in prompts, metrics and checkpoints
    prompt: str = ""  # system prompt
    description: str = ""  # one sentence for an orchestrator, and for introductions
    answers: bool = False  # its actions are the team's answer and are graded
    adapter: str | None = None  # name of an adapter that agents share; None: its own adapter
    trainable: bool = True  # its adapter learns
    init: str | None = None  # peft folder from which its adapter starts, relative to the team file
    reward: str | None = None  # its step reward, with ``algo.credit per_step``
    max_new_tokens: int | None = None  # sampling, as in ``types.Sampling``; None: the team's
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: tuple[str, ...] | None = None
    past: str | None = None  # agent as whose earlier versions it plays; it does not learn
    tools: tuple[str, ...] | None = None  # functions that it may call: package.module:function
    base: str | None = None  # the base that it runs on; None is that of ``--model.base``

    @property
    def learns(self) -> bool:
        """True if training changes its adapter."""
        return self.trainable and self.past is None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, (expected, fits) = getattr(self, field.name), _FIELDS[field.name]
            if not (fits(value) or value is None is field.default):
                raise BadInput(f"{field.name}: expected {expected}, got {value!r:.80}")

    def sampling(self, team: config.Team) -> Sampling:
        """Returns the agent's sampling: its own settings, else the team's."""
        own = {field: getattr(self, field) for field in Sampling._fields}
        return Sampling(
            **{f: getattr(team, f) if value is None else value for f, value in own.items()}
        )


def last_answering(profiles: Sequence[Profile]) -> int:
    """Returns the number of the last agent that answers: the agent that plays ``solo``."""
    return max(i for i, profile in enumerate(profiles) if profile.answers)


BUILT_IN = (
    Profile("planner", prompt="plan", description="Writes the next step down."),
    Profile("solver", prompt="solve", description="Gives the answer.", answers=True),
)
