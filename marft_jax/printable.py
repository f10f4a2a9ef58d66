"""Text of others, made safe to print: nothing in it can steer a terminal or forge a line."""

from __future__ import annotations

import re

# All control characters but tab and newline, with the 8-bit ones (C1); what breaks a line or turns
# the direction of writing unseen; and lone surrogates, which no output can encode.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
    "\ud800-\udfff]"
)


def printable(text: str) -> str:
    """The text with everything that would act on a terminal spelled out.

    >>> printable("red: \\x1b[31m")
    'red: \\\\x1b[31m'
    """
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str, longest: int = 400) -> str:
    """The text on a line of no more than so many characters.

    >>> one_line("red:\\n\\x1b[31m")
    'red: \\\\x1b[31m'
    """
    short = " ".join(text[: 4 * longest].split())
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in short)
    return shown if len(shown) <= longest else shown[: longest - 3] + "..."
