"""Values of strangers, and how a file of theirs must be taken."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from marft_jax.errors import BadInput

ODD: list[Any] = [None, [], {}, [[1]], {"a": []}, "x", "", -1, 0, 1, 0.5, True, 10**30,
                  float("nan"), float("inf"), [10**12] * 3, "9" * 5000]  # fmt: skip


def refused(call, *arguments) -> str:
    with pytest.raises(BadInput) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000
    return message


def harmless(call, *arguments) -> None:
    """It works, or it is bad input: nothing else."""
    try:
        call(*arguments)
    except BadInput as error:
        assert "\n" not in str(error)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Peak:
    """The most memory that the process has, looked at every millisecond."""

    bytes = 0

    def __enter__(self):
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self):
        while not self.over.wait(0.001):
            self.bytes = max(self.bytes, resident())

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
