"""The forms of each operation by platform: one table, filled by the modules beside this one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax

LOGGER = logging.getLogger("marft_jax")

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


def is_close(what: str, apart: Callable[[], float], most: float) -> bool:
    """Tries a kernel, which may fail where nobody can foresee it; the log says ``what`` follows.

    Args:
        apart: runs it, and returns how far its results are from the reference's.
    """
    try:
        distance = apart()
    except Exception as error:  # whatever it does not like
        LOGGER.info("%s: %s", what, str(error).partition("\n")[0])
        return False
    if not distance < most:
        LOGGER.warning("%s: it computes something else (%.2g apart)", what, distance)
    return distance < most
