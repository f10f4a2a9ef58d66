"""The SDK's client over a base in this process."""

from __future__ import annotations

import contextlib
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from marft_jax import cli
from marft_jax.extras.gateway.command import needs

with needs("tinker"):
    import tinker

    from marft_jax.extras.gateway import http
    from marft_jax.extras.gateway.tinker.routes import make_app
    from marft_jax.extras.gateway.tinker.service import open_service


class Client(tinker.ServiceClient):
    """Trains and samples adapters over one base in this process: a ``tinker.ServiceClient`` whose
    service is a thread, at a loopback port and with a key of its own.

        client = marft_jax.Client("tiny")
        training = client.create_lora_training_client("tiny", rank=4).result()

    Args:
        base: the model, as of ``--model.base``.
        settings: others of a run, such as ``{"model.context": 512}``.
        dir: where models and saved weights go; by default a temporary folder.
        options: of ``open_service``, such as ``rank`` and ``slots``.

    Raises:
        BadInput: settings or a model that do not fit.
    """

    def __init__(
        self,
        base: str = "tiny",
        settings: Mapping[str, Any] | None = None,
        *,
        dir: str | Path | None = None,
        **options: Any,
    ) -> None:
        self._stack = contextlib.ExitStack()
        folder = dir or self._stack.enter_context(tempfile.TemporaryDirectory())
        config = cli.configure({**(settings or {}), "model.base": base})
        key = f"tml-{secrets.token_hex(16)}"
        service = open_service(config, Path(folder), **options)
        app = make_app(self._stack.enter_context(service), [key])
        super().__init__(base_url=self._stack.enter_context(serving(app)), api_key=key)

    def close(self, *args: Any, **kwargs: Any) -> Any:
        """Ends the session and the service."""
        done = super().close(*args, **kwargs)
        done.future().add_done_callback(lambda _: self._stack.close())
        return done


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serves an application in a thread, at a loopback port; gives its URL."""
    server, listener = http.make_server(app), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],), name="tinker", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
