"""Completions: a text, or token ids, continued as they are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from marft_jax.extras.gateway.answers import Answer, Choice
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.protocol import call_of, read_object, refuse_unless_neutral
from marft_jax.models.tokenizers.tokenizer import Message
from marft_jax.plugins import shown, text_of

_NEUTRAL: dict[str, Sequence[Any]] = {"suffix": ("",), "best_of": (1,), "logprobs": (0, False)}
_TOKENS = 16  # of an answer whose call gives no limit


def read(body: bytes) -> Answer:
    """Reads the body of a completion; raises ``ApiError``, 400, with the field that is wrong."""
    fields = read_object(body)
    refuse_unless_neutral(fields, _NEUTRAL)
    chat = {"max_tokens": _TOKENS} | {k: v for k, v in fields.items() if v is not None}
    chat["logprobs"] = not (fields.get("logprobs") is None or fields["logprobs"] is False)
    return _Completion(call_of(chat, _prompts(fields.get("prompt"))))


def _prompts(given: Any) -> list[str | tuple[int, ...]]:
    prompts = given if isinstance(given, list) and not _is_ids(given) else [given]
    if not prompts or not all(isinstance(prompt, str) or _is_ids(prompt) for prompt in prompts):
        what = "a text, token ids, or a list of these"
        raise ApiError(400, f"prompt: expected {what}, got {shown(given)}", "prompt")
    return [text_of("prompt", p) if isinstance(p, str) else tuple(p) for p in prompts]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


class _Completion(Answer):
    prefix, objects = "cmpl-", ("text_completion", "text_completion")

    def _read(self, choice: Choice) -> dict[str, Any]:
        return {}  # each choice has its own

    def _end(self, choice: Choice) -> dict[str, Any]:
        return super()._end(choice) | super()._read(choice)

    def _said(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.text}

    def _more(
        self, index: int, thought: str, text: str, calls: Sequence[Message]
    ) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        rows = [(row["token"], row["logprob"]) for row in self._rows(choice)]
        tokens, logprobs = zip(*rows, strict=True)
        return {
            "text_offset": [0, *itertools.accumulate(map(len, tokens))][:-1],
            "token_logprobs": logprobs,
            "tokens": tokens,
            "top_logprobs": [{token: logprob} for token, logprob in rows],
        }
