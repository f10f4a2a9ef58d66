"""Faults of the user's: one line each, with the user's own file and line where code failed."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path
from typing import NoReturn

from marft_jax.printable import printable

_LONGEST = 2000  # characters of a message


class BadInput(ValueError):
    """Wrong configuration or data: reported as one line, exit code 2."""


class RunFailed(RuntimeError):
    """A run cannot go on through no fault of its settings: reported as one line, exit code 1."""


class EpisodesFailed(RunFailed):
    """More episodes failed than the settings allow."""


class Stopped(Exception):
    """A play was stopped; its episodes are thrown away."""


def exit_with(error: BaseException | str, code: int = 2) -> NoReturn:
    """Prints an error as one line on stderr and leaves; exit code 2 is bad input."""
    line = printable(" ".join(str(error).split()))
    print(f"marft_jax: {line[:_LONGEST]}", file=sys.stderr)
    raise SystemExit(code)


def described(error: BaseException) -> str:
    """An exception of somebody else's code, in a few words; its ``__str__`` may fail too."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def user_line(error: BaseException) -> str | None:
    """``file.py, line 7``: where the user's own code was when it failed; None if it had no part.

    The user's code is all that lies neither in this package nor among Python's own or installed
    modules.
    """
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_users(frame.filename)]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else None


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = Path(filename).absolute()
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    python = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    ours = [Path(__file__).parent, Path(sys.argv[0]).absolute()]
    return not any(path.is_relative_to(other) for other in [*ours, *python])
