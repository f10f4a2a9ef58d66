"""Members of a team: their prompts, their sampling, and their adapters."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from marft_jax import config
from marft_jax.config import Stops, Temperature
from marft_jax.setting import Count, Fraction, Natural
from marft_jax.team.teachers import Teacher
from marft_jax.tools import check_entry
from marft_jax.types import Sampling

_NAME = re.compile(r"""(?![\s.])[^<>:"/\\|?*]{1,60}(?<![\s.])""")
_TAKEN = ("base", "team.yaml", "team.py", "turns.json", "readme.md")
"""What an export writes beside the agents' folders."""
SAMPLING = {
    name: TypeAdapter[Any](kind)
    for name, kind in get_type_hints(config.Team, include_extras=True).items()
    if name in Sampling._fields
}
"""The type of each field of ``types.Sampling``, as of the settings."""


def _folder(name: str) -> str:
    """Checks that a name can be that of a folder of its own, on every system."""
    if not (_NAME.fullmatch(name) and name.isprintable()) or name.lower() in _TAKEN:
        raise ValueError(
            'a name that a folder can have: at most 60 characters, none of <>:"/\\|?*, no dot or '
            f"space at its ends, and none of {', '.join(_TAKEN)}"
        )
    return name


def _several(value: Any) -> Any:
    """A list of the one text."""
    return (value,) if isinstance(value, str) else value


Name = Annotated[str, AfterValidator(_folder)]
_Text = Annotated[str, Field(min_length=1)]
_Tool = Annotated[Any, AfterValidator(check_entry)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Profile:
    """A member of a team.

    Raises:
        pydantic.ValidationError: a field has the wrong type or is out of range.
    """

    name: Name  # in prompts, metrics and checkpoints
    prompt: str = ""  # system prompt
    description: str = ""  # one sentence for an orchestrator, and for introductions
    answers: bool = False  # its actions are the team's answer and are graded
    adapter: Name | None = None  # name of an adapter that agents share; None: its own adapter
    trainable: bool = True  # its adapter learns
    init: _Text | None = None  # peft folder from which its adapter starts
    reward: _Text | None = None  # its step reward, with ``algo.credit per_step``
    max_new_tokens: Count | None = None  # sampling, as in ``types.Sampling``; None: the team's
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Natural | None = None
    min_p: Fraction | None = None
    stop: Annotated[Stops, BeforeValidator(_several)] | None = None
    past: Name | None = None  # agent as whose earlier versions it plays; it does not learn
    # tools that it may call, each a name or a name with its options
    tools: Annotated[tuple[_Tool, ...], BeforeValidator(_several)] | None = None
    base: Name | None = None  # base of the team file that it runs on; None: ``--model.base``
    format: dict[str, Any] | None = None  # JSON schema that its text follows
    teacher: Teacher | None = None  # with ``--algo.name distill``; None: the team's

    @property
    def form(self) -> str:
        """``format`` as text; "" without one."""
        return "" if self.format is None else json.dumps(self.format)

    @property
    def learns(self) -> bool:
        """True if training changes its adapter."""
        return self.trainable and self.past is None

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
