"""One episode in the making: what it has, what it waits for, and how it ends.

The user's side, the environment and the workflow, runs in threads and is checked there. An answer
is taken up by ``LiveEpisode``, in the thread that plays, when ``Rollout`` says so.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

from marft_jax.config import BadInput
from marft_jax.engine.engine import Completion, Request
from marft_jax.envs.base import Env
from marft_jax.envs.threads import Call, InTurn, interrupt_hanging
from marft_jax.errors import place
from marft_jax.team.prompts import ContextFull, Team
from marft_jax.team.wishes import Step, acts_of, turns_of
from marft_jax.team.workflows import Workflow
from marft_jax.types import Act, Episode, StepResult, Turn
from marft_jax.user_code import Failure, info_of, result_of, shown, text_of

_AT_ONCE = 0.1  # seconds that the call of a play that is over may take, and be left alone
_UNDEAD: list[Any] = []  # generators that yield on whatever is thrown into them
CALL_SHIFT = 16  # sampling keys: the act's number below, how many tools it has called above


class Limits(NamedTuple):
    """How far an episode may go.

    Attributes:
        turns: the most turns it may have.
        tool_calls: how often an agent may call a tool of the environment in one turn.
        seconds: how long the environment, or the workflow, may take to answer; None for ever.
    """

    turns: int
    tool_calls: int
    seconds: float | None


class Stage:
    """What the episodes of a play share: the team, and the threads that they are played in."""

    def __init__(
        self,
        team: Team,
        workflow: Callable[[Team, str], Workflow],
        create_env: Callable[[], Env],
        threads: Executor,
        limits: Limits,
    ):
        self.team, self.workflow, self.create_env = team, workflow, create_env
        self.limits, self._threads = limits, threads
        self.news = threading.Event()
        self.in_turn = InTurn(threads, self.news.set)
        self.calls: list[Call] = []
        interrupt_hanging()

    def ask(self, call: Call) -> Call:
        """Starts a call of an environment in a thread of its own."""
        call.started = time.monotonic()
        self.calls.append(call)
        self._threads.submit(self._run, call)
        return call

    def ask_in_turn(self, call: Call) -> Call:
        """Starts a call of a workflow, after those that were asked before."""
        self.calls.append(call)
        self.in_turn.add(call)
        return call

    def leave(self, seconds: float) -> None:
        """Gives up what still runs after so many seconds, if it does not end at once."""
        end = time.monotonic() + seconds
        while not all(call.is_over for call in self.calls) and time.monotonic() < end:
            self.news.clear()
            self.news.wait(0.05)
        for call in self.calls:
            if call.has_taken(_AT_ONCE):
                call.give_up("the play is over")

    def _run(self, call: Call) -> None:
        call.run()
        self.news.set()


class _Over(NamedTuple):
    """A workflow's last word: it returned, or what cut it short."""

    truncated: str = ""


class _Graded(NamedTuple):
    """A workflow's step, checked."""

    turns: list[Turn]
    info: dict[str, Any]


