"""Serves a trained team to other programs, as an OpenAI endpoint.

    python -m marft_jax.serve --run runs/quickstart --port 8000

`model` is `team` or an agent's name. Further flags are those of training, such as
`--eval.temperature 0.7`: the temperature of a call that names none.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from marft_jax import cli
from marft_jax.envs.base import EnvSource
from marft_jax.errors import BadInput
from marft_jax.formats import documents
from marft_jax.formats.hosts import listen, name_of, url_of
from marft_jax.random_keys import Stream
from marft_jax.settings.config import Config
from marft_jax.types import Player

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from marft_jax.extras.gateway.http import Limits
    from marft_jax.team.prompts import Team


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Exits with 0 after a signal, all calls answered; with 2 for bad configuration or input."""
    argv = sys.argv[1:] if argv is None else argv
    if "tinker" in (word.removeprefix("--api=") for word in argv):
        from marft_jax.extras.gateway.tinker import command

        command.main(argv)
    parser = cli.run_parser("marft_jax.serve", __doc__)
    what = "openai: a team answers; tinker: clients train and sample adapters (--api tinker --help)"
    parser.add_argument("--api", choices=["openai", "tinker"], default="openai", help=what)
    add_server_flags(parser)
    with cli.boundary():
        flags, rest = parser.parse_known_args(argv)
        keys, names = read_keys(flags)
        config = cli.parse_run(flags.run, flags.base, rest, "marft_jax.serve", plays_tasks=False)
        with needs("serve"):
            from marft_jax.extras.gateway import http
        with (
            listen(flags.host, flags.port) as listener,
            open_app(flags.run, config, flags.step, keys=keys, names=names) as app,
        ):
            serve(app, listener, http.DEFAULT, "/v1")
    sys.exit(0)


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Raises ``BadInput`` for a module that comes with an extra of pip."""
    try:
        yield
    except ImportError as error:
        what = f'{error.name} is not installed: pip install -e ".[{extra}]"'
        raise BadInput(what) from error


def serve(app: Starlette, listener: socket.socket, limits: Limits, path: str = "") -> None:
    """Serves until a signal comes."""
    from marft_jax.extras.gateway.http import make_server

    host, port = listener.getsockname()[:2]
    print(f"marft_jax: serves at {url_of(host, port, path)}", file=sys.stderr, flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again at its end
        signal.signal(number, lambda *_: None)
    make_server(app, limits).run([listener])


@contextlib.contextmanager
def open_app(
    run: str | Path | None, config: Config, step: int | str = "latest", **options: Any
) -> Iterator[Starlette]:
    """The application that answers for the team of a run; its sampler's thread ends with it.

    Args:
        options: ``keys``, ``limits`` and ``names`` of ``app.make_app``.

    Raises:
        BadInput: settings, model or checkpoint do not fit.
    """
    from marft_jax.extras.gateway.app import make_app
    from marft_jax.extras.gateway.served_team import ServedTeam
    from marft_jax.extras.gateway.warm_up import warm_up
    from marft_jax.run.opening import open_team
    from marft_jax.run.playing import make_player
    from marft_jax.run.states import restore_state
    from marft_jax.sampling.batcher import Batcher
    from marft_jax.sampling.protocol import version_of

    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(open_team(config, run, step, at_once=sys.maxsize))
        models, playing, state = opened
        team, sampler, threads = playing.team, playing.sampler, playing.threads
        heat = config.eval.temperature
        team = team._replace(sampling=tuple(s._replace(temperature=heat) for s in team.sampling))
        sampler.load(state.adapters, version_of(state.adapters))
        batcher = stack.enter_context(Batcher(sampler))

        async def reload() -> int:
            restore = functools.partial(restore_state, models, run, "latest")
            state = await asyncio.get_running_loop().run_in_executor(threads, restore)
            await asyncio.wrap_future(batcher.load(state.adapters, version_of(state.adapters)))
            return int(state.step)

        def make(share: Any, team: Team, create: Callable[[], Any]) -> Player:
            setup = playing._replace(sampler=share, team=team, stop=lambda: share.dropped)
            return make_player(setup, EnvSource(create), Stream.EVALUATION)

        served = ServedTeam(team, batcher, make, threads)
        warm_up(served)
        yield make_app(served, batcher, reload, **options)


def add_server_flags(parser: cli.Parser) -> None:
    """Adds the flags of a server of either API."""
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (loopback)")
    parser.add_argument("--port", default=8000, type=int, help="the port; 0 takes a free one")
    known = "a file of keys, one per line; a caller must send one of them"
    parser.add_argument("--api_key_file", metavar="F", help=known)
    allowed = "more names by which callers may address this machine (loopback and --host)"
    parser.add_argument(
        "--allow_host", nargs="+", action="extend", default=[], metavar="NAME", help=allowed
    )


def read_keys(flags: Any) -> tuple[list[str], list[str]]:
    """The keys that callers must send, and names of hosts that the server answers to."""
    names = [flags.host, *(name for part in flags.allow_host for name in part.split(","))]
    for name in names[1:]:
        if not name_of(name):
            raise BadInput(f"--allow_host: expected the name of a host, got {name!r:.80}")
    if (file := flags.api_key_file) is None:
        return [], names
    raw = documents.read_bytes(file, "--api_key_file").decode("utf-8-sig", "replace")
    keys = [line.strip() for line in raw.splitlines() if line.strip()]
    if not keys:
        raise BadInput(f"--api_key_file {file}: expected keys, one per line, found none")
    return keys, names
