"""Serves a base for training loops of clients: the Tinker API.

    python -m marft_jax.serve --api tinker --model.base tiny --run.dir runs/tinker

Clients are those of the SDK: `tinker.ServiceClient(base_url=...,
api_key="tml-...")`. Models, their steps and saved weights are in --run.dir; a server that was
stopped or killed goes on there. Further flags are those of training, such as `--model.context`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from marft_jax import cli
from marft_jax.errors import BadInput
from marft_jax.extras.gateway.command import add_server_flags, needs, read_keys, serve
from marft_jax.formats.hosts import LOOPBACK, listen
from marft_jax.run.directory import disk_errors, locked_directory

_COUNTS = {
    "models": (4096, "the most models of clients"),
    "samplers": (8, "saved weights that are sampled with at the same time"),
    "rank": (32, "the largest rank of an adapter"),
    "weights_bytes": (64 << 30, "the most bytes of saved weights"),
}


def main(argv: Sequence[str]) -> NoReturn:
    """Exits with 0 after a signal; with 2 for bad configuration or input."""
    parser = cli.Parser("marft_jax.serve", __doc__)
    parser.add_argument("--api", choices=["tinker"], help="this API")
    names = "more names of the base, by which clients may ask for it"
    parser.add_argument("--names", nargs="+", default=[], metavar="NAME", help=names)
    add_server_flags(parser)
    for name, (usual, what) in _COUNTS.items():
        parser.add_argument(f"--{name}", default=usual, type=int, help=f"{what} ({usual})")
    with cli.boundary():
        flags, rest = parser.parse_known_args(argv)
        keys, hosts = read_keys(flags)
        if not keys and flags.host not in LOOPBACK:
            raise BadInput(f"--host {flags.host}: expected --api_key_file beside it, got none")
        options = {name: getattr(flags, name) for name in _COUNTS}
        if wrong := [name for name, value in options.items() if value < 1]:
            raise BadInput(f"--{wrong[0]}: expected 1 or more, got {options[wrong[0]]}")
        config = cli.parse(rest, prog="marft_jax.serve")
        if not any(flag.partition("=")[0] == "--run.dir" for flag in rest):
            raise BadInput("--run.dir: expected a folder for models and saved weights, got none")
        with needs("tinker"):
            from marft_jax.extras.gateway.tinker.routes import LIMITS, make_app
            from marft_jax.extras.gateway.tinker.service import open_service
        folder = Path(config.run.dir).absolute()
        with (
            listen(flags.host, flags.port) as listener,
            disk_errors(folder),
            locked_directory(folder),
            open_service(config, folder, names=flags.names, **options) as service,
        ):
            serve(make_app(service, keys, LIMITS, hosts), listener, LIMITS)
    sys.exit(0)
