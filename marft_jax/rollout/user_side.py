"""The user's side of an episode: environment and workflow, called in threads and checked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

from marft_jax.config import BadInput
from marft_jax.envs.base import Env
from marft_jax.envs.threads import Call, InTurn, interrupt_hanging
from marft_jax.errors import place
from marft_jax.team.prompts import ContextFull, Team
from marft_jax.team.protocol import Step, check_acts, check_step
from marft_jax.team.workflows import Workflow
from marft_jax.types import Act, StepResult, Turn
from marft_jax.user_code import result_of, shown, text_of

_MOMENT = 0.1  # seconds that a call may still take when its play is over
_ENDLESS: list[Any] = []  # generators that Python would complain of when it collects them


class Rules(NamedTuple):
    """What all episodes of a play have in common.

    Attributes:
        team, workflow, create_env: as of ``Rollout``.
        max_turns: the most turns of an episode.
        max_tool_calls: how often an agent may call a tool of the environment in one turn.
        seconds: how long environment and workflow may take to answer; None for ever.
    """

    team: Team
    workflow: Callable[[Team, str], Workflow]
    create_env: Callable[[], Env]
    max_turns: int
    max_tool_calls: int
    seconds: float | None


class Calls:
    """Runs the calls of users' code in a play: environments side by side, workflows in turn."""

    def __init__(self, threads: Executor):
        self._threads, self._all = threads, list[Call]()
        self.ended = threading.Event()
        """Set when a call ends."""
        self.in_turn = InTurn(threads, self.ended.set)
        interrupt_hanging()

    def start(self, call: Call) -> Call:
        """Starts a call in a thread of its own."""
        call.started = time.monotonic()
        self._all.append(call)
        self._threads.submit(self._run, call)
        return call

    def start_in_turn(self, call: Call) -> Call:
        """Starts a call after those that were started in turn before."""
        self._all.append(call)
        self.in_turn.add(call)
        return call

    def give_up(self, seconds: float) -> None:
        """Gives up what still runs after so many seconds, if it does not end at once."""
        end = time.monotonic() + seconds
        while not all(call.is_over for call in self._all) and time.monotonic() < end:
            self.ended.clear()
            self.ended.wait(0.05)
        for call in self._all:
            if call.has_taken(_MOMENT):
                call.give_up("the play is over")

    def _run(self, call: Call) -> None:
        call.run()
        self.ended.set()


class End(NamedTuple):
    """The workflow returned, or was cut short by what ``truncated`` names."""

    truncated: str = ""


class UserSide:
    """Environment and workflow of one episode. Its methods run in threads and return plain values.

    Attributes:
        has_tool: the environment, once it is reset, has a tool.
        is_closed: both were dropped.
    """

    def __init__(self, rules: Rules, task: int):
        self._rules, self._task = rules, task
        self._env: Any = None
        self._generator: Any = None
        self.has_tool = self.is_closed = False

    def reset(self) -> str:
        self._env = self._rules.create_env()
        observation = text_of("reset: the task", self._env.reset(self._task))
        self.has_tool = getattr(self._env, "tool", None) is not None
        return observation

    def begin(self, observation: str) -> list[Act] | Step | End:
        """Starts the workflow, and checks what it wants first."""
        team, workflow = self._rules.team, self._rules.workflow
        if (view := getattr(self._env, "view", None)) is not None:
            if team.shared:
                raise BadInput(
                    "--team.context shared: this environment shows each agent a part of the "
                    "state, and a conversation shows all of them everything; use own"
                )
            team = team._replace(view=lambda *args: text_of("view", view(*args)))
        self._generator = workflow(team, observation)
        if not isinstance(self._generator, Generator):
            raise BadInput(
                "--team.workflow: expected a generator function, one with `yield`, but it "
                f"returned {shown(self._generator)}{place(workflow)}"
            )
        return self.go_on(None, (), 0)

    def go_on(self, answer: Any, turns: Sequence[Turn], first: int) -> list[Act] | Step | End:
        """Gives the workflow its answer, and checks what it wants next.

        Args:
            turns: of the episode so far.
            first: the number of the first one of this step.
        """
        wanted = self._next(answer, turns, first)
        if isinstance(wanted, End):
            self.close()
        return wanted

    def _next(self, answer: Any, turns: Sequence[Turn], first: int) -> list[Act] | Step | End:
        try:
            wanted = self._generator.send(answer)
        except StopIteration:
            if first == len(turns) > 0:
                return End()
            when = "without a Step, so nothing is graded" if turns else "before any agent acted"
            raise BadInput(
                f"--team.workflow: it returned {when}{place(self._rules.workflow)}"
            ) from None
        except ContextFull:
            if not turns:
                raise
            return End("context")
        if isinstance(answer, StepResult) and answer.done:
            return End()  # whatever the workflow wants
        try:
            if isinstance(wanted, Step):
                return check_step(wanted, turns, first)
            return check_acts(wanted, self._rules.team, len(turns), self._rules.max_turns)
        except BadInput as error:
            raise BadInput(f"--team.workflow: {error}{_place_in(self._generator)}") from None

    def step(self, turns: Sequence[Turn], acted: Sequence[str]) -> StepResult:
        answer = self._env.step(turns)
        try:
            return result_of(answer, acted)
        except BadInput as error:
            raise BadInput(f"the environment's step: {error}{place(self._env.step)}") from None

    def tool(self, turn: Turn) -> str | None:
        answer = self._env.tool(turn)
        return None if answer is None else text_of("the environment's tool", answer)

    def close(self) -> None:
        """Drops environment and workflow; what they do then is users' code, too."""
        generator, self._generator, self._env = self._generator, None, None
        self.is_closed = True
        if generator is None:
            return
        for ending in (GeneratorExit, SystemExit):
            try:
                generator.throw(ending)
            except BaseException:
                return  # it has ended
        _ENDLESS.append(generator)

    def keep(self) -> None:
        """Keeps a workflow whose play may be over before it is closed."""
        _ENDLESS.append(self)


def _place_in(generator: Any) -> str:
    """Finds where it yielded."""
    while (inner := getattr(generator, "gi_yieldfrom", None)) is not None:
        generator = inner
    return place(getattr(generator, "gi_frame", None))
