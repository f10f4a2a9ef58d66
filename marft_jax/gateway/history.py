"""Calls of an episode as acts: their ids, their random numbers, and whom they see.

A conversation is kept as ids, by its agent and its messages. A call that continues one encodes only
what is new; one whose messages of the assistant are not what that agent wrote there starts anew.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from marft_jax.errors import BadInput, described
from marft_jax.gateway.protocol import ApiError, Call, Choice
from marft_jax.models.tokenizers.tokenizer import Message
from marft_jax.team.prompts import Team
from marft_jax.types import Act, Sampling, Turn

_Spoken = tuple[tuple[str, str], ...]


def prompt_of(team: Team, agent: int, messages: Sequence[Message]) -> np.ndarray:
    """Encodes a conversation; the agent's own system prompt opens it where it has none."""
    system = team.profiles[agent].prompt
    if system and not any(message["role"] == "system" for message in messages):
        messages = [{"role": "system", "content": system}, *messages]
    try:
        return np.asarray(team.tokenizer.chat(messages), np.int32)
    except Exception as error:  # templates refuse what they like
        what = f"messages: the chat template refuses them: {described(error)}"
        raise ApiError(400, what, "messages") from None


def sampling_of(team: Team, call: Call, agent: int, prompt: int = 0) -> Sampling:
    """Sampling of an agent; no more tokens than it may write, and than there is room for."""
    own, room = team.sampling[agent], team.context - prompt
    if room < 1:
        what = f"messages: {prompt} tokens fill the context of {team.context}"
        raise ApiError(400, what, "messages", "context_length_exceeded")
    wanted = own._replace(**call.sampling)
    return wanted._replace(max_new_tokens=min(wanted.max_new_tokens, own.max_new_tokens, room))


class History:
    """What was said in an episode.

    Attributes:
        rewritten: calls whose conversation was changed by the program.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._turns: list[Turn] = []
        self._said: dict[tuple[int, _Spoken], Turn] = {}
        self._asked: Counter[bytes] = Counter()
        self.rewritten = 0

    def acts(self, call: Call) -> list[Act]:
        """Acts that answer a call, one for each of its choices.

        Raises:
            ApiError: no such agent, or what cannot be trained.
        """
        names = self._team.names
        if call.model not in names:
            what = f"model: expected one of {', '.join(names)}, got {call.model!r:.80}"
            raise ApiError(404, what, "model", "model_not_found")
        agent = names.index(call.model)
        prompt, start, known = self._prompt(agent, call.messages)
        sampling = sampling_of(self._team, call, agent, len(prompt))
        sees = self._sees(call.messages, known)
        act = Act(agent, prompt, 0, sees, sampling, start)
        return [act._replace(number=self._number(act, call.seed)) for _ in range(call.n)]

    def take(self, call: Call, turns: Sequence[Turn]) -> list[Choice]:
        """Remembers the turns of a call, and makes its choices of them."""
        for turn in turns:
            self._turns.append(turn)
            spoken = _spoken([*call.messages, {"role": "assistant", "content": turn.text}])
            self._said[turn.agent, spoken] = turn
        return [Choice(t.text, t.action, t.logprobs, t.truncated, t.prompt) for t in turns]

    def _prompt(
        self, agent: int, messages: Sequence[Message]
    ) -> tuple[np.ndarray, int, Turn | None]:
        """Ids of a prompt, how many of them are known, and the turn that it continues, if any."""
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        known = self._said.get((agent, _spoken(messages[: last + 1])))
        new = [message["content"] for message in messages[last + 1 :]]
        if known is not None and len(new) == 1 and messages[-1]["role"] == "user":
            try:
                if (act := self._team.resume(known, new[0])) is not None:
                    return act.prompt, act.start, known
            except BadInput:  # a template that cannot be continued
                pass
        self.rewritten += last >= 0
        return prompt_of(self._team, agent, messages), 0, None

    def _sees(self, messages: Sequence[Message], known: Turn | None) -> tuple[int, ...]:
        """Earlier turns whose text the messages contain, and those of the same conversation."""
        shown = "\n".join(message["content"] for message in messages)
        before = () if known is None else (*known.sees, known.index)
        found = [turn.index for turn in self._turns if turn.text and turn.text in shown]
        return tuple(sorted({*before, *found}))

    def _number(self, act: Act, seed: int | None) -> int:
        """Number of a random stream: from what is asked, and how often that was asked before."""
        asked = f"{act.agent} {tuple(act.sampling)} {seed} ".encode() + act.prompt.tobytes()
        self._asked[asked] += 1
        digest = hashlib.blake2b(asked + b" %d" % self._asked[asked], digest_size=8)
        return int.from_bytes(digest.digest(), "big")


def _spoken(messages: Sequence[Message]) -> _Spoken:
    return tuple((message["role"], message["content"]) for message in messages)
