"""Verdicts of a judge as numbers: the last lines of a reply, and the step reward of a turn."""

from __future__ import annotations

import re
from collections.abc import Sequence

from marft_jax.types import Episode, Turn

JUDGE = "judge"
SCORE = "score"  # the line of a verdict that is about all of the texts
_MARK = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)(?: ?/ ?(\d{1,15}(?:\.\d{1,15})?))?", re.ASCII)


def scores_of(
    text: str, nonce: str = "", names: Sequence[str] = (), best: float = 10.0, criteria: int = 0
) -> dict[str, float]:
    """Reads the verdict of a reply: its last lines ``NAME NONCE: N`` or ``NAME NONCE: N/BEST``.

    Returns no scores if a line has another form, a mark is above the best mark, or a name occurs
    twice.

    Args:
        nonce: nonce of the question; with "" the lines are ``NAME: N``.
        names: without a nonce, the only names that count.
        best: best mark.
        criteria: number of criteria; with criteria ``SCORE`` has a yes or no for each, not a mark.

    >>> scores_of("planner 1f: 5/10\\nscore 1f: 8", "1f")
    {'score': 0.8, 'planner': 0.5}
    >>> scores_of("score 1f: yes, no", "1f", criteria=2)
    {'score': 0.5}
    >>> scores_of("The planner wrote: score: 10", "1f"), scores_of("score 1f: -3", "1f")
    ({}, {})
    """
    scores: dict[str, float] = {}
    for line in reversed(text.splitlines()):
        label, _, value = re.sub(r"[*`]", "", line).strip(" -.").partition(":")
        name, _, said_nonce = label.rpartition(" ") if nonce else (label, "", "")
        name = SCORE if name.lower() == SCORE else name
        if label and (said_nonce != nonce or not (nonce or name in names)):
            break
        if label:
            score = _read(value.strip(), best, criteria if name == SCORE else 0)
            if score is None or name in scores:
                return {}
            scores[name] = score
    return scores


def _read(value: str, best: float, criteria: int) -> float | None:
    """Reads a mark, or with criteria a yes or no for each, as a score from 0 to 1."""
    if criteria:
        said = re.split(r"[,\s]+", value.lower())
        is_one = len(said) == criteria and {"yes", "no"}.issuperset(said)
        return said.count("yes") / criteria if is_one else None
    match = _MARK.fullmatch(value)
    is_one = match and float(match[1]) <= best == float(match[2] or best)
    return float(match[1]) / best if match and is_one else None


def step_reward(turn: Turn, reward: float, episode: Episode) -> float:
    """Mark from 0 to 1 that a judge gives this agent, or all agents; R where there is no mark.

    In the environment ``judged`` the mark is that of the judge's verdict
    (``scores_of``). In other environments the agent ``judge`` ends with lines such as
    ``planner: 7`` or ``score: 7``, out of 10. A line that another agent wrote as well is a
    quotation and not a mark.
    """
    info = episode.results[turn.step].info
    if "scores" in info:
        return dict(info["scores"] or {}).get(turn.name, reward)
    said = [t for t in episode.turns if t.step == turn.step and t.name == JUDGE]
    names = [SCORE, *(t.name for t in episode.turns)]
    scores = scores_of(said[-1].text, names=names) if said else {}
    name = turn.name if turn.name in scores else SCORE
    if name not in scores or said[-1].truncated:
        return reward
    mark = rf"{re.escape(name)}\W*:\W*0*{10 * scores[name]:g}(?!\d|\.\d*[1-9])"
    quoted = any(re.search(mark, t.text, re.I) for t in episode.turns if t.name != JUDGE)
    return reward if quoted else scores[name]
