"""Signals take effect within seconds, also where the main thread never comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from marft_jax.run.signals import Stop

PROGRAM = """
import signal, sys, threading, time
if {usual}:  # however the tests were started: nohup ignores hangups
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
from marft_jax import __main__
from marft_jax.errors import RunFailed
from marft_jax.run.signals import Stop

def save():
    print("saved", flush=True)

def full():
    raise RunFailed("run: cannot be written (No space left on device)")

def until(stop):
    while not stop():
        time.sleep(0.01)
    sys.exit(7)

for_ever = lambda stop: threading.Event().wait()
with Stop("nothing yet") as stop:
    {setup}
    print("ready", flush=True)
    {main}(stop)
"""
PLAN = "stop.expect('stopping'); stop.protect({}, {})"


def run(*numbers: int, setup: str = "pass", main: str = "for_ever", under=(), gap=0.1):
    """(exit code, output) of a process that is sent these signals, one after another."""
    code = PROGRAM.format(setup=setup, main=main, usual=not under)
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [*under, sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env=os.environ | {"PYTHONPATH": root},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first == "ready\n" or first == "-15 False\n" and process.stdout.readline()
        for number in numbers:
            process.send_signal(number)
            time.sleep(gap)
        said = process.stdout.read()
        return process.wait(60), said
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_where_the_main_thread_hangs_the_last_step_is_saved_and_the_process_ends(number):
    code, said = run(number, setup=PLAN.format("save", 0.5))
    assert code == 75
    assert said.splitlines() == [
        "marft_jax: stopping; again to leave now", "saved",
        "marft_jax: stopped; start again to continue",
    ]  # fmt: skip


def test_before_anything_is_finished_the_process_ends_at_once():
    code, said = run(signal.SIGINT)
    assert (code, said) == (75, "marft_jax: nothing yet\n")


def test_a_main_thread_that_looks_ends_by_itself():
    code, said = run(signal.SIGTERM, setup=PLAN.format("save", 15), main="until")
    assert (code, said) == (7, "marft_jax: stopping; again to leave now\n")


def test_a_second_signal_ends_the_process_now():
    setup = PLAN.format("save", 15)
    code, said = run(signal.SIGINT, signal.SIGINT, setup=setup, gap=0.8)
    assert code == 128 + signal.SIGINT and "saved" not in said


def test_a_signal_that_is_sent_twice_is_one():
    code, said = run(signal.SIGHUP, signal.SIGHUP, setup=PLAN.format("save", 0.8))
    assert code == 75 and "saved" in said


def test_a_save_that_fails_is_one_line_and_exit_code_1():
    code, said = run(signal.SIGTERM, setup=PLAN.format("full", 0.1))
    assert code == 1 and said.splitlines()[1:] == [
        "marft_jax: run: cannot be written (No space left on device)"
    ]


def test_what_the_shell_keeps_alive_ignores_hangups():
    shell = ["sh", "-c", "trap '' HUP; exec \"$@\"", "nohup"]
    code, said = run(signal.SIGHUP, signal.SIGTERM, setup=PLAN.format("save", 0.1), under=shell)
    assert code == 75 and "saved" in said


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with Stop("nothing yet") as stop:
        assert not stop() and signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize(("ready", "code", "said"), [("", 130, "marft_jax: stopped\n"),
                                                     ("main = print", 7, "")])  # fmt: skip
def test_an_interrupt_while_a_command_is_imported_is_one_line(ready, code, said):
    program = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
sys.argv = ["-m"]  # as `python -m` has it
import marft_jax
{ready}
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    os._exit(7)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, said)
