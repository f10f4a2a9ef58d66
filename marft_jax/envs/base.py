"""Contract of an environment, and its lookup by name.

A user's own environment is a class with the two methods of ``Env``, in any file that Python can
import: ``--env.name my_module:Parity``. Options of its own are arguments of its constructor with
defaults, such as ``most=100``: ``--env.options most=20`` sets them. An example: the main README.

This module imports neither JAX nor any heavy package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from inspect import Parameter
from typing import Any, Literal, NamedTuple, Protocol, cast

from pydantic import TypeAdapter, ValidationError

from marft_jax.background import finished
from marft_jax.errors import BadInput
from marft_jax.plugins import (
    EXTRAS,
    check_takes,
    extras_of,
    load_extra,
    load_plugin,
    settings_of,
    shown,
)
from marft_jax.settings.config import EnvSettings
from marft_jax.settings.setting import Count, Fraction
from marft_jax.types import StepResult, Turn, without_thinking

Split = Literal["train", "eval"]

BUILT_IN = {
    "arithmetic": "marft_jax.envs.arithmetic",
    "math": "marft_jax.envs.maths",
    **{name: EXTRAS[f"env.{name}"] for name in extras_of("env")},
}
"""Name to its module: ``Settings`` and ``source(settings, split)``."""

EVAL_SEEDS = 1 << 30  # added to the seeds that a user's environment gets in evaluation


def first_seed(split: Split) -> int:
    """Returns the offset of the seeds, which tells evaluation from training."""
    return EVAL_SEEDS if split == "eval" else 0


_GIVEN = ("split", "level", "settings")  # parameters of a user's class that the run gives


class Env(Protocol):
    """Environment of one episode: each episode makes an object of its own.

    Further methods are optional:

    - ``view(agent, observation) -> str``: the text that the agent of this name sees of the state.
    - ``tool(turn) -> str | None``: the answer to a tool call in the turn, after which the same
      agent continues; None if the turn calls no tool.
    - ``demonstrate(agents)``: turns that solve the task of ``reset``, as ``{"agent": name, "text":
      text}`` in the order of the team's workflow; ``agents`` are the members in acting order.
    - ``snapshot()`` and ``restore(value)``: the state as a value that JSON can hold, and a fresh
      environment after the same ``reset`` set to this state. With these, branches of an episode
      (see ``rollout/README.md``) repeat no step.

    All methods are called from threads; ``view`` of all episodes is called one after another.
    """

    def reset(self, seed: int) -> str:
        """Returns the task text, which every agent sees; the same text for the same seed."""
        ...

    def step(self, turns: Sequence[Turn]) -> StepResult:
        """Answers the turns of the team in this step. It runs in a thread and may block."""
        ...


class Game(Env, Protocol):
    """Environment whose players each have rewards of their own; it needs the workflow ``players``.

    All agents of a player get the player's reward. ``agent_rewards`` may pay players, and agents
    that did not act in the step; every player gets ``reward``. A method ``legal(agent)`` is
    optional: it lists the only texts that the sampler may draw for this agent.
    """

    def players(self, agents: Sequence[str]) -> Mapping[str, str]:
        """Returns agent to player, for the team's agents in order; called once, after ``reset``."""
        ...

    def acting(self) -> Sequence[str]:
        """Names the agents that act next; several agents act at the same time."""
        ...

    def view(self, agent: str, observation: str) -> str:
        """Returns the text that the agent sees."""
        ...


class Member(Protocol):
    """Agent of the team, as ``demonstrate`` gets it; ``answers``: its turns are graded."""

    @property
    def name(self) -> str: ...

    @property
    def answers(self) -> bool: ...


class Task(NamedTuple):
    """A question, and the answer as its grader needs it; transcripts show ``str(answer)``."""

    question: str
    answer: Any


class OneOf(tuple[str, ...]):
    """Alternative answers, each right by itself: names of the same thing, or the letter and the
    text of a choice."""

    def __str__(self) -> str:
        return " or ".join(self)


class Grade(NamedTuple):
    """Verdict of a grader on one text.

    Attributes:
        score: the reward, any float; 0 for a wrong answer, 1 for a right one.
        verdict: ``right``, ``wrong``, ``no answer``, ``timeout`` or ``crashed``; "" for a score
            that tells of no right and wrong.
        answer: the answer that was found in the text.
        feedback: text after "The answer is incorrect." that the team sees before the next step.
    """

    score: float
    verdict: str
    answer: str = ""
    feedback: str = ""


class EnvSource(NamedTuple):
    """Source of episodes.

    Attributes:
        create: makes an ``Env``, once per episode.
        size: number of distinct tasks; None for no limit.
        close: ends what the environments share, such as grading processes.
        easier: like ``create``, for easier tasks, the easiest first; for a curriculum.
    """

    create: Callable[[], Env]
    size: int | None = None
    close: Callable[[], None] = lambda: None
    easier: Sequence[Callable[[], Env]] = ()


INCORRECT = "The answer is incorrect."


