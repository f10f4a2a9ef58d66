"""What environments and workflows do wrong: more than a hundred kinds, each in a line or two.

``ENVS`` and ``WORKFLOWS`` say of each what becomes of an episode with it: it is dropped, with a
line that holds the given text, or it is kept.
"""

from __future__ import annotations

import threading
import time

import numpy as np

from marft_jax.team import State, Step
from marft_jax.types import StepResult

KEPT = None


class Sound:
    """An environment without a fault."""

    def reset(self, seed):
        return f"t{seed}"

    def step(self, turns):
        return StepResult("", float(len(turns)), True, {"said": turns[-1].text})


def sound(team, observation):
    """A workflow without a fault."""
    state = State(observation)
    turns = yield [team.act(0, state)]
    turns += yield [team.act(1, state, turns)]
    yield Step(turns)


def raising(error):
    def run(*args):
        raise error() if isinstance(error, type) else error

    return run


OVER = threading.Event()
"""Ends what hangs, once its test is over."""


def sleeping(*args):
    OVER.wait(1000)


def spinning(*args):
    while not OVER.is_set():
        pass


def deadlocked(*args):
    OVER.wait()


def bottomless(*args):
    return bottomless(*args)


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no text")


class Leaving(Exception):
    def __str__(self):
        raise SystemExit(0)


class Nameless(type):
    @property
    def __name__(cls):
        raise ValueError("no name")


class Anonymous(Exception, metaclass=Nameless):
    pass


class Silent:
    __str__ = __repr__ = raising(RuntimeError("no text"))


class Exiting:
    __str__ = __repr__ = __float__ = raising(SystemExit(0))


class Endless:
    __str__ = spinning


class Itself:
    def tolist(self):
        return self


class BadMapping(dict):
    __iter__ = keys = items = raising(RuntimeError("no items"))  # type: ignore[assignment]


def circular():
    info = {}
    info["self"] = info
    return info


def deep(levels):
    inner = []
    for _ in range(levels):
        inner = [inner]
    return {"deep": inner}


def laughs():
    item = ["ha"] * 10
    for _ in range(20):
        item = [item] * 10
    return {"laughs": item}


ERRORS = {
    "ValueError": (ValueError("a bug"), "ValueError: a bug"),
    "MemoryError": (MemoryError(), "MemoryError"),
    "StopIteration": (StopIteration(3), "StopIteration"),
    "GeneratorExit": (GeneratorExit(), "GeneratorExit"),
    "SystemExit 0": (SystemExit(0), "SystemExit: 0"),
    "SystemExit text": (SystemExit("bye"), "SystemExit: bye"),
    "KeyboardInterrupt": (KeyboardInterrupt(), "KeyboardInterrupt"),
    "BaseException": (BaseException("all of it"), "BaseException: all of it"),
    "a text that fails": (Unspeakable(), "cannot say what it is"),
    "a text that exits": (Leaving(), "cannot say what it is"),
    "a name that fails": (Anonymous(), "cannot say what it is"),
    "a text with escapes": (ValueError("a\x1b]52;c;aGk=\x07\nb"), r"a\x1b]52;c;aGk=\x07 b"),
    "a text with half a pair": (ValueError("a\ud800"), r"a\ud800"),
    "a long text": (ValueError("long " * 10**6), "long long"),
    "a group": (BaseExceptionGroup("two", [ValueError(), SystemExit(0)]), "two (2 sub-exceptions)"),
}

HANGS = {"sleep": sleeping, "spin": spinning, "deadlock": deadlocked}
LATE = "TimeoutError"


def env(**methods):
    return type("Faulty", (Sound,), methods)


def returns(**fields):
    """An environment whose step returns this."""
    result = StepResult("", 1.0, True)._replace(**fields)
    return env(step=lambda self, turns: result)


def steps(value):
    return env(step=lambda self, turns: value)


def resets(value):
    return env(reset=lambda self, seed: value)


async def coroutine(self, seed):
    return "t"


def mutating(self, turns):
    turns[-1].action[:] = 0


class Unattributed(Sound):
    def __getattr__(self, name):
        raise RuntimeError(f"no {name}")


class Dropped(Sound):
    def __del__(self):
        time.sleep(0.2)


