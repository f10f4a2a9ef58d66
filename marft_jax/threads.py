"""Threads for code that may hang: an environment's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class DaemonThreads(Executor):
    """A thread for each call; one that never returns does not keep the process from ending.

    The threads of ``ThreadPoolExecutor`` are joined when Python exits, so a single hanging
    environment would hang the whole run after its last step.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts ``fn(*args, **kwargs)``; its future holds what it returns or raises."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="environment", daemon=True).start()
        return future
