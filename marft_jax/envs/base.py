"""What an environment is, and how one is found by name.

A user's own environment is a class with two methods, in any file that Python can import:

    class Parity:
        def reset(self, seed):
            self.number = seed % 100
            return f"Is {self.number} even? Answer yes or no."

        def step(self, turns):
            right = "no" if self.number % 2 else "yes"
            scores = [float(turn.text.strip() == right) for turn in turns if turn.answers]
            return StepResult("", sum(scores) / len(scores), done=True)

    python -m marft_jax.train --env.name my_module:Parity

Options of its own are arguments of its constructor with defaults, such as ``most=100``:
``--env.options most=20`` sets them.

This module imports neither JAX nor any heavy package.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from marft_jax.plugins import imported
from marft_jax.types import StepResult, Turn

if TYPE_CHECKING:
    from marft_jax.config import Config

Split = Literal["train", "eval"]

BUILT_IN = {
    "arithmetic": "marft_jax.envs.arithmetic",
    "math": "marft_jax.envs.math",
    "code": "marft_jax.envs.code",
    "reasoning_gym": "marft_jax.envs.reasoning_gym",
}
"""Name to the module whose ``source(config, split)`` makes it."""

EVAL_SEEDS = 1 << 30
"""Added to the seeds that a user's environment gets in evaluation: other tasks than training's."""


class Env(Protocol):
    """One episode of a task. The trainer makes an object per episode and calls it in turn.

    Three more methods are optional: ``view(agent, observation) -> str``, what the agent of that
    name sees of the state; ``tool(turn) -> str | None``, the answer to a tool that the turn calls,
    after which the same agent goes on; None where it calls none; and ``demonstrate(agents)``, turns
    that solve the task of ``reset``, as ``{"agent": name, "text": text}`` in the order in which the
    team's workflow takes them. It is given the team's members, in acting order. All are called
    from threads, ``view`` of all episodes one after another.
    """

    def reset(self, seed: int) -> str:
        """The task text, which every agent sees. The same seed must give the same task."""
        ...

    def step(self, turns: Sequence[Turn]) -> StepResult:
        """Answers the turns that the team took in this step. Called from a thread; may block."""
        ...


class Member(Protocol):
    """An agent of the team, as ``demonstrate`` is given it; ``answers``: its turns are graded."""

    @property
    def name(self) -> str: ...

    @property
    def answers(self) -> bool: ...


class Task(NamedTuple):
    """A question with a checkable answer.

    Attributes:
        question: what every agent sees.
        answer: what the grader compares with: a text, or something whose ``str`` a transcript
            can hold.
    """

    question: str
    answer: Any


class Grade(NamedTuple):
    """What a grader says of one text.

    Attributes:
        score: the reward, any float; 0 for a wrong answer, 1 for a right one.
        verdict: ``right``, ``wrong``, ``no answer``, ``timeout`` or ``crashed``.
        answer: the answer that was read from the text, for transcripts.
        feedback: what the judge tells the team of it before the next step; of a wrong answer it
            is told that it is incorrect, if nothing else is said.
    """

    score: float
    verdict: str
    answer: str = ""
    feedback: str = ""


class EnvSource(NamedTuple):
    """Where episodes come from.

    Attributes:
        create: makes an ``Env``, one per episode.
        size: how many distinct tasks there are; None for no limit.
        close: ends what the environments share (grading processes).
        easier: makers of easier tasks, the easiest first, for a curriculum.
    """

    create: Callable[[], Env]
    size: int | None = None
    close: Callable[[], None] = lambda: None
    easier: Sequence[Callable[[], Env]] = ()


class QuestionEnv:
    """The team gets a question, its answering agents are graded, a wrong answer may be repaired.

    The score of a step is the mean over the turns of answering agents. The reward is that of the
    first step, then by how much a step surpasses all before it: the return is the best score, and
    no score can be earned twice. The episode ends with a right answer or after ``horizon`` steps;
    in between the agents see what was said and what the judge said of it.

    Args:
        pick: seed to task.
        grade: (text of a graded turn, the task's answer) to grade.
        horizon: steps per episode.
    """

    def __init__(
        self, pick: Callable[[int], Task], grade: Callable[[str, Any], Grade], horizon: int = 1
    ) -> None:
        self._pick = pick
        self._grade = grade
        self._horizon = horizon

    def reset(self, seed: int) -> str:
        self._task = self._pick(seed)
        self._state = self._task.question
        self._steps = 0
        self._best: float | None = None
        return self._state

    def step(self, turns: Sequence[Turn]) -> StepResult:
        graded = [turn for turn in turns if turn.answers]
        grades = [self._grade(turn.text, self._task.answer) for turn in graded]
        score = float(sum(grade.score for grade in grades) / max(len(grades), 1))
        reward = score if self._best is None else max(score - self._best, 0.0)
        self._best = score if self._best is None else max(score, self._best)
        self._steps += 1
        solved = any(grade.verdict == "right" for grade in grades)
        done = solved or self._steps >= self._horizon
        told = [grade.feedback for grade in grades if grade.feedback]
        judge = None if solved else " ".join([INCORRECT, *told])
        self._state = next_state(self._state, turns, judge)
        info: dict[str, Any] = {
            "reference": str(self._task.answer),
            "verdicts": [
                {"agent": turn.name, "verdict": grade.verdict, "answer": grade.answer}
                for turn, grade in zip(graded, grades, strict=True)
            ],
        }
        failed = [grade.verdict for grade in grades if grade.verdict in ("timeout", "crashed")]
        if failed:
            info["grader"] = failed[0]
        return StepResult(
            self._state, reward, done, info, feedback=f"judge: {judge}" if judge else ""
        )


def question_source(
    pick: Callable[[int], Task],
    grade: Callable[[str, Any], Grade],
    horizon: int,
    size: int | None = None,
    close: Callable[[], None] = lambda: None,
) -> EnvSource:
    """Questions with answers: arguments as of ``QuestionEnv`` and ``EnvSource``."""
    return EnvSource(lambda: QuestionEnv(pick, grade, horizon), size, close)


INCORRECT = "The answer is incorrect."


def next_state(state: str, turns: Sequence[Turn], judge: str | None = INCORRECT) -> str:
    """The state text of the next step: the old one, what every agent said, the judge's word.

    >>> from types import SimpleNamespace
    >>> next_state("1+1=?", [SimpleNamespace(name="solver", text="3")])
    '1+1=?\\nsolver: 3\\njudge: The answer is incorrect.'
    """
    said = "".join(f"\n{turn.name}: {turn.text}" for turn in turns)
    return state + said + (f"\njudge: {judge}" if judge else "")


def held_out(text: str, fraction: float) -> bool:
    """Whether a task belongs to the held-out tasks: a stable hash of its text, below ``fraction``.

    The same text falls on the same side on every machine, in every file and in every order.
    """
    digest = hashlib.sha256(text.strip().encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def make(config: Config, split: Split) -> EnvSource:
    """The environment that ``config.env.name`` names.

    Args:
        config: its ``env`` section is read.
        split: ``train`` for the tasks to learn from, ``eval`` for the held-out ones.

    The integer given to ``reset`` is the position in the endless seeded order of training tasks,
    or the number of the held-out task. A user's class is called with ``env.options`` as keyword
    arguments, and with ``split=`` if it has such a parameter; if it has none, evaluation adds
    ``EVAL_SEEDS`` to the seeds, so that it is asked other tasks than in training.

    Raises:
        BadInput: the name is unknown, cannot be imported, or is not an environment; or the
            environment's own settings or data are wrong.
    """
    name = config.env.name
    if name in BUILT_IN:
        return importlib.import_module(BUILT_IN[name]).source(config, split)
    return from_class(load_class(name, config.env.options), split)


def load_class(name: str, options: Sequence[str] = ()) -> Callable[..., Env]:
    """Imports ``package.module:Class``, see ``plugins.imported``, and binds its options.

    Raises:
        BadInput: the name has another form, the import fails, the object is no environment, or it
            does not take these options.
    """
    factory = imported(name, "--env.name", BUILT_IN, "Class")
    bound = own_options(name, factory, options)
    _check_factory(name, factory, bound)
    return functools.partial(factory, **bound) if bound else factory


def own_options(name: str, factory: Any, options: Sequence[str]) -> dict[str, Any]:
    """The keyword arguments that ``name=value`` of a user's class mean.

    An option has the type of its default: a text is taken as written, all else is read as JSON.

    Raises:
        BadInput: expected, got, for an option that the class lacks or of another type.
    """
    parameters = {
        key: parameter
        for key, parameter in _parameters(factory).items()
        if key not in ("split", "level")  # which the run gives
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(p.kind is p.VAR_KEYWORD for p in _parameters(factory).values())
    found: dict[str, Any] = {}
    for option in options:
        key, value = read_option(option)
        if key not in parameters and (not takes_any or key in ("split", "level")):
            raise bad_input(
                f"--env.options: {name} takes {', '.join(parameters) or 'no options'}, "
                f"got {option!r:.60}"
            )
        like = parameters[key].default if key in parameters else None
        if isinstance(like, str):
            value = option.partition("=")[2]
        elif isinstance(like, float) and type(value) is int:
            value = float(value)
        elif isinstance(like, (bool, int, float)) and type(value) is not type(like):
            raise bad_input(
                f"--env.options: {name} takes {key}={json.dumps(like)} or another "
                f"{type(like).__name__}, got {option!r:.60}"
            )
        found[key] = value
    return found


def read_option(text: str) -> tuple[str, Any]:
    """Name and value of ``name=value``; the value is read as JSON where it is some.

    Raises:
        BadInput: it has another form.

    >>> read_option("size=3"), read_option("words=a=b")
    (('size', 3), ('words', 'a=b'))
    """
    name, found, value = text.partition("=")
    if not found:
        raise bad_input(f"--env.options: expected name=value, got {text!r:.60}")
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value


def from_class(factory: Callable[..., Env], split: Split) -> EnvSource:
    """The source that a user's class makes, see ``make``."""
    if "split" in _parameters(factory):
        return EnvSource(lambda: factory(split=split))
    if split == "eval":
        return EnvSource(lambda: _OtherSeeds(factory()))
    if "level" not in _parameters(factory):
        return EnvSource(factory)
    levels = getattr(getattr(factory, "func", factory), "levels", 1)
    makers = [functools.partial(factory, level=i) for i in range(levels)]
    return EnvSource(factory, easier=makers[:-1])


def bad_input(message: str) -> Exception:
    """The error for what the user can fix (imported late: the settings know the adapters)."""
    from marft_jax.config import BadInput

    return BadInput(message)


def _check_factory(name: str, factory: Any, given: Container[str] = ()) -> None:
    if not callable(factory):
        raise bad_input(f"--env.name {name}: expected a class, got {type(factory).__name__}")
    missing = [method for method in ("reset", "step") if not hasattr(factory, method)]
    if inspect.isclass(factory) and missing:
        raise bad_input(
            f"--env.name {name}: expected a class with reset(seed) and step(turns), "
            f"but it has no {' and no '.join(missing)}"
        )
    required = [
        parameter.name
        for parameter in _parameters(factory).values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name != "split"
        and parameter.name not in given
    ]
    if required:
        raise bad_input(
            f"--env.name {name}: expected a class that is made without arguments (or with "
            f"`split`), but it requires {', '.join(required)}; give them defaults, or values in "
            "--env.options"
        )


def _parameters(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return {}


class _OtherSeeds:
    """A user's environment in evaluation: its seeds never meet those of training."""

    def __init__(self, env: Env) -> None:
        self._env = env

    def reset(self, seed: int) -> str:
        return self._env.reset(seed + EVAL_SEEDS)

    def step(self, turns: Sequence[Turn]) -> StepResult:
        return self._env.step(turns)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)
