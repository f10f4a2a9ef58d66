"""Warm workers for generated programs, and the three ways to ask a program for something."""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from marft_jax.envs.worker_side.filter import unsupported
from marft_jax.envs.workers import Unusable, Worker, Workers
from marft_jax.extras.code.sandbox.jail import ENVIRONMENT, Limits, bare, jail

Program = str | Sequence[str]
"""Its source; of several sources the first that compiles is run."""
_LIMITS = ("timeout", "output", "lost")  # verdicts of what was ended
_GRACE = 5.0  # seconds that a worker may take beyond a program's own limit before it is killed


class Outcome(NamedTuple):
    """End of one run of a program.

    Attributes:
        verdict: ``ok``, ``error`` (an uncaught exception, a non-zero exit status, a signal),
            ``timeout``, ``output`` (it wrote more, or more files, than it may) or ``lost`` (the
            worker did not answer and was killed); ``failed`` where a test's own assertion failed.
        output: what it printed; for ``call`` the JSON text of what it returned.
        detail: the end of its error output, or why it ended.
    """

    verdict: str
    output: str = ""
    detail: str = ""


class Sandbox:
    """Runs programs, ``workers`` at the same time. Safe to use from threads.

    The workers start in the background at once, and end with this object or with the process.

    Args:
        kind: ``bubblewrap``, or ``none``: limits, but no isolation.
        workers: how many programs may run at the same time.
        limits: what each may use.

    Raises:
        Unusable: isolation cannot be had on this machine.
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
        """Calls its function ``name``, or that method of its class ``Solution``.

        Arguments are given in order, or by name.

        The output is the JSON text of what it returned; of several lines the first counts.
        """
        with self._runners.borrow() as worker:
            self._begin(worker, seconds, "call", program, name=name, arguments=arguments)
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
        """Runs Python tests of a program, the tests in one worker and the program in another.

        Only calls with plain values pass between the two, so the program can neither read the
        tests nor touch what compares its results.

        Args:
            program: defines the functions that the tests call.
            prelude: trusted code that is run before the tests, with them.
            tests: statements, one text for each test.
            names: those functions.
            seconds: for all tests together.

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
        rest = Outcome(hard[0] if hard else "error", "", why)
        return outcomes + [rest] * (len(tests) - len(outcomes))

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
        own = {"mode": mode, "program": sources, "limit": seconds, "seconds": seconds + 2 * _GRACE}
        worker.send({**self._limits._asdict(), **own, **more}, [line] if line else [])


def _end(worker: Worker, seconds: float) -> tuple[Outcome, str]:
    """Receives the end of a program, and all that it sent through its socket."""
    end = worker.receive(seconds + _GRACE)
    if not isinstance(end, dict):
        return Outcome("lost", "", "the sandbox did not answer and was ended"), ""
    if not end["clean"]:
        worker.restart()  # what a program left must not meet the next one
    return Outcome(end["verdict"], end["output"], end["detail"]), end["sent"]