class _Theirs:
    """The user's side of an episode. Its methods run in threads and return plain values."""

    def __init__(self, stage: Stage, task: int):
        self._stage, self._task = stage, task
        self._env: Any = None
        self._generator: Any = None
        self.has_tool = self.is_closed = False

    def reset(self) -> str:
        self._env = self._stage.create_env()
        observation = text_of("reset: the task", self._env.reset(self._task))
        self.has_tool = getattr(self._env, "tool", None) is not None
        return observation

    def begin(self, observation: str) -> _Over | _Graded | list[Act]:
        team = self._stage.team
        if (view := getattr(self._env, "view", None)) is not None:
            if team.shared:
                raise BadInput(
                    "--team.context shared: this environment shows each agent a part of the "
                    "state, and a conversation shows all of them everything; use own"
                )
            team = team._replace(view=lambda *args: text_of("view", view(*args)))
        self._generator = self._stage.workflow(team, observation)
        if not isinstance(self._generator, Generator):
            raise BadInput(
                "--team.workflow: expected a generator function, one with `yield`, but it "
                f"returned {shown(self._generator)}{place(self._stage.workflow)}"
            )
        return self.go_on(None, (), 0, 0)

    def go_on(
        self, answer: Any, turns: Sequence[Turn], first: int, steps: int
    ) -> _Over | _Graded | list[Act]:
        """Gives the workflow its answer and checks what it wants next."""
        wish = self._next(answer, turns, first, steps)
        if isinstance(wish, _Over):
            self.close()
        return wish

    def _next(
        self, answer: Any, turns: Sequence[Turn], first: int, steps: int
    ) -> _Over | _Graded | list[Act]:
        try:
            wish = self._generator.send(answer)
        except StopIteration:
            if len(turns) > first or not steps:
                what = (
                    "without a Step, the wish to be graded" if turns else "before any agent acted"
                )
                raise BadInput(
                    f"--team.workflow: it returned {what}{place(self._stage.workflow)}"
                ) from None
            return _Over()
        except ContextFull:
            if not turns:
                raise
            return _Over("context")
        if isinstance(answer, StepResult) and answer.done:
            return _Over()  # whatever it wants: the environment says that this is the end
        try:
            if isinstance(wish, Step):
                return _Graded(turns_of(wish, turns, first), info_of("Step(info)", wish.info))
            if not isinstance(wish, list):
                raise BadInput(f"expected a yielded list of acts, or Step, got {shown(wish)}")
            if len(wish) > self._stage.limits.turns:
                raise BadInput(f"{len(wish)} acts at once are more than --rollout.max_turns")
            return acts_of(wish, self._stage.team, len(turns))
        except BadInput as error:
            raise BadInput(f"--team.workflow: {error}{_place_in(self._generator)}") from None

    def step(self, turns: Sequence[Turn], acted: Sequence[str]) -> StepResult:
        answer = self._env.step(turns)
        try:
            return result_of(answer, acted)
        except BadInput as error:
            raise BadInput(f"the environment's step: {error}{place(self._env.step)}") from None

    def tool(self, turn: Turn) -> str | None:
        said = self._env.tool(turn)
        return None if said is None else text_of("the environment's tool", said)

    def close(self) -> None:
        """Drops them; what they do when they are dropped is theirs, too."""
        generator, self._generator, self._env = self._generator, None, None
        self.is_closed = True
        if generator is None:
            return
        for ending in (GeneratorExit, SystemExit):
            try:
                generator.throw(ending)
            except BaseException:
                return  # it has ended
        _UNDEAD.append(generator)  # Python would complain of it when it is collected


def _place_in(generator: Any) -> str:
    """Where it yielded."""
    while (inner := getattr(generator, "gi_yieldfrom", None)) is not None:
        generator = inner
    return place(getattr(generator, "gi_frame", None))


class _Branch:
    """An act that was asked for, and its turns: several where the agent calls tools in between."""

    def __init__(self, number: int, act: Act):
        self.number, self.act = number, act
        self.turns: list[Turn] = []
        self.is_asked = self.is_over = False


