"""A team behind an endpoint: one agent is asked, or all play."""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import numpy as np

from marft_jax.envs.base import Grade, QuestionEnv, Task
from marft_jax.errors import BadInput
from marft_jax.extras.gateway.answers import Choice
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.history import (
    check_tools,
    continuation,
    form_of,
    prompts_of,
    sampling_of,
    split_calls,
)
from marft_jax.extras.gateway.protocol import Call
from marft_jax.models.tokenizers.tokenizer import Tokenizer
from marft_jax.random_keys import Stream
from marft_jax.sampling.batcher import Batcher, Share
from marft_jax.sampling.protocol import Completion, Request
from marft_jax.sampling.stops import cut, text_of
from marft_jax.team.prompts import Team
from marft_jax.types import Episode, Player, Sample, Sampling, Turn

TEAM = "team"
_UNGRADED = Grade(0.0, "not graded")
_SEEDS = 1 << 62

Watch = Callable[[int, np.ndarray, np.ndarray], None]
MakePlayer = Callable[[Share, Team, Callable[[], object]], Player]
"""Makes what plays a team in an environment, on a share of the sampler."""


class ServedTeam:
    """Answers calls with a team.

    Args:
        team: with the sampling that a call may change.
        plays: makes the player of the whole team.
        threads: where it plays.
    """

    def __init__(self, team: Team, batcher: Batcher, plays: MakePlayer, threads: Executor) -> None:
        self._team, self._batcher = team, batcher
        self._plays, self._threads = plays, threads
        self.models = (TEAM, *team.names)
        self.one_of_each_base = tuple(dict(zip(team.bases, team.names, strict=True)).values())

    async def answer(
        self, call: Call, watch: Watch | None = None, ends: bool = True
    ) -> list[Choice]:
        """Samples the choices of a call.

        Args:
            watch: is given a choice's number, its prompt and its ids so far, of an agent alone, in
                another thread.
            ends: an end token ends an action of an agent alone.

        Raises:
            ApiError: no such model, or too long a prompt.
        """
        self.find(call.model)
        seed = secrets.randbelow(_SEEDS) if call.seed is None else call.seed % _SEEDS
        if call.model == TEAM:
            return await self._play(call, seed)
        return await self._ask(call, seed, self._team.names.index(call.model), watch, ends)

    def encode(self, model: str, text: str) -> list[int]:
        """Encodes a text as an agent reads it."""
        return self._team.tokenizers[self._team.names.index(model)].encode(text)

    def longest_prompt(self, model: str) -> int:
        """Tokens of an agent's prompt, at most; two are left for an action."""
        return self._team.contexts[self._team.names.index(model)] - 2

    def find(self, name: str) -> str:
        """Returns the name of a model; raises ``ApiError`` if there is no such model."""
        if name not in self.models:
            what = f"model: expected one of {', '.join(self.models)}, got {name!r:.80}"
            raise ApiError(404, what, "model", "model_not_found")
        return name

    def text_of(self, call: Call, prompt: np.ndarray, ids: np.ndarray) -> str:
        """Text of an agent's ids."""
        tokenizer = self._team.tokenizers[self._team.names.index(call.model)]
        said = tokenizer.said(prompt.tolist(), ids.tolist())
        return tokenizer.decode(ids.tolist()) if call.prompts else said

    def stops_of(self, call: Call) -> tuple[str, ...]:
        """Texts that end what is streamed: an agent has its own."""
        own = self._team.sampling[self._team.names.index(call.model)]
        return call.stop or own.stop

    async def _ask(
        self,
        call: Call,
        seed: int,
        agent: int,
        watch: Watch | None,
        ends: bool,
    ) -> list[Choice]:
        check_tools(self._team.tokenizers[agent], call)
        form = form_of(self._team, agent, call)
        watch = None if call.tools else watch  # which is a call shows at its end
        asked: list[tuple[np.ndarray, Sampling]] = []
        for prompt in prompts_of(self._team, agent, call):
            asked += [(prompt, sampling_of(self._team, call, agent, len(prompt)))] * call.n
        waits: list[asyncio.Future[Completion]] = []
        try:
            for i, (prompt, sampling) in enumerate(asked):
                key = (Stream.EVALUATION, 0, seed, i, agent)
                request = Request(
                    prompt,
                    self._team.owners[agent],
                    sampling,
                    key,
                    base=self._team.bases[agent],
                    form=form,
                    ends=ends,
                )
                seen = None if watch is None else functools.partial(watch, i, prompt)
                waits.append(asyncio.wrap_future(self._batcher.submit(request, seen)))
            done = await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()
        tokenizer = self._team.tokenizers[agent]
        return [
            choice_of(call, prompt, sampling.stop, own, tokenizer, form)
            for (prompt, sampling), own in zip(asked, done, strict=True)
        ]

    async def _play(self, call: Call, seed: int) -> list[Choice]:
        has_tools = call.tools or any(message["role"] == "tool" for message in call.messages)
        given = {"prompt": call.prompts, "response_format": call.form, "tools": has_tools}
        for name in filter(given.get, given):
            what = f"{name}: not offered to a team; model: expected an agent"
            raise ApiError(400, what, name, "unsupported_parameter")
        sampled = {name: value for name, value in call.sampling.items() if name != "stop"}
        call, stop = call._replace(sampling=sampled), call.stop  # it is for the team's answer
        agents = range(len(self._team.profiles))
        team = self._team._replace(sampling=tuple(sampling_of(self._team, call, a) for a in agents))
        *before, last = call.messages
        said = [f"{message['role']}: {message['content']}" for message in before]
        task = Task("\n".join([*said, last["content"]]), "")
        share = Share(self._batcher)
        player = self._plays(share, team, lambda: QuestionEnv(lambda _: task, lambda *_: _UNGRADED))
        samples = [Sample(seed, seed, member) for member in range(call.n)]
        loop = asyncio.get_running_loop()
        try:
            played = await loop.run_in_executor(self._threads, player.play, samples, 0)
        except BadInput as error:
            raise ApiError(400, str(error), "messages") from None
        finally:
            share.release()
        return [_played(episode, stop, team) for episode in played.episodes]


def choice_of(
    call: Call,
    prompt: np.ndarray,
    stop: Sequence[str],
    completion: Completion,
    tokenizer: Tokenizer,
    form: str = "",
) -> Choice:
    ids, logprobs, why, *_ = completion
    said = functools.partial(tokenizer.said, prompt.tolist())
    text = text_of(ids.tolist(), stop, said).rstrip("\ufffd")  # half a character
    text = continuation(tokenizer, ids, stop) if call.prompts else text
    text, calls = split_calls(tokenizer, call, ids, text, secrets.token_hex(3)[:5], form)
    return Choice(text, ids, logprobs, why == "length", prompt, tokenizer.decode, calls=calls)


def _played(episode: Episode, stop: Sequence[str], team: Team) -> Choice:
    """The team's answer: the last turn that is graded, and beside it what all wrote."""
    turns = [
        {"agent": t.name, "content": t.text, "answers": t.answers, "sees": list(t.sees)}
        | {"usage": (len(t.prompt), len(t.action))}
        for t in episode.turns
    ]
    graded: list[Turn] = [turn for turn in episode.turns if turn.answers]
    turn = [*episode.turns, *graded][-1]
    text, stopped = cut(turn.text, stop)
    length = turn.truncated and not stopped
    sampled = turn.action, turn.logprobs, length, turn.prompt
    return Choice(text, *sampled, team.decoders[turn.agent], tuple(turns))
