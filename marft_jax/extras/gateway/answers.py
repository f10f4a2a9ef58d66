"""Answers of OpenAI's API: whole, or piece by piece."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from marft_jax.extras.gateway.protocol import Call
from marft_jax.models.tokenizers.token_texts import Decode, pieces
from marft_jax.models.tokenizers.tokenizer import Message
from marft_jax.sampling.stops import cut
from marft_jax.types import thinking_in, without_thinking


class Choice(NamedTuple):
    """An answer.

    Attributes:
        text: with its thoughts; without what ends it, what follows a stop string, and calls.
        ids, logprobs: of the tokens that were sampled, up to the end or the stop string.
        length: it was cut off at its limit.
        prompt: ids that it answers.
        decode: ids to text, of the base that sampled it.
        turns: of a team: what each agent wrote, in acting order.
    """

    text: str
    ids: np.ndarray
    logprobs: np.ndarray
    length: bool
    prompt: np.ndarray
    decode: Decode
    turns: tuple[dict[str, Any], ...] = ()
    calls: tuple[Message, ...] = ()  # of tools, as in its message

    @property
    def message(self) -> dict[str, Any]:
        """Message of the assistant."""
        thought, text = parted(self.text)
        message = {"role": "assistant", "content": text if text or not self.calls else None}
        message |= {"reasoning_content": thought} if thought else {}
        return message | ({"tool_calls": list(self.calls)} if self.calls else {})


Parted = tuple[str, str]
"""What an answer thinks, and what it says."""


def parted(text: str) -> Parted:
    """Parts a text into thoughts and answer."""
    return thinking_in(text), without_thinking(text).strip()


def settled(text: str, stops: Sequence[str], strip: bool = True) -> str:
    """Beginning of a text that further tokens leave as it is: without an unfinished character, or
    what may be the beginning of a stop string.

    Args:
        strip: white space around the text is no part of it.
    """
    text, stopped = cut(text.lstrip() if strip else text, stops)
    if stopped:
        return text
    held = max(_overlap(text, stop) for stop in (*stops, "<think>", "</think>"))
    text = text[: len(text) - held].rstrip("\ufffd")
    return text.rstrip() if strip else text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest beginning of a stop string that a text ends with."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class Answer:
    """Makes the bodies of an answer: whole, or piece by piece. This one is a chat completion.

    Attributes:
        call: what is answered.
    """

    prefix, objects = "chatcmpl-", ("chat.completion", "chat.completion.chunk")

    def __init__(self, call: Call):
        self.call = call
        self._id, self._created = f"{self.prefix}{uuid.uuid4().hex}", int(time.time())
        self._begun: set[int] = set()
        self._sent: dict[int, Parted] = {}  # what earlier pieces of each choice have

    def parted(self, text: str) -> Parted:
        """Parts a text into thoughts and answer."""
        return ("", text) if self.call.prompts else parted(text)

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Body of a completion."""
        numbered = enumerate(choices)
        whole = [{"index": i} | self._said(choice) | self._end(choice) for i, choice in numbered]
        body = self._body(self.objects[0], whole) | {"usage": usage(choices, self.call.n)}
        return body | self._read(choices[0])

    def more(self, index: int, text: str) -> Iterator[dict[str, Any]]:
        """Bodies of what the text of a choice has beyond earlier pieces."""
        if any(rest := self._rest(index, text)):
            yield from self.piece(index, *rest)

    def _rest(self, index: int, text: str) -> Parted:
        """Parts of a text that were not sent. What was sent as the answer may turn out to be a
        thought that was never opened; then the whole answer is left."""
        thought, said = self._sent.get(index, ("", ""))
        now = self.parted(text)
        if said and not thought and now[0].startswith(said):
            thought, said = now[0], ""
            self._recast(thought)
        elif not (now[0].startswith(thought) and now[1].startswith(said)):
            return "", ""
        self._sent[index] = now
        return now[0][len(thought) :], now[1][len(said) :]

    def _recast(self, thought: str) -> None:
        """Takes what was sent as the answer as the beginning of a thought."""

    def piece(
        self, index: int, thought: str, text: str, end: Choice | None = None
    ) -> Iterator[dict[str, Any]]:
        """Bodies of chunks: more text of a choice; with its end, all that is said of it.

        Calls are complete before the chunk with the end: at the end, clients look at what came
        before.
        """
        last: dict[str, Any] = {"finish_reason": None}
        if end is not None and end.calls:
            choice = {"index": index} | self._more(index, thought, text, end.calls) | last
            yield self._body(self.objects[1], [choice])
            thought = text = ""
        last |= {} if end is None else self._end(end)
        choice = {"index": index} | self._more(index, thought, text, ()) | last
        yield self._body(self.objects[1], [choice]) | ({} if end is None else self._read(end))

    def _read(self, choice: Choice) -> dict[str, Any]:
        return {"prompt_token_ids": choice.prompt.tolist()} if self.call.ids else {}

    def _said(self, choice: Choice) -> dict[str, Any]:
        return {"message": choice.message}

    def _more(
        self, index: int, thought: str, text: str, calls: Sequence[Message]
    ) -> dict[str, Any]:
        delta: dict[str, Any] = {} if index in self._begun else {"role": "assistant"}
        delta |= {"reasoning_content": thought} if thought else {}
        delta["content"] = text
        self._begun.add(index)
        if calls:
            delta["tool_calls"] = [{"index": i, **called} for i, called in enumerate(calls)]
        return {"delta": delta}

    def ends(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        """Bodies of the last chunks: the rest of each choice, and the usage where it is asked
        for."""
        for i, choice in enumerate(choices):
            yield from self.piece(i, *self._rest(i, choice.text), choice)
        if self.call.usage:
            yield self._body(self.objects[1], []) | {"usage": usage(choices, self.call.n)}

    def _body(self, kind: str, choices: Sequence[Any]) -> dict[str, Any]:
        facts = {"id": self._id, "object": kind, "created": self._created}
        return facts | {"model": self.call.model, "choices": choices}

    def _end(self, choice: Choice) -> dict[str, Any]:
        why = "tool_calls" if choice.calls else "length" if choice.length else "stop"
        logprobs = self._logprobs(choice) if self.call.logprobs else None
        end: dict[str, Any] = {"finish_reason": why, "logprobs": logprobs}
        end |= {"token_ids": choice.ids.tolist()} if self.call.ids else {}
        return end | ({"turns": choice.turns} if choice.turns else {})

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        return {"content": self._rows(choice)}

    def _rows(self, choice: Choice) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        tokens = pieces(choice.ids.tolist(), choice.decode)
        _, text = self.parted(choice.text)
        text = "".join(tokens) if choice.calls or text != choice.text else text
        before, left = max("".join(tokens).find(text), 0), len(text)
        for token, logprob in zip(tokens, choice.logprobs.tolist(), strict=True):
            part = token[before:][:left]  # the bytes of all tokens together are those of the text
            before, left = max(before - len(token), 0), left - len(part)
            row = {"token": token, "logprob": logprob, "bytes": list(part.encode())}
            rows.append(row | {"top_logprobs": []})
        return rows


def usage(choices: Sequence[Choice], n: int) -> dict[str, int]:
    """Tokens that were read and sampled; those of all turns where a team has played.

    Args:
        n: choices that share a prompt.
    """
    turns = [turn["usage"] for choice in choices for turn in choice.turns]
    if not turns:
        read = sum(len(choice.prompt) for choice in choices[::n])
        turns = [(read, sum(len(choice.ids) for choice in choices))]
    prompt, completion = (sum(column) for column in zip(*turns, strict=True))
    total = prompt + completion
    return dict(prompt_tokens=prompt, completion_tokens=completion, total_tokens=total)
