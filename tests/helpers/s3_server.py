"""moto's S3 server in a thread, with faults, and a process that is killed by its server."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

Fault = Callable[[dict[str, Any]], str | None]
"""Gets a request; returns a status to refuse it with, "lost" to answer 200 and do nothing, or
None."""
KEYS = dict(AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_DEFAULT_REGION="us-east-1")
TRAINER = """
import buckets
from marft_jax.extras.storage import lock, mirror
lock.RENEW_S, mirror.PUSH_S = 0.3, 60.0
place = mirror.Mirror({address!r}, trains=True)
buckets.train(place, {until}, lambda step: print(step, flush=True))
"""


class Server:
    """An S3 server; ``fault`` sees every request first, and ``after`` every answered one."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._call, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.fault: Fault = lambda request: None
        self.after: Callable[[dict[str, Any]], object] = lambda request: None
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _call(self, request: dict[str, Any], start: Any) -> Any:
        what = self.fault(request)
        if what is not None:
            request["wsgi.input"].read(int(request.get("CONTENT_LENGTH") or 0))
            start("200 OK" if what == "lost" else what, [("ETag", '"0"')])
            return []
        answer = [*self._app(request, start)]
        self.after(request)
        return answer

    def close(self) -> None:
        self._server.shutdown()


@contextlib.contextmanager
def serving(bucket: str, setenv: Callable[[str, str], object]) -> Iterator[Server]:
    """Starts a server that has a bucket; this process and those that it starts use it."""
    server = Server()
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": server.url, "AWS_MAX_ATTEMPTS": "1"}.items():
        setenv(name, value)
    urllib.request.urlopen(f"{server.url}/moto-api/reset", data=b"").close()
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    try:
        yield server
    finally:
        server.close()


def is_write(request: dict[str, Any]) -> bool:
    """True for what changes an object of a run; renewals of the lock do not count."""
    changes = request["REQUEST_METHOD"] in ("PUT", "DELETE", "POST")
    return changes and "/lock/" not in request["PATH_INFO"]


def run_trainer(address: str, until: int, home: Path) -> subprocess.Popen[str]:
    """Starts a process that trains without a model and prints the steps that it has saved."""
    helpers, here = Path(__file__).parent, Path(__file__).parents[2]
    path = os.pathsep.join([str(here), str(helpers), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", TRAINER.format(address=address, until=until)],
        env={**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
    )


def killed_at(server: Server, moment: int, after: bool, start: Callable[[], Any]) -> list[int]:
    """Runs a trainer that is killed at a write, before or after this takes effect.

    Returns:
        The steps that it had saved.
    """
    count, process = 0, start()

    def kill(request: dict[str, Any]) -> None:
        nonlocal count
        count += is_write(request)
        if is_write(request) and count == moment:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()

    def fault(request: dict[str, Any]) -> str | None:
        if not after:
            kill(request)
        return "503 Slow Down" if process.poll() is not None else None

    server.fault = fault
    server.after = kill if after else lambda request: None
    out, _ = process.communicate()
    server.fault = server.after = lambda request: None
    assert process.returncode == -signal.SIGKILL, f"it ended before write {moment}"
    return [int(line) for line in out.split()]
