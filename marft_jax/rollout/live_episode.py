"""One episode while it is played, written as generators that yield what they wait for.

Everything here runs in the thread that plays. Environment and workflow run in threads of their own,
see ``env_session``. ``Rollout`` decides when an answer that has come is used.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Generator, Sequence
from typing import Any

from marft_jax.envs.threads import Calls, UserCall
from marft_jax.plugins import Failure, shown
from marft_jax.random_keys import ActionKey
from marft_jax.rollout.env_session import End, EnvSession, RolloutSpec
from marft_jax.rollout.trunk import Trunk
from marft_jax.sampling.protocol import Completion, Request
from marft_jax.sampling.stops import text_of
from marft_jax.team.protocol import Step
from marft_jax.team.workflows import SIDE_BY_SIDE
from marft_jax.types import Act, Episode, Sample, StepResult, Turn

EpisodeCoroutine = Generator[Request | UserCall | None, Any, None]
"""A part of an episode. It yields the request or the call of users' code that it waits for; the
main part yields None to wait until all agents that act together have acted."""


class LiveEpisode:
    """An episode while it is played.

    A branch is played from its beginning like any other episode. Where it repeats its trunk, the
    trunk's turns are used and nothing is sampled. Environment and workflow must answer as they did
    in the trunk; otherwise the branch fails.

    Args:
        key: random key of its first act.

    Attributes:
        over: the episode has ended; ``failure`` says why where it could not be played.
        truncated: what cut the episode short, ``context`` or ``turns``; empty if nothing did.
    """

    def __init__(self, spec: RolloutSpec, calls: Calls, sample: Sample, key: ActionKey):
        spec = spec if sample.alone is None else spec.alone(sample.alone)
        self._spec, self._team, self._call = spec, spec.team, calls.start
        self.sample, self._key = sample, key
        self._trunk = Trunk(sample.branch) if sample.branch else None
        self._session = EnvSession(spec, sample.index)
        self._observation = ""
        self._turns: list[Turn] = []
        self._results: list[StepResult] = []
        self._first = 0  # index of the first turn of this step
        self._acts = 0  # acts that the workflow asked for
        self._asked = 0  # these, and the acts that continue after a tool's answer
        self._waiting: dict[UserCall, EpisodeCoroutine] = {}
        self._requests: list[tuple[EpisodeCoroutine, Request]] = []
        self._acting = 0  # agents that act together and are not done
        self.over, self.truncated = False, ""
        self.failure: Failure | None = None
        self._main = self._play()
        self._advance(self._main)

    @property
    def calls(self) -> list[UserCall]:
        """Calls of users' code that the episode waits for."""
        return list(self._waiting)

    @property
    def was_never_graded(self) -> bool:
        """True where it was cut short before its workflow yielded a step."""
        return self.truncated != "" and len(self._results) == 1

    @property
    def episode(self) -> Episode:
        """The finished episode, once it is over."""
        branch, alone = self.sample.branch, self.sample.alone
        kind = (branch.turn, branch.number) if branch else None if alone is None else (-1, alone)
        played = tuple(self._turns), tuple(self._results)
        return Episode(*self.sample[:3], self._observation, *played, kind)

    def take_requests(self) -> list[tuple[EpisodeCoroutine, Request]]:
        """Returns the new requests, each with the part that waits for its completion."""
        requests, self._requests = self._requests, []
        return requests

    def receive(self, part: EpisodeCoroutine, completion: Completion) -> None:
        """Goes on with a completion."""
        if completion.reason == "cancelled" and not self.over:
            self._end(Failure("the sampler gave up a request", is_bad_input=False))
        if not self.over:  # it may have failed since the request
            self._advance(part, completion)

    def take_answers(self, settled: Collection[UserCall]) -> None:
        """Goes on with the answers of those calls that it waits for."""
        for call in self.calls:
            if call in settled and call in self._waiting:  # one failure ends all of them
                part = self._waiting.pop(call)
                if call.failure is not None:
                    self._end(call.failure)
                else:
                    self._advance(part, call.value)

    def drop(self) -> None:
        """Ends the episode if it is not over."""
        if not self.over:
            self._end()

    def _advance(self, part: EpisodeCoroutine, answer: Any = None) -> None:
        """Runs a part until it waits again; after the last of several acts, the main part."""
        try:
            awaited = part.send(answer)
        except StopIteration:
            if part is not self._main:
                self._acting -= 1
                if not self._acting:
                    self._advance(self._main)
            return
        if isinstance(awaited, Request):
            self._requests.append((part, awaited))
        elif awaited is not None:
            self._waiting[awaited] = part

    def _play(self) -> EpisodeCoroutine:
        """Plays the episode from its reset to its end."""
        self._observation = yield self._call("reset", self._session.reset)
        together = self._spec.workflow in SIDE_BY_SIDE
        workflow = functools.partial(
            self._call, "the workflow", serialised=True, side_by_side=together
        )
        wanted = yield workflow(self._session.begin, self._observation)
        while not isinstance(wanted, End):
            if isinstance(wanted, Step):
                answer = yield from self._step(wanted)
                branch = self.sample.branch
                if branch and branch.stops and len(self._turns) > branch.turn:
                    wanted = End()
                    break
            elif self._asked + len(wanted) <= self._spec.max_turns:
                answer = yield from self._act(wanted)
            else:
                wanted = End("turns")
                break
            wanted = yield workflow(self._session.go_on, answer, tuple(self._turns), self._first)
        if wanted.truncated:  # the episode keeps what it has earned
            self.truncated = wanted.truncated
            self._results.append(StepResult("", 0.0, True, {"truncated": wanted.truncated}))
        self._end()

    def _step(self, step: Step) -> Generator[UserCall | None, Any, StepResult]:
        """Gets the environment's answer. The episode records the turns as they are graded."""
        own, graded = self._turns[self._first :], {turn.index: turn for turn in step.turns}
        self._turns[self._first :] = [
            graded.get(turn.index, turn._replace(answers=False)) for turn in own
        ]
        is_repeated = all(turn.replayed for turn in own)
        before = self._trunk.results[len(self._results)] if self._trunk and is_repeated else None
        if before is not None and before.snapshot is not None:
            yield self._call("restore", self._session.restore, before.snapshot)
            result = before
        else:
            acted = [turn.name for turn in own]
            result = yield self._call("step", self._session.step, tuple(step.turns), acted)
            result = result._replace(info={**result.info, **step.info})
            if before is not None:
                yield from self._expect("answer to a step", before, result)
        self._results.append(result)
        self._first = len(self._turns)
        return result

    def _act(self, acts: Sequence[Act]) -> Generator[None, None, list[Turn]]:
        """Lets agents act together; returns the last turn of each."""
        numbers = range(self._acts, self._acts + len(acts))
        self._acts = numbers.stop
        turns_of: list[list[Turn]] = [[] for _ in acts]
        self._acting = len(acts) + 1  # the one more keeps it above 0 until all have begun
        for number, act, turns in zip(numbers, acts, turns_of, strict=True):
            self._advance(self._act_of_agent(number, act, turns, numbers))
        self._acting -= 1
        if self._acting:
            yield
        answers: list[Turn] = []
        for turns in turns_of:
            first = len(self._turns)
            for call, turn in enumerate(turns):
                own = range(first, first + call)  # the agent's turns before its last tool call
                self._turns.append(turn._replace(index=first + call, sees=(*turn.sees, *own)))
            answers.append(self._turns[-1])
        return answers

    def _act_of_agent(
        self, number: int, act: Act, turns: list[Turn], together: range
    ) -> EpisodeCoroutine:
        """Lets one agent act, and again after each call of a tool; appends its turns.

        Args:
            number: number of the act in the episode.
            together: numbers of the acts that were asked for together with this one.
        """
        while not self.over:
            self._asked += 1
            before = self._trunk and self._trunk.turn(number, len(turns), together)
            if before:
                yield from self._expect("prompt", before.prompt.tolist(), act.prompt.tolist())
                turn = self._turn(act, _completion_of(before))._replace(replayed=True)
            else:
                named = number if act.number is None else act.number
                key = self._key._replace(act=named, call=len(turns))
                owner, base = self._team.owners[act.agent], self._team.bases[act.agent]
                completion = yield Request(
                    act.prompt, owner, act.sampling, key, act.choices, base, act.form
                )
                turn = self._turn(act, completion)
            turns.append(turn)
            is_last = self._asked >= self._spec.max_turns
            if is_last or not self._session.may_call(turn, len(turns)):
                return
            place = self.sample.index, number, len(turns) - 1
            recorded = before.calls if before else self._spec.recorded_calls(*place)
            answered = yield self._call("tool", self._session.answer_tools, turn, recorded)
            if answered is None:
                return
            messages, calls = answered
            turns[-1] = turn = turn._replace(calls=calls)
            tools = self._team.tools_of(act.agent).definitions
            if (resumed := self._team.resume(turn, messages, tools)) is None:
                return
            answer = "\n".join(message["content"] for message in messages)
            if before:
                yield from self._expect("tool's answer", before.tool, answer)
            turns[-1], act = turn._replace(answers=False, tool=answer), resumed

    def _expect(self, what: str, before: object, now: object) -> Generator[None, Any, None]:
        """Fails the branch where ``now`` differs from the trunk; the part that asks never goes
        on then."""
        if repr(before) != repr(now):  # equal also where an info holds NaN
            seen = f"the {what} was {shown(before)}, is {shown(now)}"
            why = f"task {self.sample.index}, played again with the same actions: {seen}; "
            self._end(Failure(f"{why}an environment must answer alike", is_bad_input=True))
            yield

    def _end(self, failure: Failure | None = None) -> None:
        self.over, self.failure = True, failure
        self._waiting.clear()
        self._requests.clear()
        self._call("close", self._session.close)
        del self._session

    def _turn(self, act: Act, completion: Completion) -> Turn:
        profile = self._team.profiles[act.agent]
        decode = self._team.tokenizers[act.agent].decode
        for array in (act.prompt, completion.ids, completion.logprobs):
            array.setflags(write=False)  # users' code that gets the turn cannot change it
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
            truncated=completion.reason == "length",
            temperature=act.sampling.temperature or 1.0,
            start=act.start,
            limit=act.sampling.max_new_tokens,
            filtered_mass=completion.filtered_mass,
            player=self._session.players.get(profile.name, ""),
            version=completion.version,
        )


def _completion_of(turn: Turn) -> Completion:
    """Completion with which a recorded turn was made."""
    why = "length" if turn.truncated else "end"
    return Completion(turn.action, turn.logprobs, why, turn.filtered_mass, turn.version)
