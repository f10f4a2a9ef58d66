"""What is compiled for long is said while it is compiled."""

from __future__ import annotations

import logging
import threading

import pytest

from marft_jax.parallel import compilation

LOWERED, COMPILED = compilation._LOWERED, compilation._COMPILED


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setattr(compilation, "LINE_SECONDS", 0.02)
    monkeypatch.setattr("jax.monitoring.register_event_duration_secs_listener", lambda note: None)
    return compilation.watch.__wrapped__()


@pytest.fixture
def lines(monkeypatch):
    """What goes to stderr, and an event for the second line."""
    found, second = [], threading.Event()

    def told(line, file, flush):
        found.append(line)
        if len(found) == 2:
            second.set()

    monkeypatch.setattr("builtins.print", told)
    return found, second


def test_a_program_that_is_compiled_for_long_is_named_again_and_again(watch, lines):
    found, second = lines
    watch(LOWERED, 0.1, fun_name="jit(decode)")
    assert second.wait(60)
    watch(COMPILED, 60.0, fun_name="jit(decode)")
    assert {*found} == {"compiling jit(decode): 0 s"}


def test_an_open_run_has_the_line_in_its_log(watch, lines):
    class Records(logging.Handler):
        def emit(self, record):
            found.append(record.getMessage())
            done.set()

    found, done, handler = [], threading.Event(), Records()
    logger = logging.getLogger("marft_jax")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        watch(LOWERED, 0.1, fun_name="jit(update)")
        assert done.wait(60)
        watch(COMPILED, 0.1)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert "compiling jit(update)" in found[0] and not lines[0]
