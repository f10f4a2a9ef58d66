"""Names and addresses of machines: which a local server answers to, and how others are reached.

A local server checks names against DNS rebinding: a page of another site can make its own name lead
to this machine, but then its name stands in the ``Host`` of what it sends.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import urllib.request
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from marft_jax.errors import BadInput, reason

if TYPE_CHECKING:
    import httpx

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HOST = re.compile(r"(?:([\w.-]*\w)\.?|\[?([\da-f.]*:[\da-f:.]*:[\da-f:.]*?)\]?)(?:(?<!:):\d*)?")


def name_of(host: str) -> str:
    """Name or address without its port; nothing where it is none.

    >>> name_of("Localhost:8000"), name_of("[::1]:80"), name_of("http://a")
    ('localhost', '::1', '')
    """
    match = _HOST.fullmatch(host.strip().lower())
    return "" if match is None else match[1] or match[2]


def is_known(header: str, names: Sequence[str] = ()) -> bool:
    """True for a ``Host`` with a name of the loopback address, or one of these."""
    return bool(name := name_of(header)) and name in {*LOOPBACK, *map(name_of, names)}


def url_of(host: str, port: int, path: str = "") -> str:
    """Makes the URL of a server.

    >>> url_of("::1", 80, "/v1")
    'http://[::1]:80/v1'
    """
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{path}"


def listen(host: str, port: int) -> socket.socket:
    """Opens a socket for a server of asyncio; raises ``BadInput``.

    Parts of an answer are sent without a wait between them, which asyncio sees to only where a
    socket names its protocol.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise BadInput(f"--host {host} --port {port}: cannot listen: {reason(error)}") from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def transport_to(url: str, **given: Any) -> httpx.AsyncHTTPTransport:
    """Makes what carries requests to an address, through the proxy that the environment names.

    Raises:
        BadInput: a variable of the environment names no proxy, or no certificates.
    """
    import httpx

    name = _proxy_for(url)
    proxy = os.environ.get(name, "")
    proxy = f"http://{proxy}" if proxy and "://" not in proxy else proxy or None
    try:
        return httpx.AsyncHTTPTransport(verify=url.startswith("https"), proxy=proxy, **given)
    except OSError as error:
        file = os.environ.get("SSL_CERT_FILE")
        raise BadInput(f"SSL_CERT_FILE {file}: no certificates: {reason(error)}") from error
    except (ValueError, httpx.InvalidURL, ImportError) as error:
        what = f"expected the URL of a proxy, got {os.environ[name]!r:.80} ({reason(error)})"
        raise BadInput(f"{name}: {what}; correct it, or name the host in NO_PROXY") from error


def _proxy_for(url: str) -> str:
    """Names the variable of the environment with the proxy for an address; "" where there is none,
    as for addresses of this machine and those in NO_PROXY."""
    proxies, parts = urllib.request.getproxies_environment(), urlsplit(url)
    host = parts.hostname or ""
    kind = next((kind for kind in (parts.scheme, "all") if proxies.get(kind)), "")
    near = [*proxies.get("no", "").split(","), "localhost", "127.0.0.0/8", "::1"]
    if not kind or any(_covers(entry.strip().lower(), host) for entry in near):
        return ""
    return next(name for name in os.environ if name.lower() == f"{kind}_proxy")


def _covers(entry: str, host: str) -> bool:
    """True for an entry of NO_PROXY that is a host, one of its parents, its network, or any."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry.strip("[]"), strict=False)
    name = entry.partition(":")[0].removeprefix("*").lstrip(".")
    return entry == "*" or bool(name) and f".{host}".endswith(f".{name}")
