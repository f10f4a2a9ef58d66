"""Questions without a checker: a judge's marks, or the share of criteria met, are the reward.

The judge is an agent of the team, named ``judge``, on the team's own base: it acts last, is shown
the criteria and the reference answer, which nobody else is, and has ``trainable: false``. Or it is
a model behind any address that speaks OpenAI's protocol. Only what the judge says is read, never
what it judges.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from marft_jax.envs.base import EnvSource, Split, Task
from marft_jax.envs.datasets import load
from marft_jax.envs.grading.compare import quick
from marft_jax.envs.grading.extract import extract
from marft_jax.errors import BadInput
from marft_jax.setting import setting
from marft_jax.types import StepResult, Turn

JUDGE = "judge"
_MARK = r"(?P<mark>\d+(?:\.\d+)?)(?:\s*/\s*(?P<best>\d+(?:\.\d+)?))?"
_OVERALL = re.compile(rf"\b(?:score|marks?)\b\D{{0,10}}{_MARK}", re.IGNORECASE)
_CRITERION = re.compile(r"^\W*(\d+)\W+(yes|no)\b", re.IGNORECASE | re.MULTILINE)
_LONGEST = 1 << 20  # bytes of a judge's reply


@dataclasses.dataclass(frozen=True)
class Settings(load.Rows):
    """Settings of questions that a judge grades."""

    name: str = "judged"
    rubric: tuple[str, ...] = ()
    """Criteria: the reward is the share of them that the judge says yes to; without any it gives
    marks."""
    marks: float = setting(10.0, above=0)
    """Best mark, where the judge does not write it itself, as in 7/10."""
    url: str | None = None
    """Address that speaks OpenAI's protocol, such as http://localhost:8000/v1, and judges in place
    of the team's agent `judge`; OPENAI_API_KEY is its key."""
    url_model: str = setting("default", needs="env.url")
    """Name of the model there."""
    url_seconds: float = setting(60.0, least=0.1, needs="env.url")
    """After so long without a reply an episode has failed."""
    question_field: str | None = None
    """Field of the question, where its name is not one of the usual ones."""
    answer_field: str | None = None
    """Field of a reference answer; rows need none."""
    horizon: ClassVar[int] = 1
    workers: ClassVar[int] = 1
    metrics: ClassVar[tuple[str, ...]] = (
        "judge_score", "judge_unread", "judge_tokens", "judge_agreement",
    )  # fmt: skip

    def task_of(self, row: Any) -> Task | str:
        """See ``Rows``; the answer is "" where a row has none."""
        return load.as_task(row, self.question_field, self.answer_field, needs_answer=False)


class Verdict(NamedTuple):
    """What a judge said, the tokens that it took, and its scores from 0 to 1: of all under ``""``,
    and of agents by name."""

    text: str
    tokens: int
    scores: Mapping[str, float]


def scores_of(
    text: str, names: Sequence[str] = (), best: float = 10.0, criteria: int = 0
) -> dict[str, float]:
    """Reads scores from what a judge wrote; what is not there is left out.

    >>> scores_of("planner: 5/10\\nscore: 8", ["planner", "solver"])
    {'': 0.8, 'planner': 0.5}
    >>> scores_of("1. yes\\n2. no", criteria=2)
    {'': 0.5}
    """
    found: dict[str, float] = {}
    if criteria:
        met = {int(number): word.lower() == "yes" for number, word in _CRITERION.findall(text)}
        if met:
            found[""] = sum(met.get(n + 1, False) for n in range(criteria)) / criteria
    elif marks := list(_OVERALL.finditer(text)):
        found[""] = _score(marks[-1], best)
    for name in names:
        own = re.search(rf"^\W*{re.escape(name)}\W*:\s*{_MARK}", text, re.IGNORECASE | re.MULTILINE)
        if own:
            found[name] = _score(own, best)
    return found


def _score(match: re.Match[str], best: float) -> float:
    return min(float(match["mark"]) / (float(match["best"] or 0) or best), 1.0)


