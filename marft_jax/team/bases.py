"""Base models of a team file, for members that run on another one than ``--model.base``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from marft_jax.errors import BadInput
from marft_jax.settings.config import Model
from marft_jax.settings.setting import Count, Derived, PathText, Positive, Section, setting
from marft_jax.types import MAIN


@dataclass(frozen=True)
class Base(Section):
    """A base model. What is none is as of the settings ``model.*`` and ``algo.lr``.

    Raises:
        pydantic.ValidationError: a field has the wrong type or is out of range.
    """

    model: Annotated[PathText, Field(min_length=1)] = setting(path=os.path.exists)
    """Model, as --model.base."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the frozen base and its activations; none: --model.dtype."""
    quantize: Literal["none", "int8", "int4", "nf4"] | None = None
    """Quantises the matrices of the base; none as a key without a value: --model.quantize."""
    context: Count | None = None
    """Longest prompt plus action, in tokens; none: --model.context."""
    thinking: bool | Literal["minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Lets the model think before it answers, or a level of effort; none: --model.thinking."""
    calls: str | None = None
    """Form in which the model calls tools; none: --model.calls."""
    lr: Positive | None = None
    """Learning rate of the adapters on it; none: --algo.lr."""

    def settings(self, usual: Model) -> Model:
        """Returns the settings ``model.*`` of this base."""
        fields = dataclasses.asdict(self) | {"base": self.model}
        changed = {k: v for k, v in fields.items() if v is not None and k not in ("model", "lr")}
        return dataclasses.replace(usual, **changed)


def context_of(name: str, model: Model, longest: int) -> int:
    """Returns the context of a base: as given, else by default and at most ``longest``.

    Args:
        longest: positions that the model was trained for.

    Raises:
        BadInput: it was given, and is longer.
    """
    if model.context > longest and not isinstance(model.context, Derived):
        where = "--model.context" if name == MAIN else f"--team.file: bases: {name}: context"
        raise BadInput(
            f"{where}: expected at most {longest}, the longest that {model.base} was trained for, "
            f"got {model.context}"
        )
    return min(model.context, longest)


def folder_of(adapter: str, base: str, several: bool) -> str:
    """Names the folder of an adapter in an export: below that of its base, if there are several."""
    return f"{base}/{adapter}" if several else adapter


def models_of(usual: Model, bases: Mapping[str, Base], on: Sequence[str]) -> dict[str, Model]:
    """Returns the settings ``model.*`` of each base that a member runs on, by its name.

    Args:
        usual: the settings of the run.
        on: the name of each member's base.
    """
    names = dict.fromkeys(on)
    return {name: usual if name == MAIN else bases[name].settings(usual) for name in names}