class LiveEpisode:
    """One episode in the making.

    Attributes:
        calls: those of the user's code that it waits for.
        over: it has ended; with ``failure`` where it could not be played.
        truncated: what cut it short, ``context`` or ``turns``, if anything.
    """

    def __init__(self, stage: Stage, number: int, task: int):
        self._stage, self._team = stage, stage.team
        self._number, self.task = number, task
        self._theirs = _Theirs(stage, task)
        self._observation = ""
        self._turns: list[Turn] = []
        self._results: list[StepResult] = []
        self._first = 0  # the number of the first turn of this step
        self._step_info: dict[str, Any] = {}
        self._branches: list[_Branch] = []
        self._acts = self._asked = 0
        self._then: dict[Call, Callable[[Any], None]] = {}
        self.over, self.truncated = False, ""
        self.failure: Failure | None = None
        self._ask("reset", self._theirs.reset, self._begin)

    @property
    def calls(self) -> list[Call]:
        return list(self._then)

    @property
    def was_never_graded(self) -> bool:
        """Whether it was cut short before its workflow wished for anything but acts."""
        return self.truncated != "" and len(self._results) == 1

    def take_answers(self, settled: Collection[Call]) -> None:
        """Goes on with those of the calls that it waits for."""
        for call in self.calls:
            if call in settled and call in self._then:  # a failure ends them all
                then = self._then.pop(call)
                if call.failure is not None:
                    self._end(call.failure)
                else:
                    then(call.value)

    def _ask(self, what: str, run: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self._then[self._stage.ask(Call(what, run, self._stage.limits.seconds))] = then

    def _ask_workflow(self, run: Callable[[], Any]) -> None:
        call = Call("the workflow", run, self._stage.limits.seconds)
        self._then[self._stage.ask_in_turn(call)] = self._wish

    def _begin(self, observation: str) -> None:
        self._observation = observation
        self._ask_workflow(functools.partial(self._theirs.begin, observation))

    def _go_on(self, answer: list[Turn] | StepResult) -> None:
        """Gives the workflow its answer."""
        known = tuple(self._turns), self._first, len(self._results)
        self._ask_workflow(functools.partial(self._theirs.go_on, answer, *known))

    def _wish(self, wish: _Over | _Graded | list[Act]) -> None:
        """Does what the workflow wants next."""
        if isinstance(wish, _Over):
            self._cut(wish.truncated) if wish.truncated else self._end()
        elif isinstance(wish, _Graded):
            seen = {turn.index: turn for turn in wish.turns}
            own = self._turns[self._first :]
            self._turns[self._first :] = [
                seen.get(turn.index, turn._replace(answers=False)) for turn in own
            ]  # what is graded is what the episode records
            acted = tuple(turn.name for turn in own)
            self._step_info = wish.info
            run = functools.partial(self._theirs.step, tuple(wish.turns), acted)
            self._ask("step", run, self._graded)
        elif self._asked + len(wish) > self._stage.limits.turns:
            self._cut("turns")
        else:
            self._branches = [_Branch(self._acts + i, act) for i, act in enumerate(wish)]
            self._acts += len(wish)

    def _cut(self, why: str) -> None:
        """Ends it with what it has earned so far."""
        self.truncated = why
        self._results.append(StepResult("", 0.0, True, {"truncated": why}))
        self._end()

    def leave(self) -> None:
        """Ends it if it is not over; nobody will ask for it."""
        if not self.over:
            _UNDEAD.append(self._theirs)  # the play may be over before its generator is closed
            self._end()

    def _end(self, failure: Failure | None = None) -> None:
        self.over, self.failure = True, failure
        self._branches = []
        self._then.clear()
        if not self._theirs.is_closed:
            self._stage.ask(Call("close", self._theirs.close))
        del self._theirs

    def take_acts(self) -> list[tuple[_Branch, Act]]:
        """The acts that were not handed out yet."""
        fresh = [b for b in self._branches if not (b.is_asked or b.is_over)]
        for branch in fresh:
            branch.is_asked = True
        self._asked += len(fresh)
        return [(branch, branch.act) for branch in fresh]

    def request(self, branch: _Branch, act: Act, step: int) -> Request:
        """The act for the engine. Its key depends on the workflow alone: on the number of the act
        in the episode, and on how often its agent has called a tool."""
        fold = (step, self._number, branch.number | len(branch.turns) << CALL_SHIFT)
        return Request(act.prompt, self._team.owners[act.agent], act.sampling, fold)

    def receive(self, branch: _Branch, completion: Completion) -> None:
        """Takes one act's tokens; when all siblings have theirs, the workflow goes on."""
        if self.over:  # it failed while the engine was at work
            return
        turn = self._turn(branch.act, completion)
        branch.turns.append(turn)
        limits = self._stage.limits
        calls = len(branch.turns) <= limits.tool_calls and self._asked < limits.turns
        if self._theirs.has_tool and calls:
            run = functools.partial(self._theirs.tool, turn)
            self._ask("tool", run, functools.partial(self._tool, branch))
        else:
            branch.is_over = True
            self._join()

    def _tool(self, branch: _Branch, said: str | None) -> None:
        """Lets the agent go on, where it has called a tool and there is room for its answer."""
        turn = branch.turns[-1]
        act = None if said is None else self._team.resume(turn, said)
        if act is None:
            branch.is_over = True
            return self._join()
        branch.turns[-1] = turn._replace(answers=False, tool=said)
        branch.act, branch.is_asked = act, False

    def _join(self) -> None:
        """Answers the workflow when every sibling has spoken its last word."""
        if not all(branch.is_over for branch in self._branches):
            return
        answers = []
        for branch in self._branches:
            first = len(self._turns)
            for call, turn in enumerate(branch.turns):
                own = tuple(range(first, first + call))  # what it said before it called a tool
                self._turns.append(turn._replace(index=first + call, sees=(*turn.sees, *own)))
            answers.append(self._turns[-1])
        self._branches = []
        self._go_on(answers)

    def _turn(self, act: Act, completion: Completion) -> Turn:
        profile = self._team.profiles[act.agent]
        for array in (act.prompt, completion.ids, completion.logprobs):
            array.setflags(write=False)  # those who are shown a turn cannot change it
        return Turn(
            agent=act.agent,
            name=profile.name,
            step=len(self._results),
            prompt=act.prompt,
            action=completion.ids,
            logprobs=completion.logprobs,
            text=self._team.tokenizer.decode(completion.ids.tolist()).strip(),
            answers=profile.answers,
            sees=act.sees,
            truncated=not completion.finished,
            temperature=act.sampling.temperature or 1.0,
            start=act.start,
            limit=act.sampling.max_new_tokens,
        )

    def _graded(self, result: StepResult) -> None:
        result = result._replace(info={**result.info, **self._step_info})
        self._results.append(result)
        self._first = len(self._turns)
        self._go_on(result)

    def episode(self) -> Episode:
        """The finished episode; a failed one has no turns and says why."""
        if self.failure is not None:
            failed = StepResult("", 0.0, True, {"failed": f"task {self.task}: {self.failure.text}"})
            return Episode(self.task, self._observation, (), (failed,))
        return Episode(self.task, self._observation, tuple(self._turns), tuple(self._results))