def source(env: Settings, split: Split) -> EnvSource:
    """Questions from ``env.data`` (or, for evaluation, ``env.eval_data``); raises ``BadInput``."""
    if env.url is not None and not env.url.startswith(("http://", "https://")):
        raise BadInput(f"--env.url: expected http://... or https://..., got {env.url!r:.80}")
    pick, size = load.chooser(env, split)
    if env.url is None:
        return EnvSource(lambda: TeamJudged(pick, env), size)
    return EnvSource(lambda: Judged(pick, env), size)


class Judged:
    """An episode of one step, judged behind an address."""

    def __init__(self, pick: Callable[[int], Task], settings: Settings) -> None:
        self._pick, self._settings = pick, settings

    def reset(self, seed: int) -> str:
        self._task = self._pick(seed)
        return self._task.question

    def step(self, turns: Sequence[Turn]) -> StepResult:
        verdict = self._judge(turns)
        score = verdict.scores.get("")
        metrics: dict[str, float] = {"judge_tokens": verdict.tokens, "judge_unread": score is None}
        metrics |= {} if score is None else {"judge_score": score}
        right = self._is_right([turn.text for turn in turns if turn.answers])
        if score is not None and right is not None:
            metrics["judge_agreement"] = (score >= 0.5) == right
        scores = {name: mark for name, mark in verdict.scores.items() if name}
        info = {"reference": str(self._task.answer), "judge": verdict.text, "scores": scores}
        metrics = {name: float(value) for name, value in metrics.items()}
        return StepResult("", score or 0.0, True, info | {"metrics": metrics})

    def _is_right(self, answers: Sequence[str]) -> bool | None:
        """Compares the last answer with the reference, as far as that takes no algebra."""
        reference = str(self._task.answer)
        if not (reference and answers):
            return None
        answer = extract(answers[-1], reference)
        return False if answer is None else quick(reference, answer)

    def _instructions(self) -> str:
        """What the judge is shown above the texts that it judges."""
        settings, reference = self._settings, self._task.answer
        known = f"The reference answer is: {reference}\n" if reference else ""
        if settings.rubric:
            lines = "\n".join(f"{n}. {text}" for n, text in enumerate(settings.rubric, 1))
            how = f"For each criterion write its number, and yes or no:\n{lines}"
        else:
            how = f"End with a line `score: N`, from 0 to {settings.marks:g}."
        return f"The task: {self._task.question}\n{known}Judge the texts below. {how}\n"

    def _judge(self, turns: Sequence[Turn]) -> Verdict:
        said = "\n".join(f"{turn.name}: {turn.text}" for turn in turns)
        content = f"{self._instructions()}\n{said}"
        asked = {"model": self._settings.url_model, "temperature": 0}
        asked |= {"messages": [{"role": "user", "content": content}]}
        url = f"{str(self._settings.url).rstrip('/')}/chat/completions"
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
        with urllib.request.urlopen(request, timeout=self._settings.url_seconds) as reply:
            answer = json.loads(reply.read(_LONGEST))
        text = str(answer["choices"][0]["message"]["content"])
        tokens = int((answer.get("usage") or {}).get("total_tokens") or 0)
        return self._read(text, tokens, turns)

    def _read(self, text: str, tokens: int, turns: Sequence[Turn]) -> Verdict:
        names = [turn.name for turn in turns]
        settings = self._settings
        return Verdict(text, tokens, scores_of(text, names, settings.marks, len(settings.rubric)))


class TeamJudged(Judged):
    """An episode of one step, judged by the team's agent ``judge``, who acts in it."""

    def view(self, agent: str, observation: str) -> str:
        return self._instructions() if agent == JUDGE else observation

    def _judge(self, turns: Sequence[Turn]) -> Verdict:
        own = [turn for turn in turns if turn.name == JUDGE]
        if not own:
            raise BadInput(
                "--env.name judged: expected an agent named judge in the team, with `trainable: "
                "false` (configs/teams/judged.yaml), or --env.url; none acted"
            )
        tokens = len(own[-1].prompt) + len(own[-1].action)
        return self._read(own[-1].text, tokens, turns)
