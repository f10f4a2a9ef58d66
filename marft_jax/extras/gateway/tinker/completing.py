"""Saved weights, and the base, as models of an OpenAI endpoint: ``model="tinker://..."``."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tinker import types

from marft_jax.extras.gateway import http
from marft_jax.extras.gateway.answers import Choice
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.history import continuation
from marft_jax.extras.gateway.paths import Read
from marft_jax.extras.gateway.protocol import Call
from marft_jax.extras.gateway.tinker.service import Service
from marft_jax.sampling.stops import text_of


async def complete(service: Service, owner: str, read: Read, request: Request) -> Response:
    """Answers a call of OpenAI's API with saved weights of an owner, or with the base."""
    answer = read(await http.read_body(request))
    choices = await http.unless_gone(request, _choices(service, owner, answer.call))
    if answer.call.stream:
        return http.stream(answer.ends(choices))
    return JSONResponse(answer.whole(choices))


async def _choices(service: Service, owner: str, call: Call) -> list[Choice]:
    path = call.model if call.model.startswith("tinker://") else None
    _, saved = service.checkpoints.weights(None if path else call.model, path, owner)
    if call.tools or call.form:
        raise ApiError(400, "tools and response_format: not offered here; serve --api openai does")
    tokenizer = service.models.base.tokenizer
    prompts = [
        tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else [*prompt]
        for prompt in call.prompts
    ] or [tokenizer.chat(call.messages)]
    given: dict[str, Any] = {
        k: call.sampling[k] for k in ("temperature", "top_p") if k in call.sampling
    }
    if call.sampling.get("min_p"):
        raise ApiError(400, "min_p: not offered here", "min_p", "unsupported_parameter")
    params = types.SamplingParams(
        **given, max_tokens=call.sampling.get("max_new_tokens"), seed=call.seed,
        top_k=call.sampling.get("top_k") or -1, stop=[*call.stop] or None,
    )  # fmt: skip
    asked = list[tuple[np.ndarray, Any]]()
    for ids in prompts:
        prompt = types.ModelInput.from_ints(ids)
        request = types.SampleRequest(prompt=prompt, sampling_params=params, num_samples=call.n)
        one = service.read(request)
        futures = service.slots.submit(service.content(saved), one.requests)
        asked += [(one.prompt, asyncio.wrap_future(future)) for future in futures]
    done = await asyncio.gather(*(future for _, future in asked))
    return [
        _choice(tokenizer, call, prompt, one) for (prompt, _), one in zip(asked, done, strict=True)
    ]


def _choice(tokenizer: Any, call: Call, prompt: np.ndarray, one: Any) -> Choice:
    said = functools.partial(tokenizer.said, prompt.tolist())
    text = text_of(one.ids.tolist(), call.stop, said).rstrip("\ufffd")  # half a character
    text = continuation(tokenizer, one.ids, call.stop) if call.prompts else text
    return Choice(text, one.ids, one.logprobs, one.reason == "length", prompt, tokenizer.decode)
