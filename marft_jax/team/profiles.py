"""Members of a team: their prompts, their sampling, and their adapters."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, get_type_hints

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from marft_jax.settings import config
from marft_jax.settings.config import Share, Stops, Temperature
from marft_jax.settings.setting import Count, Fraction, Natural, PathText, Section, setting
from marft_jax.team.teachers import Teacher
from marft_jax.tools import check_entry
from marft_jax.types import Sampling

_NAME = re.compile(r"""(?![\s.])[^<>:"/\\|?*]{1,60}(?<![\s.])""")
_FILES = (".py", ".json", ".yaml", ".md", ".jinja")
"""Kinds of the files that an export writes beside the agents' folders and ``base``."""
SAMPLING = {
    name: TypeAdapter[Any](kind)
    for name, kind in get_type_hints(config.Team, include_extras=True).items()
    if name in Sampling._fields
}
"""The type of each field of ``types.Sampling``, as of the settings."""


def _folder(name: str) -> str:
    """Checks that a name can be that of a folder of its own, on every system."""
    taken = name.lower() == "base" or name.lower().endswith(_FILES)
    if taken or not (_NAME.fullmatch(name) and name.isprintable()):
        raise ValueError(
            'a name that a folder can have: at most 60 characters, none of <>:"/\\|?*, no dot or '
            f"space at its ends, not `base`, and none that ends in {', '.join(_FILES)}"
        )
    return name


Name = Annotated[str, AfterValidator(_folder)]
_Text = Annotated[str, Field(min_length=1)]
_Tool = Annotated[Any, AfterValidator(check_entry)]
_OrOne = BeforeValidator(
    lambda value: (value,) if isinstance(value, str) else value,
    json_schema_input_type=str | list[Any],
)


@dataclass(frozen=True)
class Profile(Section):
    """A member of a team.

    Raises:
        pydantic.ValidationError: a field has the wrong type or is out of range.
    """

    name: Name
    """Name in prompts, metrics and checkpoints."""
    prompt: str = ""
    """System prompt."""
    description: str = ""
    """One sentence for an orchestrator, and for introductions."""
    answers: bool = False
    """Its actions are the team's answer and are graded."""
    adapter: Name | None = setting(None, needs="lora.mode per_agent")
    """Name of an adapter that agents share; none: its own adapter."""
    trainable: bool = True
    """Trains its adapter."""
    init: Annotated[PathText, Field(min_length=1)] | None = setting(None, path=bool)
    """Folder from which its adapter starts, in peft's format; none: a new adapter."""
    reward: _Text | None = setting(None, needs="algo.credit per_step or tree")
    """Its step reward; none: --algo.step_reward."""
    max_new_tokens: Count | None = None
    """Longest action, in tokens; none: --team.max_new_tokens."""
    temperature: Temperature | None = None
    """Sampling temperature; 0: greedy; none: --team.temperature."""
    top_p: Share | None = None
    """Samples from the fewest tokens whose probabilities add up to this; none: --team.top_p."""
    top_k: Natural | None = None
    """Samples from this many most likely tokens; 0: off; none: --team.top_k."""
    min_p: Fraction | None = None
    """Samples from tokens at least this fraction as likely as the likeliest one; none:
    --team.min_p."""
    stop: Annotated[Stops, _OrOne] | None = None
    """Texts that end an action; none: --team.stop."""
    past: Name | None = None
    """Agent as whose earlier versions it plays; it does not learn."""
    tools: Annotated[tuple[_Tool, ...], _OrOne] | None = None
    """Tools that it may call, each a name or a name with its options."""
    base: Name | None = None
    """Base of the team file that it runs on; none: --model.base."""
    format: dict[str, Any] | None = None
    """JSON schema that its text follows."""
    teacher: Teacher | None = None
    """Its teacher, with --algo.name distill; none: that of the team."""

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
        values = (
            getattr(team if getattr(self, field) is None else self, field)
            for field in Sampling._fields
        )
        return Sampling(*values)


def last_answering(profiles: Sequence[Profile]) -> int:
    """Returns the number of the last agent that answers: the agent that plays ``solo``."""
    return max(i for i, profile in enumerate(profiles) if profile.answers)


BUILT_IN = (
    Profile("planner", prompt="plan", description="Writes the next step down."),
    Profile("solver", prompt="solve", description="Gives the answer.", answers=True),
)
