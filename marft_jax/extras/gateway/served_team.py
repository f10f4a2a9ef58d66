"""A team behind an endpoint: one agent is asked, or all play."""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import numpy as np

from marft_jax.envs.base import Grade, QuestionEnv, Task
from marft_jax.extras.gateway.answers import Choice, settled
from marft_jax.extras.gateway.errors import ApiError, naming
from marft_jax.extras.gateway.history import (
    check_tools,
    choice_of,
    form_of,
    prompts_of,
    sampling_of,
)
from marft_jax.extras.gateway.protocol import Call
from marft_jax.models.tokenizers.tokenizer import Tokenizer
from marft_jax.random_keys import Stream
from marft_jax.sampling.batcher import Batcher, SamplerHandle
from marft_jax.sampling.protocol import Completion, Request
from marft_jax.sampling.stops import cut, text_of
from marft_jax.team.prompts import Team
from marft_jax.types import Episode, Player, Sample

TEAM = "team"
_UNGRADED = Grade(0.0, "not graded")
_SEEDS = 1 << 62

Watch = Callable[[int, np.ndarray, np.ndarray], None]
MakePlayer = Callable[[SamplerHandle, Team, Callable[[], object]], Player]
"""Makes what plays a team in an environment, on a share of the sampler."""


class ServedTeam:
    """Answers calls with a team.

    Attributes:
        team: with the sampling that a call may change.
        models: names for the model of a call.

    Args:
        team: as above.
        plays: makes the player of the whole team.
        threads: where it plays.
    """

    def __init__(self, team: Team, batcher: Batcher, plays: MakePlayer, threads: Executor) -> None:
        self.team, self._batcher = team, batcher
        self._plays, self._threads = plays, threads
        self.models = (TEAM, *team.names)

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
        return await self._ask(call, seed, self.team.names.index(call.model), watch, ends)

    def find(self, name: str) -> str:
        """Returns the name of a model; raises ``ApiError`` if there is no such model."""
        if name not in self.models:
            what = f"model: expected one of {', '.join(self.models)}, got {name!r:.80}"
            raise ApiError(404, what, "model", "model_not_found")
        return name

    def settled(self, call: Call, prompt: np.ndarray, ids: np.ndarray) -> str:
        """Beginning of an agent's text that its further ids leave as it is."""
        agent = self.team.names.index(call.model)
        tokenizer, stops = self.team.tokenizers[agent], call.stop or self.team.sampling[agent].stop
        if call.prompts:
            return settled(tokenizer.decode(ids.tolist()), stops, strip=False)
        return settled(tokenizer.said(prompt.tolist(), ids.tolist()), stops)

    async def _ask(
        self, call: Call, seed: int, agent: int, watch: Watch | None, ends: bool
    ) -> list[Choice]:
        team, tokenizer = self.team, self.team.tokenizers[agent]
        check_tools(tokenizer, call)
        common = {"base": team.bases[agent], "form": form_of(team, agent, call), "ends": ends}
        watch = None if call.tools else watch  # which is a call shows at its end
        requests = list[Request]()
        for prompt in prompts_of(team, agent, call):
            sampling = sampling_of(team, call, agent, len(prompt))
            for _ in range(call.n):
                key = (Stream.EVALUATION, 0, seed, len(requests), agent)
                requests.append(Request(prompt, team.owners[agent], sampling, key, **common))
        waits: list[asyncio.Future[Completion]] = []
        try:
            for i, request in enumerate(requests):
                seen = watch and functools.partial(watch, i, request.prompt)
                waits.append(asyncio.wrap_future(self._batcher.submit(request, seen)))
            completions = await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()
        answered = zip(requests, completions, strict=True)
        return [choice_of_completion(call, tokenizer, *both) for both in answered]

    async def _play(self, call: Call, seed: int) -> list[Choice]:
        has_tools = call.tools or any(message["role"] == "tool" for message in call.messages)
        not_offered = {"prompt": call.prompts, "response_format": call.form, "tools": has_tools}
        for name in filter(not_offered.get, not_offered):
            what = f"{name}: not offered to a team; model: expected an agent"
            raise ApiError(400, what, name, "unsupported_parameter")
        sampled = {name: value for name, value in call.sampling.items() if name != "stop"}
        call, stop = call._replace(sampling=sampled), call.stop  # it is for the team's answer
        agents = range(len(self.team.profiles))
        team = self.team._replace(sampling=tuple(sampling_of(self.team, call, a) for a in agents))
        *before, last = call.messages
        said = [f"{message['role']}: {message['content']}" for message in before]
        task = Task("\n".join([*said, last["content"]]), "")
        share = SamplerHandle(self._batcher)
        player = self._plays(share, team, lambda: QuestionEnv(lambda _: task, lambda *_: _UNGRADED))
        samples = [Sample(seed, seed, member) for member in range(call.n)]
        loop = asyncio.get_running_loop()
        try:
            with naming("messages"):
                played = await loop.run_in_executor(self._threads, player.play, samples, 0)
        finally:
            share.release()
        return [_played(episode, stop, team) for episode in played.episodes]


def choice_of_completion(
    call: Call, tokenizer: Tokenizer, request: Request, completion: Completion
) -> Choice:
    """Makes a choice of what a sampler answered."""
    ids, prompt, stop = completion.ids, request.prompt, request.sampling.stop
    text = text_of(ids.tolist(), stop, functools.partial(tokenizer.said, prompt.tolist()))
    sampled = ids, completion.logprobs, completion.reason == "length", prompt
    text = text.rstrip("\ufffd")  # half a character
    return choice_of(call, tokenizer, sampled, text, stop, request.form)


def _played(episode: Episode, stop: Sequence[str], team: Team) -> Choice:
    """The team's answer: the last turn that is graded, and beside it what all wrote."""
    turns = [
        {"agent": t.name, "content": t.text, "answers": t.answers, "sees": list(t.sees)}
        | {"usage": (len(t.prompt), len(t.action))}
        for t in episode.turns
    ]
    turn = [*episode.turns, *(turn for turn in episode.turns if turn.answers)][-1]
    text, stopped = cut(turn.text, stop)
    sampled = turn.action, turn.logprobs, turn.truncated and not stopped, turn.prompt
    return Choice(text, *sampled, team.decoders[turn.agent], tuple(turns))