ENVS = {
    **{f"reset raises {n}": (env(reset=raising(e)), text) for n, (e, text) in ERRORS.items()},
    **{f"step raises {n}": (env(step=raising(e)), text) for n, (e, text) in ERRORS.items()},
    "reset hangs": (env(reset=sleeping), LATE),
    **{f"step hangs: {n}": (env(step=f), LATE) for n, f in HANGS.items()},
    "view hangs": (env(view=sleeping), LATE),
    "tool hangs": (env(tool=sleeping), LATE),
    "reset recurses": (env(reset=bottomless), "RecursionError"),
    "reset returns None": (resets(None), "reset: the task: expected a text, got None"),
    "reset returns half a pair": (resets("\ud83d?"), KEPT),
    "reset returns too much": (resets("x" * 5000), "--model.context"),
    "reset is a coroutine": (env(reset=coroutine), "expected a text, got <coroutine"),
    "reset takes no seed": (env(reset=lambda self: "t"), "TypeError"),
    "no reset": (env(reset=None), "not callable"),
    "attributes fail": (Unattributed, "RuntimeError: no "),
    "step recurses": (env(step=bottomless), "RecursionError"),
    "step returns None": (steps(None), "expected a marft_jax.types.StepResult, got None"),
    "step returns what fails": (steps(Silent()), "RuntimeError: no text"),
    "step returns what exits": (steps(Exiting()), "SystemExit: 0"),
    "step changes a turn": (env(step=mutating), "read-only"),
    "reward None": (returns(reward=None), "reward: expected a number, got None"),
    "reward list": (returns(reward=[1.0]), "reward: expected a number"),
    "reward too large": (returns(reward=10**400), "reward: expected a number"),
    "reward exits": (returns(reward=Exiting()), "SystemExit"),
    "reward NaN": (returns(reward=float("nan")), "reward: expected a finite number, got nan"),
    "reward beyond float32": (returns(reward=1e39), "expected a finite number, got 1e+39"),
    "done None": (returns(done=None), "done: expected True or False, got None"),
    "done an array": (returns(done=np.zeros(2)), "done: expected True or False"),
    "observation None": (returns(observation=None), "observation: expected a text"),
    "observation half a pair": (returns(observation="\udc00"), KEPT),
    "feedback a number": (returns(feedback=3), "feedback: expected a text"),
    "info None": (returns(info=None), "info: expected a mapping"),
    "info circular": (returns(info=circular()), "in itself"),
    "info deep": (returns(info=deep(31)), "more than 32 levels"),
    "info as deep as may be": (returns(info=deep(30)), KEPT),
    "info bottomless": (returns(info=deep(5000)), "info: expected what JSON can hold: more than"),
    "info exponential": (returns(info=laughs()), "too many parts"),
    "info half a pair": (returns(info={"\ud83d": "\ud83d"}), KEPT),
    "info without a text": (returns(info={"x": Silent()}), "no text"),
    "info that exits": (returns(info={"x": Exiting()}), "SystemExit"),
    "info that hangs": (returns(info={"x": Endless()}), LATE),
    "info keys without a text": (returns(info={Silent(): 1}), "no text"),
    "info a bad mapping": (returns(info=BadMapping(x=1)), "RuntimeError"),
    "info a huge number": (returns(info={"x": 10**5000}), KEPT),
    "info its own list": (returns(info={"x": Itself()}), "in itself"),
    "agent_rewards None": (returns(agent_rewards=None), "agent_rewards: expected names"),
    "agent_rewards a list": (returns(agent_rewards=[1]), "agent_rewards: expected names"),
    "agent_rewards unknown": (returns(agent_rewards={"nobody": 1.0}), "(planner, solver), got 'no"),
    "agent_rewards no number": (returns(agent_rewards={"solver": None}), "['solver']: expected a"),
    "agent_rewards fails": (returns(agent_rewards=BadMapping(x=1)), "RuntimeError"),
    "never done": (returns(observation="go on", done=False), KEPT),
    "view raises": (env(view=raising(KeyError("x"))), "KeyError"),
    "view exits": (env(view=raising(SystemExit(0))), "SystemExit"),
    "view returns None": (env(view=lambda self, name, text: None), "view: expected a text"),
    "view half a pair": (env(view=lambda self, name, text: "\ud83d"), KEPT),
    "tool raises": (env(tool=raising(KeyError("x"))), "KeyError"),
    "tool exits": (env(tool=raising(SystemExit(0))), "SystemExit"),
    "tool returns a number": (env(tool=lambda self, turn: 3), "tool: expected a text, got 3"),
    "tool says half a pair": (env(tool=lambda self, turn: "\ud83d"), KEPT),
    "tool says too much": (env(tool=lambda self, turn: "x" * 5000), KEPT),
    "tool never rests": (env(tool=lambda self, turn: "go on"), KEPT),
    "dropped slowly": (Dropped, KEPT),
}


def yields(wish):
    """A workflow that yields this once two agents have acted."""

    def play(team, observation):
        state = State(observation)
        turns = yield [team.act(0, state)]
        turns += yield [team.act(1, state, turns)]
        yield wish(turns) if callable(wish) else wish
        yield Step(turns)

    return play


def acts(**fields):
    """A workflow whose first act is like this."""

    def play(team, observation):
        turns = yield [team.act(0, State(observation))._replace(**fields)]
        turns += yield [team.act(1, State(observation), turns)]
        yield Step(turns)

    return play


