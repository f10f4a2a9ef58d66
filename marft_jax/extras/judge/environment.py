"""Questions whose reward is a judge's mark, or the share of criteria that are met.

The judge is the agent ``judge`` of the team, on the team's own base. It acts last, it alone sees
the criteria and the reference answer, and it has ``trainable: false``. Or the judge is a model
behind an address that speaks OpenAI's protocol. The reward depends only on what the judge says.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from marft_jax.envs.base import EnvSource, OneOf, Split, Task
from marft_jax.envs.datasets import load
from marft_jax.envs.datasets.rows import LeftOut
from marft_jax.envs.grading.compare import quick
from marft_jax.envs.grading.extract import extract
from marft_jax.errors import BadInput
from marft_jax.extras.judge.verdicts import JUDGE, SCORE, scores_of
from marft_jax.settings.setting import Positive, Seconds, setting
from marft_jax.types import StepResult, Turn, without_thinking

if TYPE_CHECKING:
    from marft_jax.extras.judge.server import JudgeServer

_AGAIN = "The last reply had no verdict."
_ASKS = 2  # how often a judge is asked for a verdict


@dataclasses.dataclass(frozen=True)
class Settings(load.RowSettings):
    """Settings of questions that a judge grades."""

    name: str = "judged"
    rubric: tuple[str, ...] = ()
    """Criteria. The reward is the share of them that the judge affirms; none: the judge gives
    marks."""
    marks: Positive = 10.0
    """Best mark. The judge gives marks from 0 to this."""
    url: str | None = None
    """Address of a judge that speaks OpenAI's protocol, such as http://localhost:8000/v1; its key
    is read from OPENAI_API_KEY; none: the team's agent `judge`."""
    url_model: str = setting("default", needs="env.url")
    """Name of the model at `url`."""
    url_seconds: Seconds = setting(60.0, needs="env.url")
    """Time limit for each reply of the judge, with its retries, in seconds. An episode that exceeds
    it has failed."""
    question_field: str | None = None
    """Field of the question; none: the first usual name that a row has."""
    answer_field: str | None = None
    """Field of a reference answer; none: the first usual name, where a row has one."""
    horizon: ClassVar[int] = 1
    workers: ClassVar[int] = 1
    metrics: ClassVar[tuple[str, ...]] = (
        "judge_score", "judge_unread", "judge_tokens", "judge_agreement",
    )  # fmt: skip

    def task_of(self, row: Any) -> Task | LeftOut | str:
        """See ``RowSettings``; the answer is "" where a row has none."""
        return load.as_task(row, self.question_field, self.answer_field, answers="optional")


class JudgeReply(NamedTuple):
    """Reply of a judge, its tokens, and its scores from 0 to 1: ``SCORE`` for all texts, and names
    of agents; no scores if the reply has no verdict."""

    text: str
    tokens: int
    scores: Mapping[str, float]


def source(env: Settings, split: Split) -> EnvSource:
    """Questions from ``env.data`` (or, for evaluation, ``env.eval_data``); raises ``BadInput``."""
    if env.url is not None and not env.url.startswith(("http://", "https://")):
        raise BadInput(f"--env.url: expected http://... or https://..., got {env.url!r:.80}")
    pick, size = load.chooser(env, split)
    if env.url is None:
        return EnvSource(lambda: TeamJudged(pick, env), size)
    from marft_jax.extras.judge.server import JudgeServer

    server = JudgeServer(env.url, env.url_model, env.url_seconds)
    return EnvSource(lambda: Judged(pick, env, server), size, server.close)


