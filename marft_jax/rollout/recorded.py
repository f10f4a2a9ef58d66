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
from typing import Annotated, Any, cast

import numpy as np
import pydantic
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from marft_jax.envs.base import Env
from marft_jax.errors import BadInput, reason
from marft_jax.formats import foreign, jsonlines
from marft_jax.models.tokenizers.tokenizer import Tokenizer
from marft_jax.plugins import Failure, shown, text_of
from marft_jax.rollout.actions import TurnSampler, places_of, turn_of
from marft_jax.rollout.rollout import Rollout
from marft_jax.sampling import stops
from marft_jax.sampling.protocol import Completion
from marft_jax.settings.setting import Natural, fault_of
from marft_jax.team.profiles import Profile
from marft_jax.team.prompts import Team
from marft_jax.types import Act, AnsweredCall, Episode, FailedEpisode, Sample, StepResult, Turn

_AT_ONCE = 256  # episodes that are played together
_FORM = 'expected {"task": ..., "turns": [{"agent": ..., "text": ...}, ...]}'
_Text = Annotated[
    str, BeforeValidator(lambda text: text_of("text", text) if isinstance(text, str) else text)
]


@pydantic.dataclasses.dataclass(frozen=True)
class RecordedTurn:
    """A recorded turn.

    Attributes:
        tool: the answer of a tool that the turn called, or true.
        truncated: its token limit cut it off.
        calls: its calls of the agent's tools, whose answers are used in place of new calls.
        ids: its tokens as they were sampled, as the line has them: unchecked.
    """

    agent: str
    text: _Text
    tool: bool | str | None = None
    truncated: bool = False
    calls: tuple[AnsweredCall, ...] = ()
    ids: Any = None


@pydantic.dataclasses.dataclass(frozen=True)
class Demonstration:
    """A recorded episode.

    Attributes:
        where: file and line number, for messages.
        line: the line itself.
        turns: turns in acting order.
        number: number of its task in the environment; None where only the text is known.
        task: text of its task; None where only the number is known.
        reward: reward when it was recorded; None where it is not known.
    """

    where: str
    line: str
    turns: Annotated[tuple[RecordedTurn, ...], Field(min_length=1)]
    number: Natural | None = None
    task: _Text | None = None
    reward: Annotated[float, Field(allow_inf_nan=False)] | None = None


_DEMONSTRATION = TypeAdapter(Demonstration)


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
        row: Any = json.loads(text)
        if isinstance(row, dict):
            fields = cast(dict[str, Any], row)
            row = {**fields, "number": fields.get("index"), "where": where, "line": text}
            if not isinstance(fields.get("task"), str | None):
                row |= {"number": fields["task"], "task": None}
        demonstration = _DEMONSTRATION.validate_python(row)
    except ValidationError as error:
        return f"{where}: {_FORM}; {fault_of(error, Demonstration)}"
    except (ValueError, RecursionError) as error:
        return f"{where}: {_FORM}, got no JSON: {reason(error)}"
    if demonstration.number is None and demonstration.task is None:
        return f"{where}: expected the number or the text of its task, got none"
    return demonstration


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

    def recorded(sample: Sample) -> TurnSampler:
        return _recorded_sampler(demonstrations[sample.index], team)

    player = dataclasses.replace(
        rollout,
        sampler=None,
        team=team,
        create_env=lambda: _RecordedTask(demonstrations, rollout.create_env),
        max_failed=None,
        recorded=recorded,
    )
    episodes = list[Episode | FailedEpisode]()
    for first in range(0, len(demonstrations), _AT_ONCE):
        numbers = range(first, min(first + _AT_ONCE, len(demonstrations)))
        played = player.play([Sample(i, i) for i in numbers], 0)
        episodes += sorted([*played.episodes, *played.failed], key=lambda episode: episode.index)
    return [_checked(*pair) for pair in zip(demonstrations, episodes, strict=True)]


def _checked(demonstration: Demonstration, episode: Episode | FailedEpisode) -> Episode | str:
    """Returns the episode of a demonstration, or a message that says how it differs."""
    where, wanted = demonstration.where, len(demonstration.turns)
    if isinstance(episode, FailedEpisode):
        return f"{where}: {episode.why}"
    if (ends := len(episode.turns)) < wanted:
        cut = episode.results[-1].info.get("truncated")
        why = f" (its {cut} are full)" if cut else ""
        return f"{where}: the episode ends after turn {ends} of {wanted}{why}"
    turns = tuple(turn._replace(choices=(), form="") for turn in episode.turns)
    index = episode.index if demonstration.number is None else demonstration.number
    return episode._replace(index=index, turns=turns)


def _recorded_sampler(demonstration: Demonstration, team: Team) -> TurnSampler:
    """Makes what finds the recorded turns of a demonstration."""
    places = places_of([turn.tool not in (None, False) for turn in demonstration.turns])
    turns = dict(zip(places, enumerate(demonstration.turns, 1), strict=True))

    async def find(act: Act, place: tuple[int, int], together: range) -> Turn:
        if place not in turns:
            raise Failure(f"it has no turn {len(turns) + 1}, which comes then")
        (k, turn), name = turns[place], team.names[act.agent]
        if turn.agent != name:
            raise Failure(f"turn {k}: expected {name}, whose turn it is, got {shown(turn.agent)}")
        tokenizer, limit = team.tokenizers[act.agent], act.sampling.max_new_tokens
        ids: list[int] = turn.ids if isinstance(turn.ids, list) else []  # pyright: ignore
        known = {*map(type, ids)} == {int} and len(ids) <= limit and {*ids} <= tokenizer.tokens
        decode = functools.partial(tokenizer.said, act.prompt.tolist())
        if not known or stops.text_of(ids, act.sampling.stop, decode) != turn.text:
            ids = _recorded_ids(turn, tokenizer, limit, f"turn {k}")
        reason, logprobs = "length" if turn.truncated else "end", np.zeros(len(ids), np.float32)
        completion = Completion(np.asarray(ids, np.int32), logprobs, reason)
        return turn_of(team, act, completion)._replace(calls=turn.calls)

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
        self._demonstration = demonstration = self._demonstrations[seed]
        if demonstration.number is None:
            return demonstration.task or ""
        self._env = self._create()
        task = text_of("reset: the task", self._env.reset(demonstration.number))
        if demonstration.task not in (None, task):
            raise BadInput(
                f"task {demonstration.number} of this environment is {shown(task)}, expected "
                f"{shown(demonstration.task)}; see --env, or leave the number out"
            )
        return task

    def step(self, turns: Sequence[Turn]) -> StepResult:
        if self._env is None:
            return StepResult("", self._demonstration.reward or 0.0, done=True)
        return self._env.step(turns)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)  # its view, its tool
