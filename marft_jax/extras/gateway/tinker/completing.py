"""Saved weights, and the base, as models of an OpenAI endpoint: ``model="tinker://..."``."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from tinker import types

from marft_jax.extras.gateway import http
from marft_jax.extras.gateway.answers import Choice
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.paths import Read, reply_of
from marft_jax.extras.gateway.protocol import Call
from marft_jax.extras.gateway.served_team import choice_of
from marft_jax.extras.gateway.tinker.service import Service


async def complete(service: Service, owner: str, read: Read, request: Request) -> Response:
    """Answers a call of OpenAI's API with saved weights of an owner, or with the base."""
    answer = read(await http.read_body(request))
    choices = await http.unless_gone(request, _choices(service, owner, answer.call))
    return http.respond(reply_of(answer, choices))


async def _choices(service: Service, owner: str, call: Call) -> list[Choice]:
    path = call.model if call.model.startswith("tinker://") else None
    _, saved = service.samples.weights(None if path else call.model, path, owner)
    weights = service.samples.content(saved)
    given, tokenizer = dict(call.sampling), service.adapters.base.tokenizer
    if call.tools or call.form or given.pop("min_p", 0):
        what = "tools, response_format and min_p: not offered here; serve --api openai does"
        raise ApiError(400, what, code="unsupported_parameter")
    params = types.SamplingParams(
        temperature=given.get("temperature", 1), top_p=given.get("top_p", 1), seed=call.seed,
        max_tokens=given.get("max_new_tokens"), top_k=given.get("top_k") or -1,
        stop=[*call.stop] or None,
    )  # fmt: skip
    prompts = [
        tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else [*prompt]
        for prompt in call.prompts
    ] or [tokenizer.chat(call.messages)]
    asked = [
        service.samples.read(
            types.SampleRequest(
                prompt=types.ModelInput.from_ints(ids), sampling_params=params, num_samples=call.n
            )
        )
        for ids in prompts
    ]
    drawn = await asyncio.gather(*(service.samples.draw(one, weights) for one in asked))
    return [
        choice_of(call, one.prompt, call.stop, completion, tokenizer)
        for one, completions in zip(asked, drawn, strict=True)
        for completion in completions
    ]
