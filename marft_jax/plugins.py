"""A user's own code, found by name; what fails in it is shown with its own file and line."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from typing import Any

from marft_jax.errors import BadInput, described, place


def imported(name: str, what: str, known: Iterable[str], kind: str = "function") -> Any:
    """Imports ``package.module:name``; the current directory is searched too.

    Args:
        name: as the settings spell it.
        what, known, kind: the setting, its built-in names, and what it names, for messages.

    Raises:
        BadInput: the name has another form, or it cannot be imported.
    """
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise BadInput(
            f"{what}: expected {', '.join(known)} or package.module:{kind}, got {name!r:.80}"
        )
    if os.getcwd() not in sys.path and "" not in sys.path:  # however Python was started
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module may do anything, sys.exit included
        why = described(error) + place(error, own_only=True)
        raise BadInput(f"{what} {name}: cannot import {module_name}: {why}") from error
    found = getattr(module, attribute, None)
    if found is None:
        raise BadInput(f"{what} {name}: {module.__file__} has no {attribute!r}")
    return found
