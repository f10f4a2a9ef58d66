"""Grades answers in processes that may hang or crash without harm."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from marft_jax.envs.base import Grade
from marft_jax.envs.grading.compare import quick
from marft_jax.envs.grading.extract import AnswerForm, extract
from marft_jax.envs.workers import Workers

WORKER = (sys.executable, "-m", "marft_jax.envs.grading.worker")
_VERDICTS = {True: "right", False: "wrong", None: "crashed"}


class GradingPool:
    """Grades answers; several threads may use it. If grading takes too long or its process dies,
    the answer scores 0.

    Args:
        workers: answers that are graded at the same time, each in its process.
        seconds: most wall time of one grading.
        form: accepted form of an answer, see ``extract``.
        command: the worker program.
    """

    def __init__(
        self,
        workers: int,
        seconds: float,
        form: AnswerForm = "auto",
        command: Sequence[str] = WORKER,
    ) -> None:
        self._seconds: float = seconds
        self._form: AnswerForm = form
        self._workers = Workers(workers, command)

    def grade(self, text: str, reference: str) -> Grade:
        """Finds the answer in a text and compares it with the reference.

        Raises:
            RuntimeError: the pool is closed, or its workers cannot be started.
        """
        answer: str | None = None
        try:
            answer = extract(text, reference, self._form)
            equal = None if answer is None else quick(reference, answer)
        except Exception:  # whatever a text holds, it is graded
            return Grade(0.0, "crashed", answer or "")
        if answer is None:
            return Grade(0.0, "no answer")
        if equal is None:
            reply = self._workers.ask({"reference": reference, "answer": answer}, self._seconds)
            verdict = _VERDICTS[reply["equal"]] if isinstance(reply, dict) else reply
        else:
            verdict = _VERDICTS[equal]
        return Grade(float(verdict == "right"), verdict, answer)

    def close(self) -> None:
        """Ends the worker processes. May be called again."""
        self._workers.close()
