"""Members of a team: prompts, how they sample, and which adapter each trains."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np

from marft_jax import config
from marft_jax.errors import BadInput
from marft_jax.types import Sampling

_Check = tuple[str, Callable[[Any], bool]]


def is_list(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def is_whole(value: Any) -> bool:
    """True for whole numbers, of Python and NumPy."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return is_whole(value) or isinstance(value, (float, np.floating))


_LONGEST = 60  # characters of a name; of at most 4 bytes each, and a folder's name has 255
_TAKEN = re.compile(
    r"(con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³])(\..*)?|base|team\.yaml|team\.py|turns\.json|readme\.md",
    re.IGNORECASE,
)
"""Devices of Windows, and what an export writes beside the folders of agents and adapters."""


def _is_name(value: Any) -> bool:
    """True for a name that can be a folder on every system, beside those of the others."""
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
_COLDEST = 1e-30  # above 0, which is greedy; logits divided by it are finite in float32


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
"""Each field of ``types.Sampling``: what is expected, and the test of a value."""
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
}


@dataclasses.dataclass(frozen=True)
class Profile:
    """A member of a team. A sampling setting that is None is the team's.

    Raises:
        BadInput: a field of the wrong type or out of range, by its name.
    """

    name: str  # as the others see it, and in metrics and checkpoints
    prompt: str = ""  # its system prompt; empty for none
    description: str = ""  # one sentence for those who introduce or call it
    answers: bool = False  # its actions are the team's answer and are graded
    adapter: str | None = None  # agents that name the same one share it; None is one of its own
    trainable: bool = True  # its adapter learns
    init: str | None = None  # a peft folder that its adapter starts from, seen from the team file
    reward: str | None = None  # its step reward where ``algo.credit`` is ``per_step``
    max_new_tokens: int | None = None  # here and below: as in ``types.Sampling``
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: tuple[str, ...] | None = None
    past: str | None = None  # it plays as earlier versions of this agent, and does not learn
    tools: tuple[str, ...] | None = None  # functions that it may call, package.module:function

    @property
    def learns(self) -> bool:
        """True where training changes its adapter."""
        return self.trainable and self.past is None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, (expected, fits) = getattr(self, field.name), _FIELDS[field.name]
            if not (fits(value) or value is None is field.default):
                raise BadInput(f"{field.name}: expected {expected}, got {value!r:.80}")

    def sampling(self, team: config.Team) -> Sampling:
        """Sampling of this agent's tokens: its own settings before the team's."""
        own = {field: getattr(self, field) for field in Sampling._fields}
        return Sampling(
            **{f: getattr(team, f) if value is None else value for f, value in own.items()}
        )


def last_answering(profiles: Sequence[Profile]) -> int:
    """Returns the last of those whose actions are graded: who stands for the team when alone."""
    return max(i for i, profile in enumerate(profiles) if profile.answers)


BUILT_IN = (
    Profile("planner", prompt="plan", description="Writes the next step down."),
    Profile("solver", prompt="solve", description="Gives the answer.", answers=True),
)