class Judged:
    """Episode of one step that a model behind an address judges."""

    def __init__(
        self, pick: Callable[[int], Task], settings: Settings, server: JudgeServer | None = None
    ) -> None:
        self._pick, self._settings, self._server = pick, settings, server

    def reset(self, seed: int) -> str:
        self._task, self._asked = self._pick(seed), 1
        shown = repr((seed, *self._task, self._settings.rubric)).encode()
        self._nonce = hashlib.sha256(shown).hexdigest()[:8]
        return self._task.question

    def step(self, turns: Sequence[Turn]) -> StepResult:
        verdict = self._judge(turns)
        score = verdict.scores.get(SCORE)
        metrics: dict[str, float] = {"judge_tokens": verdict.tokens, "judge_unread": score is None}
        metrics |= {} if score is None else {"judge_score": score}
        right = self._is_right([without_thinking(turn.text) for turn in turns if turn.answers])
        if score is not None and right is not None:
            metrics["judge_agreement"] = (score >= 0.5) == right
        scores = {name: mark for name, mark in verdict.scores.items() if name != SCORE}
        info = {"reference": str(self._task.answer), "judge": verdict.text, "scores": scores}
        metrics = {name: float(value) for name, value in metrics.items()}
        return StepResult("", score or 0.0, True, info | {"metrics": metrics})

    def _is_right(self, answers: Sequence[str]) -> bool | None:
        """Compares the last answer with the reference without algebra; None without a reference."""
        answer = self._task.answer
        references = answer if isinstance(answer, OneOf) else [answer]
        if not (answer and answers):
            return None
        read = [(reference, extract(answers[-1], reference)) for reference in references]
        return any(said is not None and quick(known, said) for known, said in read)

    def _instructions(self) -> str:
        """Returns the text above the texts to judge: task, reference, criteria, form."""
        reference, criteria = self._task.answer, enumerate(self._settings.rubric, 1)
        known = f"The reference answer is: {reference}\n" if reference else ""
        lines = "".join(f"{n}. {text}\n" for n, text in criteria)
        by = f" by these criteria:\n{lines}" if lines else ".\n"
        return f"The task: {self._task.question}\n{known}Judge the texts below{by}{self._form()}\n"

    def _form(self) -> str:
        """Describes the form of a verdict. No text that is judged has the nonce."""
        rubric, best = self._settings.rubric, f"{self._settings.marks:g}"
        value = ", ".join("?" * len(rubric)) or "N"
        means = "yes or no for each criterion" if rubric else f"a mark from 0 to {best}"
        return (
            f"End your reply with the line `{SCORE} {self._nonce}: {value}` ({means}). Directly "
            f"above it, `NAME {self._nonce}: N` may give one author a mark from 0 to {best}."
        )

    def _scores(self, text: str, is_whole: bool) -> dict[str, float]:
        """Reads a verdict; a reply without a score, or one that was cut off, has none."""
        settings = self._settings
        text = without_thinking(text)
        scores = scores_of(text, self._nonce, (), settings.marks, len(settings.rubric))
        return scores if is_whole and SCORE in scores else {}

    def _judge(self, turns: Sequence[Turn]) -> JudgeReply:
        said = "\n".join(f"{turn.name}: {without_thinking(turn.text)}" for turn in turns)
        content, text, spent, scores = f"{self._instructions()}\n{said}", "", 0, {}
        assert self._server is not None
        for _ in range(_ASKS):
            text, finish, tokens = self._server.ask(content)
            scores = self._scores(text, finish != "length")
            spent += tokens
            if scores:
                break
            content = f"{content}\n\n{_AGAIN} {self._form()}"
        return JudgeReply(text, spent, scores)


class TeamJudged(Judged):
    """Episode of one step that the team's agent ``judge`` judges."""

    def view(self, agent: str, observation: str) -> str:
        return self._instructions() if agent == JUDGE else observation

    def tool(self, turn: Turn) -> str | None:
        """Asks the judge again if its reply has no verdict."""
        has_verdict = turn.name != JUDGE or self._scores(turn.text, not turn.truncated)
        if has_verdict or self._asked == _ASKS:
            return None
        self._asked += 1
        return f"{_AGAIN} {self._form()}"

    def _judge(self, turns: Sequence[Turn]) -> JudgeReply:
        judged = [turn for turn in turns if turn.name == JUDGE]
        if not judged:
            raise BadInput(
                "--env.name judged: expected an agent named judge in the team, with `trainable: "
                "false` (configs/teams/judged.yaml), or --env.url; none acted (with --compare, or "
                "--team.workflow solo, the answering agent acts alone: take --env.url there)"
            )
        last = judged[-1]
        scores = self._scores(last.text, not last.truncated)
        return JudgeReply(last.text, len(last.prompt) + len(last.action), scores)
