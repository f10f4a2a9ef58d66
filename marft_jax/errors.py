"""Errors that users cause, and one line for each, with the place in the user's code.

Code and files of others may raise anything, even an exception whose text raises in turn. Text of
others is made safe to print: it cannot control a terminal or forge a line, and secrets are removed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

_LONGEST = 2000  # characters of a message
_OURS = str(Path(__file__).resolve().parent) + os.sep

# All control characters but tab and newline, with the 8-bit ones (C1); what breaks a line or turns
# the direction of writing unseen; and lone surrogates, which no output can encode.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
    "\ud800-\udfff]"
)

# Tokens of the hub, keys of OpenAI's form, a header with one, and who asks in an address.
_SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{10,}|\bsk-[\w-]{16,}|(?<=\bBearer )[^\s,]+|(?<=://)[^/\s@]+(?=@)"
)
_SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")  # ends of the names of variables with one


FILE_SYSTEM = {
    getattr(errno, name)
    for name in "ENOSPC EDQUOT EROFS EACCES EPERM EIO ENOENT ENOTDIR EISDIR ESTALE EFBIG ELOOP "
    "ENAMETOOLONG".split()
}
"""Numbers of an ``OSError`` that tell of a file or a disk."""


class BadInput(ValueError):
    """Wrong configuration or data; reported as one line with exit code 2."""


class RunFailed(RuntimeError):
    """A run cannot continue, though its settings are right; one line with exit code 1."""


class EpisodesFailed(RunFailed):
    """More episodes failed than the settings allow."""


class Stopped(Exception):
    """Playing was stopped; its episodes are dropped."""


@contextlib.contextmanager
def logged_to(*handlers: logging.Handler, level: int = logging.INFO) -> Iterator[None]:
    """Gives log records of this package to these handlers alone while the block runs: those that
    another package put on the root would repeat them."""
    logger = logging.getLogger("marft_jax")
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:], logger.propagate = handlers, False
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.handlers[:], _, logger.propagate = before
        logger.setLevel(before[1])


def exit_with(error: BaseException | str, code: int = 2) -> NoReturn:
    """Prints an error as one line on stderr and exits; code 2 is bad input."""
    print(f"marft_jax: {one_line(str(error), _LONGEST)}", file=sys.stderr)
    raise SystemExit(code)


def described(error: BaseException, bare: type[BaseException] = BadInput) -> str:
    """Describes an exception on one line, ``Kind: text``; only the text for ``bare`` kinds."""
    kind, text = "an exception", "it cannot say what it is"
    with contextlib.suppress(BaseException):
        kind = type(error).__name__
        text = one_line(str(error))
    if text and isinstance(error, bare):
        return text
    return f"{kind}: {text}" if text else kind


def reason(error: BaseException) -> str:
    """Says why a file cannot be read or written."""
    if isinstance(error, OSError) and error.strerror:
        return one_line(error.strerror)
    if isinstance(error, UnicodeDecodeError):
        return f"expected UTF-8, got bytes of another encoding at {error.start}; save it as UTF-8"
    return described(error, bare=ValueError)


Spot = BaseException | FrameType | Callable[..., Any]


def place(at: Spot | None) -> str:
    """Finds the innermost place in the user's own code, as `` (file:line)``, or "".

    Args:
        at: an exception, a running frame, or a function.
    """
    spots = [spot for spot in _spots(at) if is_users(spot[0])]
    return " ({}:{})".format(*spots[-1]) if spots else ""


def _spots(at: Spot | None) -> Iterator[tuple[str, int]]:
    """Yields files and lines, the innermost last."""
    if isinstance(at, BaseException):
        frames = traceback.walk_tb(at.__traceback__)
        yield from ((frame.f_code.co_filename, line) for frame, line in frames)
        if isinstance(at, SyntaxError) and at.filename:
            yield at.filename, at.lineno or 0
    elif isinstance(at, FrameType):
        stack = list(traceback.walk_stack(at))
        yield from ((frame.f_code.co_filename, line) for frame, line in reversed(stack))
    elif (code := getattr(at, "__code__", None)) is not None:
        yield code.co_filename, code.co_firstlineno


def is_users(filename: str) -> bool:
    """True for a source file outside this package, Python, installed modules and the program that
    was started."""
    path = Path(filename).absolute()
    if filename.startswith("<") or {"site-packages", "dist-packages"} & set(path.parts):
        return False
    others = [*map(sysconfig.get_path, ("stdlib", "platstdlib")), _OURS]
    started = path == Path(sys.argv[0]).absolute()
    return not started and not any(path.is_relative_to(other) for other in others)


def printable(text: str) -> str:
    """Escapes the characters of a text that would act on a terminal.

    >>> printable("red: \\x1b[31m")
    'red: \\\\x1b[31m'
    """
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)


def one_line(text: str, longest: int = 400) -> str:
    """Puts a text on one line of at most ``longest`` characters, without secrets.

    >>> one_line("red:\\n\\x1b[31m")
    'red: \\\\x1b[31m'
    """
    text = text[: 4 * longest]
    for name, value in os.environ.items():
        if name.upper().endswith(_SECRETS) and len(value := value.strip()) >= 8:
            text = text.replace(value, "***")
    short = " ".join(_SECRET.sub("***", text).split())
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in short)
    return shown if len(shown) <= longest else shown[: longest - 3] + "..."
