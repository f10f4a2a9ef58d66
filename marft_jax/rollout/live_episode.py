"""An episode while it is played, written as generators: they yield what they wait for.

Everything here runs in the thread that plays; environment and workflow run in threads of their own,
see ``user_side``. ``Rollout`` says when an answer that has come is taken up.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Generator, Sequence
from typing import Any

from marft_jax.envs.threads import Calls, UserCall
from marft_jax.plugins import Failure, shown
from marft_jax.random_keys import ActionKey
from marft_jax.rollout.trunk import Trunk
from marft_jax.rollout.user_side import End, Rules, UserSide
from marft_jax.sampling.protocol import Completion, Request
from marft_jax.sampling.stops import text_of
from marft_jax.team.protocol import Step
from marft_jax.team.workflows import SIDE_BY_SIDE
from marft_jax.types import Act, Episode, Sample, StepResult, Turn

Part = Generator[Request | UserCall | None, Any, None]
"""A part of an episode: yields what it waits for, None for its branches."""


class LiveEpisode:
    """An episode while it is played.

    A branch is played from its beginning like any other, with the turns of its trunk in place of
    the engine's as far as they are those of the trunk: environment and workflow answer as they did
    then, or the branch has failed.

    Args:
        key: of its first act.

    Attributes:
        over: it has ended; with ``failure`` where it could not be played.
        truncated: what cut it short, ``context`` or ``turns``, if anything.
    """

    def __init__(self, rules: Rules, calls: Calls, sample: Sample, key: ActionKey):
        rules = rules if sample.alone is None else rules.alone(sample.alone)
        self._rules, self._team, self._call = rules, rules.team, calls.start
        self.sample, self._key = sample, key
        self._trunk = Trunk(sample.branch) if sample.branch else None
        self._user = UserSide(rules, sample.index)
        self._observation = ""
        self._turns: list[Turn] = []
        self._results: list[StepResult] = []
        self._first = 0  # the number of the first turn of this step
        self._acts = self._asked = 0  # acts of the workflow; with those that follow a tool's answer
        self._waiting: dict[UserCall, Part] = {}
        self._requests: list[tuple[Part, Request]] = []
        self._branches = 0  # that are not over
        self.over, self.truncated = False, ""
        self.failure: Failure | None = None
        self._main = self._play()
        self._go_on(self._main)

    @property
    def calls(self) -> list[UserCall]:
        """Calls of users' code that it waits for."""
        return list(self._waiting)

    @property
    def was_never_graded(self) -> bool:
        """True where it was cut short before its workflow yielded a step."""
        return self.truncated != "" and len(self._results) == 1

    @property
    def episode(self) -> Episode:
        """Episode, once it is over."""
        own, branch = self.sample, self.sample.branch
        alone = None if own.alone is None else (-1, own.alone)
        return Episode(
            own.index,
            own.group,
            own.member,
            self._observation,
            tuple(self._turns),
            tuple(self._results),
            (branch.turn, branch.number) if branch else alone,
        )

    def take_requests(self) -> list[tuple[Part, Request]]:
        """Hands out the requests for the engine, each with the part that waits for it."""
        requests, self._requests = self._requests, []
        return requests

    def receive(self, part: Part, completion: Completion) -> None:
        """Goes on with the tokens of a request."""
        if not self.over:  # it may have failed while the engine was at work
            self._go_on(part, completion)

    def take_answers(self, settled: Collection[UserCall]) -> None:
        """Goes on with the answers of those calls that it waits for."""
        for call in self.calls:
            if call in settled and call in self._waiting:  # a failure ends them all
                part = self._waiting.pop(call)
                if call.failure is not None:
                    self._end(call.failure)
                else:
                    self._go_on(part, call.value)

    def drop(self) -> None:
        """Ends it if it is not over; nobody will ask for it."""
        if not self.over:
            self._end()

    def _go_on(self, part: Part, answer: Any = None) -> None:
        """Runs a part up to what it waits for next; after its last branch, the main one goes on."""
        try:
            wanted = part.send(answer)
        except StopIteration:
            if part is not self._main:
                self._branches -= 1
                if not self._branches:
                    self._go_on(self._main)
            return
        if isinstance(wanted, Request):
            self._requests.append((part, wanted))
        elif wanted is not None:
            self._waiting[wanted] = part

    def _play(self) -> Part:
        """Plays it from its reset to its end."""
        self._observation = yield self._call("reset", self._user.reset)
        beside = self._rules.workflow in SIDE_BY_SIDE
        workflow = functools.partial(self._call, "the workflow", in_turn=True, side_by_side=beside)
        wanted = yield workflow(self._user.begin, self._observation)
        while not isinstance(wanted, End):
            if isinstance(wanted, Step):
                answer = yield from self._step(wanted)
                branch = self.sample.branch
                if branch and branch.stops and len(self._turns) > branch.turn:
                    wanted = End()
                    break
            elif self._asked + len(wanted) <= self._rules.max_turns:
                answer = yield from self._act(wanted)
            else:
                wanted = End("turns")
                break
            wanted = yield workflow(self._user.go_on, answer, tuple(self._turns), self._first)
        if wanted.truncated:  # it keeps what it has earned
            self.truncated = wanted.truncated
            self._results.append(StepResult("", 0.0, True, {"truncated": wanted.truncated}))
        self._end()

    def _step(self, step: Step) -> Generator[UserCall | None, Any, StepResult]:
        """Gets the environment's answer. What is graded is what the episode records."""
        own, seen = self._turns[self._first :], {turn.index: turn for turn in step.turns}
        self._turns[self._first :] = [
            seen.get(turn.index, turn._replace(answers=False)) for turn in own
        ]
        is_repeated = all(turn.replayed for turn in own)
        before = self._trunk.results[len(self._results)] if self._trunk and is_repeated else None
        if before is not None and before.snapshot is not None:
            yield self._call("restore", self._user.restore, before.snapshot)
            result = before
        else:
            acted = [turn.name for turn in own]
            result = yield self._call("step", self._user.step, tuple(step.turns), acted)
            result = result._replace(info={**result.info, **step.info})
            if before is not None:
                yield from self._expect("answer to a step", before, result)
        self._results.append(result)
        self._first = len(self._turns)
        return result

    def _act(self, acts: Sequence[Act]) -> Generator[None, None, list[Turn]]:
        """Lets agents act side by side; returns the last turn of each."""
        branches: list[list[Turn]] = [[] for _ in acts]
        self._branches = len(acts) + 1  # not over before all have begun
        numbers = range(self._acts, self._acts + len(acts))
        self._acts = numbers.stop
        for number, act, turns in zip(numbers, acts, branches, strict=True):
            self._go_on(self._branch(number, act, turns, numbers))
        self._branches -= 1
        if self._branches:
            yield
        answers: list[Turn] = []
        for turns in branches:
            first = len(self._turns)
            for call, turn in enumerate(turns):
                own = range(first, first + call)  # its turns before it called a tool
                self._turns.append(turn._replace(index=first + call, sees=(*turn.sees, *own)))
            answers.append(self._turns[-1])
        return answers

    def _branch(self, number: int, act: Act, turns: list[Turn], beside: range) -> Part:
        """Lets one agent act, and again after each call of a tool; appends its turns.

        Args:
            beside: numbers of the acts that were asked for together with this one.
        """
        while not self.over:
            self._asked += 1
            named = number if act.number is None else act.number
            key = self._key._replace(act=named, call=len(turns))
            before = self._trunk and self._trunk.turn(number, len(turns), beside)
            if before:
                yield from self._expect("prompt", before.prompt.tolist(), act.prompt.tolist())
                done = not before.truncated
                ended = Completion(before.action, before.logprobs, done, before.kept)
                turn = self._turn(act, ended)._replace(replayed=True)
            else:
                owner = self._team.owners[act.agent]
                request = Request(act.prompt, owner, act.sampling, key, act.choices)
                turn = self._turn(act, (yield request))
            turns.append(turn)
            if self._asked >= self._rules.max_turns or not self._user.may_call(turn, len(turns)):
                return
            messages = yield self._call("tool", self._user.answer_tools, turn)
            if not messages:
                return
            tools = [tool.definition for tool in self._team.tools_of(act.agent)]
            if (resumed := self._team.resume(turn, messages, tools)) is None:
                return
            answer = "\n".join(message["content"] for message in messages)
            if before:
                yield from self._expect("tool's answer", before.tool, answer)
            turns[-1], act = turn._replace(answers=False, tool=answer), resumed

    def _expect(self, what: str, before: object, now: object) -> Generator[None, Any, None]:
        """Ends a branch, and waits for ever, where it is not what its trunk was."""
        if repr(before) != repr(now):  # equal also where an info holds NaN
            seen = f"the {what} was {shown(before)}, is {shown(now)}"
            why = f"task {self.sample.index}, played again with the same actions: {seen}; "
            self._end(Failure(f"{why}an environment must answer alike", is_bad_input=True))
            yield

    def _end(self, failure: Failure | None = None) -> None:
        self.over, self.failure = True, failure
        self._waiting.clear()
        self._requests.clear()
        self._call("close", self._user.close)
        del self._user

    def _turn(self, act: Act, completion: Completion) -> Turn:
        profile = self._team.profiles[act.agent]
        decode = self._team.tokenizers[act.agent].decode
        for array in (act.prompt, completion.ids, completion.logprobs):
            array.setflags(write=False)  # whoever is shown a turn cannot change it
        return Turn(
            agent=act.agent,
            name=profile.name,
            step=len(self._results),
            prompt=act.prompt,
            action=completion.ids,
            logprobs=completion.logprobs,
            text=text_of(completion.ids.tolist(), act.sampling.stop, decode),
            answers=profile.answers,
            sees=act.sees,
            truncated=not completion.finished,
            temperature=act.sampling.temperature or 1.0,
            start=act.start,
            limit=act.sampling.max_new_tokens,
            kept=completion.kept,
            player=self._user.players.get(profile.name, ""),
        )
