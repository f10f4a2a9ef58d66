"""Demonstrations: episodes that were recorded or written by hand, played again.

A demonstration is played through the team's own workflow and environment, with the recorded
actions in place of sampled ones. So every agent is shown exactly what it will see when it acts
itself. A demonstration is a line of JSON, written by hand or taken from a transcript of any run:

    {"task": 7, "turns": [{"agent": "planner", "text": "3+5=8"}, {"agent": "solver", "text": "17"}]}

``task`` is the number of a task of the environment, or a text. A text is the whole task: the
episode ends after one step and earns the line's ``reward`` or 0. A transcript has both: the number
as ``index``, and the text, which must be the text of that task. A turn may have two flags: ``tool``
(it called a tool) and ``truncated`` (its token limit cut it off). With ``calls``, as transcripts
have them, its tools are not called again. With ``ids``, as transcripts have them, it is learned as
it was sampled, if these ids have its text; otherwise its text is encoded.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from pydantic import TypeAdapter, ValidationError

from marft_jax.envs.base import Env
from marft_jax.errors import BadInput, reason
from marft_jax.formats import foreign, jsonlines
from marft_jax.models.tokenizers.tokenizer import Tokenizer
from marft_jax.plugins import Failure, number_of, shown, text_of
from marft_jax.rollout.actions import Action, ActionSampler, places_of
from marft_jax.rollout.rollout import Rollout
from marft_jax.sampling import stops
from marft_jax.sampling.protocol import Completion
from marft_jax.settings.setting import fault_of
from marft_jax.team.profiles import Profile
from marft_jax.team.prompts import Team
from marft_jax.types import Act, AnsweredCall, Episode, FailedEpisode, Sample, StepResult, Turn

_CALLS = TypeAdapter(tuple[AnsweredCall, ...])
_AT_ONCE = 256  # episodes that are played together
_FORM = 'expected {"task": ..., "turns": [{"agent": ..., "text": ...}, ...]}'


class RecordedTurn(NamedTuple):
    """A recorded turn.

    Attributes:
        tool: the turn called a tool.
        truncated: its token limit cut it off.
        calls: its calls of the agent's tools, whose answers are used in place of new calls.
        ids: its tokens as they were sampled, as the line has them: unchecked.
    """

    agent: str
    text: str
    tool: bool = False
    truncated: bool = False
    calls: tuple[AnsweredCall, ...] = ()
    ids: Any = None


class Demonstration(NamedTuple):
    """A recorded episode.

    Attributes:
        where: file and line number, for messages.
        line: the line itself.
        number: number of its task in the environment; None where only the text is known.
        task: text of its task; None where only the number is known.
        turns: turns in acting order.
        reward: reward when it was recorded; None where it is not known.
    """

    where: str
    line: str
    number: int | None
    task: str | None
    turns: tuple[RecordedTurn, ...]
    reward: float | None = None


def read(file: str) -> Iterator[Demonstration | str]:
    """Yields the demonstrations of a file, and an error message for each line that is none.

    Raises:
        BadInput: the file cannot be read.
    """
    try:
        with foreign.open_regular(Path(file)) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _parsed(line, f"{file}:{number}")
    except (OSError, ValueError) as error:
        raise BadInput(f"--data {file}: cannot be read ({reason(error)})") from error


def _parsed(line: bytes, where: str) -> Demonstration | str:
    try:
        text = line.decode("utf-8-sig").strip()
        return _demonstration(where, text, json.loads(text))
    except BadInput as error:
        return f"{where}: {error}"
    except (ValueError, RecursionError) as error:
        return f"{where}: {_FORM}, got no JSON: {reason(error)}"


def _demonstration(where: str, line: str, row: Any) -> Demonstration:
    fields = _fields(row)
    turns: Any = fields.get("turns")
    if not isinstance(turns, list) or not turns:
        raise BadInput(f"{_FORM}, got {shown(row)}")
    index, task, reward = (fields.get(key) for key in ("index", "task", "reward"))
    if type(task) is int:
        index, task = task, None
    if index is None and task is None or not (index is None or type(index) is int and index >= 0):
        raise BadInput(f"expected the number or the text of its task, got {shown(index)}")
    return Demonstration(
        where,
        line,
        index,
        None if task is None else text_of("task", task),
        tuple(_turn(turn, f"turn {k}") for k, turn in enumerate(turns, 1)),  # pyright: ignore
        None if reward is None else number_of("reward", reward),
    )


def _fields(row: Any) -> dict[str, Any]:
    return cast(dict[str, Any], row) if isinstance(row, dict) else {}


def _turn(turn: Any, what: str) -> RecordedTurn:
    fields = _fields(turn)
    agent, tool, cut = (fields.get(key) for key in ("agent", "tool", "truncated"))
    if not isinstance(agent, str):
        raise BadInput(f'{what}: expected {{"agent": ..., "text": ...}}, got {shown(turn)}')
    text = text_of(f"{what}, text", fields.get("text"))
    try:
        calls = _CALLS.validate_python(fields.get("calls", ()))
    except ValidationError as error:
        raise BadInput(f"{what}, calls{fault_of(error, tuple[AnsweredCall, ...])}") from None
    calls = tuple(call._replace(answer=text_of(what, call.answer)) for call in calls)
    ids = fields.get("ids")
    return RecordedTurn(agent, text, tool not in (None, False), cut is True, calls, ids)


def demonstrated(
    create_env: Callable[[], Env], agents: Sequence[Profile], tasks: Iterable[int]
) -> Iterator[Demonstration | str]:
    """Yields the demonstrations that the environment offers for these tasks, see ``envs.base.Env``.

    Raises:
        BadInput: the environment offers no demonstrations.
    """
    for number in tasks:
        env: Any = create_env()
        row = {"index": number, "task": env.reset(number)}
        if not hasattr(env, "demonstrate"):
            raise BadInput(
                "--demonstrations: this environment offers none; give its class a method "
                "demonstrate(agents), or take --data"
            )
        line = jsonlines.dumps(row | {"turns": env.demonstrate(agents)})
        yield _parsed(line.encode(), f"task {number}")


def replay(demonstrations: Sequence[Demonstration], rollout: Rollout) -> list[Episode | str]:
    """Returns the episode of each demonstration, or a message why the workflow cannot replay it.

    Recorded actions have log-prob 0 and temperature 1, and were drawn under no mask.

    Args:
        rollout: plays the team in its environment; its sampler is not used.

    Raises:
        Stopped: ``rollout.stop`` returned True.
    """
    sampling = tuple(s._replace(temperature=1.0) for s in rollout.team.sampling)
    team = rollout.team._replace(sampling=sampling)

    def recorded(sample: Sample) -> ActionSampler:
        return _recorded_sampler(demonstrations[sample.index], team)

    player = dataclasses.replace(
        rollout,
        sampler=None,
        team=team,
        create_env=lambda: _RecordedTask(demonstrations, rollout.create_env),
        max_failed=None,
        recorded=recorded,
    )
    found = list[Episode | FailedEpisode]()
    for first in range(0, len(demonstrations), _AT_ONCE):
        numbers = range(first, min(first + _AT_ONCE, len(demonstrations)))
        played = player.play([Sample(i, i) for i in numbers], 0)
        found += sorted([*played.episodes, *played.failed], key=lambda episode: episode.index)
    return [_checked(*pair) for pair in zip(demonstrations, found, strict=True)]


def _checked(own: Demonstration, episode: Episode | FailedEpisode) -> Episode | str:
    """Returns the episode of a demonstration, or a message that says how it differs."""
    if isinstance(episode, FailedEpisode):
        return f"{own.where}: {episode.why}"
    if (ends := len(episode.turns)) < len(own.turns):
        cut = episode.results[-1].info.get("truncated")
        why = f" (its {cut} are full)" if cut else ""
        return f"{own.where}: the episode ends after turn {ends} of {len(own.turns)}{why}"
    turns = tuple(turn._replace(choices=(), form="") for turn in episode.turns)
    index = episode.index if own.number is None else own.number
    return episode._replace(index=index, turns=turns)


def _recorded_sampler(own: Demonstration, team: Team) -> ActionSampler:
    """Makes what finds the recorded actions of a demonstration."""
    places = places_of([turn.tool for turn in own.turns])
    turns = dict(zip(places, enumerate(own.turns, 1), strict=True))

    async def find(act: Act, place: tuple[int, int], together: range) -> Action:
        if place not in turns:
            raise Failure(f"it has no turn {len(turns) + 1}, which comes then")
        (k, turn), name = turns[place], team.names[act.agent]
        if turn.agent not in team.names:
            known = f"the team has {', '.join(team.names)}"
            raise Failure(f"turn {k}: unknown agent {shown(turn.agent)}; {known}")
        if turn.agent != name:
            raise Failure(f"turn {k}: expected {name}, whose turn it is, got {turn.agent}")
        tokenizer, limit = team.tokenizers[act.agent], act.sampling.max_new_tokens
        ids: list[int] = turn.ids if isinstance(turn.ids, list) else []  # pyright: ignore
        known = {*map(type, ids)} == {int} and len(ids) <= limit and {*ids} <= tokenizer.tokens
        said = functools.partial(tokenizer.said, act.prompt.tolist())
        if not known or stops.text_of(ids, act.sampling.stop, said) != turn.text:
            ids = _recorded_ids(turn, tokenizer, limit, f"turn {k}")
        why, logprobs = "length" if turn.truncated else "end", np.zeros(len(ids), np.float32)
        return Action(Completion(np.asarray(ids, np.int32), logprobs, why), turn.calls)

    return find


def _recorded_ids(turn: RecordedTurn, tokenizer: Tokenizer, limit: int, what: str) -> list[int]:
    ids = tokenizer.encode(turn.text)
    if set(ids) & set(tokenizer.eos_ids):
        raise Failure(f"{what}: its text spells out the token that ends a turn")
    if turn.truncated and ids:
        return ids[:limit]
    if len(ids) >= limit:
        raise Failure(
            f"{what}: expected at most the {limit} tokens that {turn.agent} may write there, got "
            f"{len(ids) + 1} with the end of the turn; raise max_new_tokens or --model.context"
        )
    return [*ids, tokenizer.end_id]


class _RecordedTask:
    """Environment of a demonstration: the team's own at the number of its task. Where only the text
    of the task is known, it pays the recorded reward."""

    def __init__(self, demonstrations: Sequence[Demonstration], create: Callable[[], Env]):
        self._demonstrations, self._create = demonstrations, create
        self._env: Any = None

    def reset(self, seed: int) -> str:
        self._own = own = self._demonstrations[seed]
        if own.number is None:
            return own.task or ""
        self._env = self._create()
        task = text_of("reset: the task", self._env.reset(own.number))
        if own.task not in (None, task):
            raise BadInput(
                f"task {own.number} of this environment is {shown(task)}, expected "
                f"{shown(own.task)}; see --env, or leave the number out"
            )
        return task

    def step(self, turns: Sequence[Turn]) -> StepResult:
        if self._env is None:
            return StepResult("", self._own.reward or 0.0, done=True)
        return self._env.step(turns)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)  # its view, its tool
