"""The members of a team: what each is told, how it samples, and which adapter it trains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from marft_jax import config
from marft_jax.config import BadInput
from marft_jax.types import Sampling

_Check = tuple[str, Callable[[Any], bool]]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_name(value: Any) -> bool:
    return (
        isinstance(value, str)
        and value != ""
        and value == value.strip()
        and value.isprintable()
        and "/" not in value
    )


def _is_optional_name(value: Any) -> bool:
    return value is None or _is_name(value)


_EXPECTED: dict[str, _Check] = {
    "name": ("a name: text on one line, without / and outer spaces", _is_name),
    "prompt": ("text", lambda v: isinstance(v, str)),
    "description": ("text", lambda v: isinstance(v, str)),
    "answers": ("true or false", lambda v: isinstance(v, bool)),
    "adapter": ("a name: text on one line, without / and outer spaces", _is_optional_name),
    "trainable": ("true or false", lambda v: isinstance(v, bool)),
    "init": ("a folder with an adapter", lambda v: v is None or isinstance(v, str) and v != ""),
    "reward": ("a step reward's name", lambda v: v is None or isinstance(v, str) and v != ""),
    "max_new_tokens": ("a whole number > 0", lambda v: v is None or _is_int(v) and v > 0),
    "temperature": ("a number >= 0", lambda v: v is None or _is_number(v) and 0 <= v < math.inf),
    "top_p": ("a number with 0 < top_p <= 1", lambda v: v is None or _is_number(v) and 0 < v <= 1),
    "top_k": ("a whole number >= 0", lambda v: v is None or _is_int(v) and v >= 0),
    "min_p": ("a number from 0 to 1", lambda v: v is None or _is_number(v) and 0 <= v <= 1),
}


@dataclasses.dataclass(frozen=True)
class Profile:
    """One member of a team. A sampling setting that is None is the team's.

    Attributes:
        name: how the others see it, and its name in metrics and checkpoints.
        prompt: its system prompt; empty for none.
        description: one sentence for those who introduce or call it.
        answers: its actions are the team's answer and are graded.
        adapter: roles that name the same one share it; without, the agent has its own.
        trainable: whether its adapter learns.
        init: a peft folder that its adapter starts from (in a file: seen from the file's folder);
            without, it starts as the base.
        reward: its step reward where ``algo.credit`` is ``per_step``; without, the team's.
        max_new_tokens, temperature, top_p, top_k, min_p: as in ``types.Sampling``.

    Raises:
        BadInput: a field of the wrong type or out of range, by its name.
    """

    name: str
    prompt: str = ""
    description: str = ""
    answers: bool = False
    adapter: str | None = None
    trainable: bool = True
    init: str | None = None
    reward: str | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        for field, (expected, is_fine) in _EXPECTED.items():
            value = getattr(self, field)
            if not is_fine(value):
                raise BadInput(f"{field}: expected {expected}, got {value!r}")

    def sampling(self, team: config.Team) -> Sampling:
        """How this agent's tokens are drawn: its own settings before the team's."""
        own = {field: getattr(self, field) for field in Sampling._fields}
        return Sampling(
            **{f: getattr(team, f) if value is None else value for f, value in own.items()}
        )


def last_answering(profiles: Sequence[Profile]) -> int:
    """The last of those whose actions are graded: who stands for the team when alone."""
    return max(i for i, profile in enumerate(profiles) if profile.answers)


BUILT_IN = (
    Profile("planner", prompt="plan", description="Writes the next step down."),
    Profile("solver", prompt="solve", description="Gives the answer.", answers=True),
)
