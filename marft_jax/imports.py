"""A user's own functions, found by name."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from marft_jax.config import BadInput
from marft_jax.envs.base import search_here
from marft_jax.usercode import failure_of


def imported(name: str, what: str, known: Iterable[str]) -> Any:
    """What ``package.module:name`` names; the current directory is searched too.

    Args:
        name: as the settings spell it.
        what: the setting, for messages.
        known: the built-in names, for messages.

    Raises:
        BadInput: the name has another form, or it cannot be imported.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        raise BadInput(
            f"{what}: expected {', '.join(known)} or package.module:function, got {name!r}"
        )
    search_here()
    try:
        return getattr(importlib.import_module(module), attribute)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the user's module raises, SystemExit too
        raise BadInput(f"{what}: cannot load {name!r}: {failure_of(error).text}") from None
