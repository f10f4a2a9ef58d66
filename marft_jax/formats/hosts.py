"""Names that a local server answers to, against DNS rebinding: a page of another site can make its
own name lead to this machine, but then its name stands in the ``Host`` of what it sends."""

from __future__ import annotations

import re
from collections.abc import Sequence

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HOST = re.compile(r"(?:([\w.-]*\w)\.?|\[?([\da-f.]*:[\da-f:.]*:[\da-f:.]*?)\]?)(?:(?<!:):\d*)?")


def name_of(host: str) -> str:
    """Name or address without its port; nothing where it is none.

    >>> name_of("Localhost:8000"), name_of("[::1]:80"), name_of("http://a")
    ('localhost', '::1', '')
    """
    found = _HOST.fullmatch(host.strip().lower())
    return "" if found is None else found[1] or found[2]


def is_known(header: str, names: Sequence[str] = ()) -> bool:
    """True for a ``Host`` with a name of the loopback address, or one of these."""
    return bool(name := name_of(header)) and name in {*LOOPBACK, *map(name_of, names)}