def samples(**fields):
    def play(team, observation):
        act = team.act(0, State(observation))
        yield [act._replace(sampling=act.sampling._replace(**fields))]

    return play


def first(run):
    """A workflow that does this first."""

    def play(team, observation):
        run()
        yield from sound(team, observation)

    return play


def later(run):
    """A workflow that does this between two acts."""

    def play(team, observation):
        yield [team.act(0, State(observation))]
        run()

    return play


def after_the_step(run):
    def play(team, observation):
        yield from sound(team, observation)
        run()

    return play


def silent(team, observation):
    return
    yield


def ungraded(team, observation):
    yield [team.act(1, State(observation))]


def no_generator(team, observation):
    return [team.act(0, State(observation))]


async def no_plain_generator(team, observation):
    yield [team.act(0, State(observation))]


def talks_for_ever(team, observation):
    while True:
        yield [team.act(0, State(observation))]


def steps_for_ever(team, observation):
    turns = yield [team.act(1, State(observation))]
    while True:
        yield Step(turns)


def closes_slowly(team, observation):
    try:
        yield [None]
    finally:
        time.sleep(0.2)


def closes_badly(team, observation):
    try:
        yield [None]
    finally:
        raise SystemExit(0)


def wrong_call(team, observation):
    yield [team.act("solver", observation)]


def crowd(team, observation):
    yield [team.act(0, State(observation))] * 10**5


def delegates(team, observation):
    yield from [1, 2]


def steps_again(team, observation):
    turns = yield [team.act(1, State(observation))]
    yield Step(turns)
    more = yield [team.act(1, State(observation))]
    yield Step([*turns, *more])


WORKFLOWS = {
    **{f"raises {n}": (first(raising(e)), t) for n, (e, t) in ERRORS.items()},
    **{f"hangs: {n}": (first(f), LATE) for n, f in HANGS.items()},
    "hangs later": (later(sleeping), LATE),
    "raises later": (later(raising(ValueError("later"))), "ValueError: later"),
    "raises after the step": (after_the_step(raising(SystemExit(0))), "SystemExit: 0"),
    "hangs after the step": (after_the_step(sleeping), LATE),
    "recurses": (first(bottomless), "RecursionError"),
    "returns at once": (silent, "returned before any agent acted"),
    "returns without a Step": (ungraded, "returned without a Step"),
    "is no generator": (no_generator, "expected a generator function"),
    "is an async generator": (no_plain_generator, "expected a generator function"),
    "is called wrongly": (wrong_call, "Error"),
    "talks for ever": (talks_for_ever, KEPT),
    "steps for ever": (steps_for_ever, KEPT),
    "closes slowly": (closes_slowly, "got None in it"),
    "closes badly": (closes_badly, "got None in it"),
    "yields what fails": (yields(Silent()), "RuntimeError: no text"),
    "delegates to a list": (delegates, "expected a yielded list of acts, or Step, got 1"),
    "a crowd of acts": (crowd, "acts, got 100000"),
    "a step with old turns": (steps_again, KEPT),  # the environment was done before
    **{
        f"yields {name}": (yields(wish), "--team.workflow")
        for name, wish in {
            "None": None,
            "an empty list": [],
            "a list of None": [None],
            "turns": lambda turns: turns,
            "a Step of nothing": Step([]),
            "a Step of None": Step(None),  # type: ignore[arg-type]
            "a Step of numbers": Step([1]),  # type: ignore[list-item]
            "a Step, ungraded": lambda turns: Step(turns[:1]),
            "a Step, doubled": lambda turns: Step([*turns, *turns]),
            "a Step of others": lambda turns: Step([turns[1]._replace(index=9)]),
            "a Step, info circular": lambda turns: Step(turns, circular()),
            "a Step, info a list": lambda turns: Step(turns, [1]),  # type: ignore[arg-type]
            "a Step, text a number": lambda turns: Step([turns[1]._replace(text=3)]),
            "a Step, graded elsewhere": lambda turns: Step(turns[:1], graded=turns[1:]),
            "a Step, graded None": lambda turns: Step(turns, graded=[None]),
        }.items()
    },
    **{
        f"act with {name} {value!r}": (acts(**{name: value}), f"--team.workflow: act: {name}")
        for name, value in {"prompt": "text", "sampling": None, "sees": 3, "agent": "a"}.items()
    },
    "act of agent 99": (acts(agent=99), "act: expected an agent from 0 to 1"),
    "act of long choices": (acts(choices=((1,) * 10**4,)), "act: choices: expected at most"),
    "act that is long": (samples(max_new_tokens=10**9), "act: expected a prompt of less than"),
    "act with a temperature of nan": (samples(temperature=float("nan")), "sampling.temperature"),
}
