"""Warm workers that run generated programs: as a script, by calls, or under tests."""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from marft_jax.envs.workers import Unusable, Worker, Workers
from marft_jax.extras.code.sandbox.guest import values
from marft_jax.extras.code.sandbox.guest.filter import unsupported
from marft_jax.extras.code.sandbox.jail import ENVIRONMENT, Limits, bare, jail

Program = str | Sequence[str]
"""Source of a program; of several sources the first that compiles runs."""
_LIMITS = ("timeout", "output", "lost")  # verdicts of a program that was killed
_GRACE = 5.0  # seconds beyond a program's limit before its worker is killed


class Outcome(NamedTuple):
    """End of one run of a program.

    Attributes:
        verdict: ``ok``; ``error``: uncaught exception, non-zero exit status or signal; ``timeout``;
            ``output``: too much output or too many files; ``lost``: the worker did not answer and
            was killed; ``failed``: an assertion of the test failed.
        output: printed text; for ``call`` the returned value as JSON.
        detail: end of the error output, or the reason why the program ended.
    """

    verdict: str
    output: str = ""
    detail: str = ""


class Sandbox:
    """Runs programs in isolation. Safe to use from threads.

    The workers start at once in the background. They end with this object or with the process.

    Args:
        kind: ``bubblewrap``, or ``none`` for limits without isolation.
        workers: number of programs that run at the same time.
        limits: bounds of each program.

    Raises:
        Unusable: this machine cannot isolate programs.
    """

    def __init__(
        self, kind: Literal["bubblewrap", "none"], workers: int, limits: Limits | None = None
    ) -> None:
        if kind == "bubblewrap" and (reason := unsupported()):
            raise Unusable(reason)
        self._limits = limits or Limits()
        self._folder = contextlib.ExitStack()
        if kind == "bubblewrap":
            command, env = jail(self._limits.scratch), ENVIRONMENT
        else:
            made = tempfile.TemporaryDirectory("", "marft_jax-", ignore_cleanup_errors=True)
            env = ENVIRONMENT | {"TMPDIR": self._folder.enter_context(made)}
            command = bare()
        self._runners, self._judges = (Workers(workers, command, env) for _ in range(2))
        outcome = self.run("print(6 * 7)", "", 30.0)
        if outcome.output.strip() != "42":
            self.close()
            raise Unusable(outcome.detail or outcome.verdict)

    def run(self, program: Program, text: str, seconds: float) -> Outcome:
        """Runs a script with ``text`` as its standard input."""
        with self._runners.borrow() as worker:
            self._begin(worker, seconds, "run", program, input=text)
            return _end(worker, seconds)[0]

    def call(
        self,
        program: Program,
        name: str,
        arguments: Sequence[Any] | Mapping[str, Any],
        seconds: float,
    ) -> Outcome:
        """Calls the function ``name`` of a program, or that method of its class ``Solution``.

        Arguments are positional (a list) or named (a mapping). The outcome's output is the returned
        value as JSON.
        """
        with self._runners.borrow() as worker:
            dumped = values.dump(arguments)
            self._begin(worker, seconds, "call", program, name=name, arguments=dumped)
            outcome, sent = _end(worker, seconds)
        return outcome._replace(output=sent.partition("\n")[0])

    def check(
        self,
        program: Program,
        prelude: str,
        tests: Sequence[str],
        names: Sequence[str],
        seconds: float,
    ) -> list[Outcome]:
        """Runs Python tests in one worker and the program that they call in another.

        Only calls with plain values pass between the two. So the program can neither read the tests
        nor change the code that compares its results.

        Args:
            program: defines the functions that the tests call.
            prelude: trusted code that runs before the tests.
            tests: statements, one text per test.
            names: functions of the program that the tests call.
            seconds: limit for all tests together.

        Returns:
            An outcome for each test.
        """
        one, other = socket.socketpair()
        with self._runners.borrow() as worker, self._judges.borrow() as judge:
            with one, other:
                self._begin(worker, seconds, "serve", program, one.fileno())
                self._begin(judge, seconds, "judge", "", other.fileno(), prelude=prelude,
                            tests=list(tests), names=list(names))  # fmt: skip
            judged, sent = _end(judge, seconds)
            worker.send({"mode": "end", "seconds": _GRACE})
            served, _ = _end(worker, seconds)
        errors = [json.loads(line)["error"] for line in sent.splitlines()]
        outcomes = [Outcome("failed" if error else "ok", "", error) for error in errors]
        why = served.detail or judged.detail or "it ended before its tests"
        hard = [end.verdict for end in (served, judged) if end.verdict in _LIMITS]
        not_run = Outcome([*hard, "error"][0], "", why)
        return outcomes + [not_run] * (len(tests) - len(outcomes))

    def close(self) -> None:
        """Ends every worker. May be called again."""
        for pool in (self._runners, self._judges):
            pool.close()
        self._folder.close()

    def _begin(
        self,
        worker: Worker,
        seconds: float,
        mode: str,
        program: Program,
        line: int = 0,
        **more: Any,
    ) -> None:
        sources = [program] if isinstance(program, str) else list(program)
        times = {"limit": seconds, "seconds": seconds + 2 * _GRACE}
        request = {"mode": mode, "program": sources, **self._limits._asdict(), **times, **more}
        worker.send(request, [line] if line else [])


def _end(worker: Worker, seconds: float) -> tuple[Outcome, str]:
    """Receives the outcome of a program, and all that it sent through its socket."""
    end = worker.receive(seconds + _GRACE)
    if not isinstance(end, dict):
        return Outcome("lost", "", "the sandbox did not answer and was killed"), ""
    if not end["clean"]:
        worker.restart()  # the next program must not find what this one left
    return Outcome(end["verdict"], end["output"], end["detail"]), end["sent"]