class QuestionEnv:
    """Environment of questions. It grades the turns of answering agents, without their thinking.

    The score of a step is the mean grade over the turns of answering agents. The first step earns
    its score; a later step earns the amount by which its score exceeds all earlier scores. So the
    return is the best score. The episode ends with a right answer or after ``horizon`` steps.
    Between steps the agents see all actions and the judge's answer.

    Args:
        pick: function from a seed to a task.
        grade: function from (text of a graded turn, answer of the task) to a grade.
        horizon: steps per episode.
    """

    def __init__(
        self, pick: Callable[[int], Task], grade: Callable[[str, Any], Grade], horizon: int = 1
    ) -> None:
        self._pick, self._grade, self._horizon = pick, grade, horizon

    def reset(self, seed: int) -> str:
        self._task = self._pick(seed)
        self._state, self._scores = self._task.question, []
        return self._state

    def step(self, turns: Sequence[Turn]) -> StepResult:
        graded = [turn for turn in turns if turn.answers]
        texts = [without_thinking(turn.text) for turn in graded]
        grades = [self._grade(text, self._task.answer) for text in texts]
        score = float(sum(grade.score for grade in grades) / max(len(grades), 1))
        reward = max(score - max(self._scores), 0.0) if self._scores else score
        self._scores.append(score)
        solved = any(grade.verdict == "right" for grade in grades)
        remarks = [grade.feedback for grade in grades if grade.feedback]
        known = [INCORRECT] if any(grade.verdict for grade in grades) or not grades else []
        judge = None if solved else " ".join([*known, *remarks])
        self._state = next_state(self._state, turns, judge)
        info: dict[str, Any] = {
            "reference": str(self._task.answer),
            "verdicts": [
                {"agent": turn.name, "verdict": grade.verdict, "answer": grade.answer}
                for turn, grade in zip(graded, grades, strict=True)
                if grade.verdict
            ],
        }
        failed = [grade.verdict for grade in grades if grade.verdict in ("timeout", "crashed")]
        if failed:
            info["grader"] = failed[0]
        done = solved or len(self._scores) >= self._horizon
        feedback = f"judge: {judge}" if judge else ""
        return StepResult(self._state, reward, done, info, feedback=feedback)


def next_state(state: str, turns: Sequence[Turn], judge: str | None = INCORRECT) -> str:
    """Appends every agent's action, without its thinking, and the judge's answer to the state text.

    >>> from types import SimpleNamespace
    >>> next_state("1+1=?", [SimpleNamespace(name="solver", text="3")])
    '1+1=?\\nsolver: 3\\njudge: The answer is incorrect.'
    """
    actions = "".join(f"\n{turn.name}: {without_thinking(turn.text)}" for turn in turns)
    return state + actions + (f"\njudge: {judge}" if judge else "")


