"""The forms of each operation by platform: one table, filled by the modules beside this one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

Operation = Callable[..., Any]

FORMS: dict[Operation, dict[str, Operation]] = {}
"""The reference of each operation, and its other forms by platform (cpu, cuda, tpu)."""


def chosen(reference: Operation, **forms: Operation) -> Operation:
    """``reference``, computed in its own form by the platform that it is compiled for.

    Arrays are its positional arguments; those by name are constants.
    """
    FORMS[reference] = forms

    def run(*operands: Any, **constants: Any) -> Any:
        ways = {name: functools.partial(form, **constants) for name, form in forms.items()}
        default = functools.partial(reference, **constants)
        return jax.lax.platform_dependent(*operands, default=default, **ways)

    return run