def held_out(text: str, fraction: float) -> bool:
    """True for held-out tasks: the SHA-256 of the text, scaled to [0, 1), is below ``fraction``."""
    digest = hashlib.sha256(text.strip().encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


@dataclasses.dataclass(frozen=True)
class QuestionSettings(EnvSettings):
    """Settings of environments of questions."""

    horizon: Count = 1
    """Steps per episode: how often the team may try, with feedback between the tries."""
    holdout: Fraction = 0.1
    """Fraction of the tasks that is kept for evaluation, chosen by a hash of their text."""


@dataclasses.dataclass(frozen=True)
class Own(EnvSettings):
    """Settings of an environment of a user's own."""

    options: tuple[str, ...] = ()
    """Arguments of your class, as `name=value`."""
    curriculum: float | None = None
    """Mean reward at which training goes on to the next harder level, from the easiest one; none:
    all tasks are as hard as they come."""


def settings_type(name: str) -> type[EnvSettings]:
    """Finds the type of an environment's settings. A user's class may declare it as ``Settings``, a
    frozen dataclass that extends ``Own`` or ``EnvSettings``; else it is ``Own``.

    Raises:
        BadInput: there is no such environment.
    """
    if name in BUILT_IN:
        return importlib.import_module(BUILT_IN[name]).Settings
    users_class = load_plugin(name, "--env.name", BUILT_IN, "Class")
    return settings_of(users_class, f"--env.name {name}", EnvSettings, Own)


def make(settings: EnvSettings, split: Split) -> EnvSource:
    """Makes the environment that the settings name, with its training or its held-out tasks.

    The integer given to ``reset`` is the position in the endless seeded order of training tasks,
    or the number of the held-out task. A user's class gets ``options`` as keyword arguments,
    ``settings=`` where it declares them, and ``split=`` if it has such a parameter; else evaluation
    adds ``EVAL_SEEDS`` to the seeds. A function of (task, client) is an agent program.

    Raises:
        BadInput: the name is unknown, cannot be imported, or is not an environment; or the
            environment's own settings or data are wrong.
    """
    name = settings.name
    if name in BUILT_IN:
        return importlib.import_module(BUILT_IN[name]).source(settings, split)
    factory = load_plugin(name, "--env.name", BUILT_IN, "Class")
    if inspect.isfunction(factory) and len(inspect.signature(factory).parameters) == 2:
        return load_extra("program.source")(factory, split)  # play(task, client)
    return from_class(_bind(factory, settings), split, name)


def open_source(settings: EnvSettings, split: Split) -> AbstractContextManager[EnvSource]:
    """Opens the environment that the settings name, see ``make``, and closes it in the end."""
    source: Any = make(settings, split)  # its `close` is a field
    return contextlib.closing(source)


def _bind(factory: Callable[..., Env], settings: EnvSettings) -> Callable[..., Env]:
    """Binds a user's class to its options and its settings; raises ``BadInput``."""
    name = settings.name
    missing = [method for method in ("reset", "step") if not hasattr(factory, method)]
    if not callable(factory) or inspect.isclass(factory) and missing:
        raise BadInput(
            f"--env.name {name}: expected a class with reset(seed) and step(turns), got "
            f"{shown(factory)}" + (f" without {' and '.join(missing)}" if missing else "")
        )
    if inspect.isclass(factory):
        for method, parameter in (("reset", "seed"), ("step", "turns")):
            static = inspect.getattr_static(factory, method)
            if static is None or inspect.isfunction(static):
                check_takes(static, f"--env.name {name}: {method}", "self", parameter)
    parameters = inspect.signature(factory).parameters
    given = _options(name, parameters, getattr(settings, "options", ()))
    if type(settings) is not Own:
        given["settings"] = settings
    split = {"split": "train"} if "split" in parameters else {}
    try:
        inspect.signature(factory).bind(**given, **split)
    except TypeError as error:
        raise BadInput(
            f"--env.name {name}: {error}; give its parameters defaults, or values in --env.options"
            + "; an agent program is a function of (task, client)" * inspect.isfunction(factory)
        ) from error
    return functools.partial(factory, **given)


def _options(
    name: str, parameters: Mapping[str, Parameter], options: Sequence[str]
) -> dict[str, Any]:
    """Reads ``name=value`` as keyword arguments of a user's class.

    An option has the type of its default. Other values are JSON, or else texts.
    """
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    defaults = {key: p.default for key, p in parameters.items() if key not in _GIVEN}
    values: dict[str, Any] = {}
    for option in options:
        key, value = read_option(option)
        if key in _GIVEN or key not in defaults and not takes_any:
            takes = ", ".join(defaults) or "no options"
            raise BadInput(f"--env.options: {name} takes {takes}, got {option!r:.60}")
        if isinstance(default := defaults.get(key), (str, bool, int, float)):
            try:
                value = TypeAdapter(type(default)).validate_strings(option.partition("=")[2])
            except ValidationError:
                kind = f"{json.dumps(default)} or another {type(default).__name__}"
                raise BadInput(
                    f"--env.options: {name} takes {key}={kind}, got {option!r:.60}"
                ) from None
        values[key] = value
    return values


def read_option(text: str) -> tuple[str, Any]:
    """Splits ``name=value``; the value is parsed as JSON if it is valid JSON, else kept as text.

    >>> read_option("size=3"), read_option("words=a=b")
    (('size', 3), ('words', 'a=b'))
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise BadInput(f"--env.options: expected name=value, got {text!r:.60}")
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value


def from_class(factory: Callable[..., Env], split: Split, name: str = "") -> EnvSource:
    """Makes the source for a user's class, see ``make``."""
    parameters = inspect.signature(factory).parameters
    if "split" in parameters:
        return EnvSource(functools.partial(_made, name, factory, 0, split=split))
    create = functools.partial(_made, name, factory, first_seed(split))
    levels = getattr(getattr(factory, "func", factory), "levels", 1) if "level" in parameters else 1
    makers = [functools.partial(create, level=level) for level in range(levels)]
    return EnvSource(create, easier=makers[:-1])


def _made(name: str, factory: Callable[..., Env], offset: int, **arguments: Any) -> Env:
    """Makes an environment; raises ``BadInput`` for a function that makes something else."""
    env = factory(**arguments)
    if not all(hasattr(env, method) for method in ("reset", "step")):
        raise BadInput(
            f"--env.name {name}: expected an environment with reset(seed) and step(turns), got "
            f"{shown(env)}; an agent program is a function of (task, client)"
        )
    is_async = inspect.getmembers(type(env), inspect.iscoroutinefunction)
    return cast(Env, _UsersEnv(env, offset)) if is_async or offset else env


class _UsersEnv:
    """User's environment with the seeds of one side of the split, and with its ``async`` methods
    waited for."""

    def __init__(self, env: Env, offset: int) -> None:
        self._env, self._offset = env, offset

    def reset(self, seed: int) -> str:
        return finished(self._env.reset(seed + self._offset))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._env, name)
        is_async = inspect.iscoroutinefunction(method)
        return (lambda *arguments: finished(method(*arguments))) if is_async else method
