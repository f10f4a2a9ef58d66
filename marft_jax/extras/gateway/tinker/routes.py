"""The routes of the API: each reads, checks, calls one verb, answers."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import io
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zstandard
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from tinker import types

from marft_jax.errors import reason
from marft_jax.extras.gateway import http
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.paths import Read
from marft_jax.extras.gateway.tinker import wire
from marft_jax.extras.gateway.tinker.models import CALLS
from marft_jax.extras.gateway.tinker.service import Service, saved_of, stamp

LIMITS = http.DEFAULT._replace(body=256 << 20, read_seconds=120.0)
_KINDS = ("application/json", "application/x-protobuf")
_POLL_SECONDS = 25.0  # the SDK waits for 45
_URL_SECONDS = 3600
_Verb = Callable[[Any, str], Any]
"""(call, owner) to the fields of the answer; None: it has none."""


def make_app(
    service: Service,
    keys: Sequence[str] = (),
    limits: http.Limits = LIMITS,
    names: Sequence[str] = (),
) -> Starlette:
    """Makes the application.

    Args:
        keys: a call must send one of them as ``X-API-Key``, and sees what it made alone; without
            keys every call is admitted.
        names: of hosts that it answers to, beside those of the loopback address.
    """
    gate = _Gate(service, keys, limits)
    models, sessions, samples = service.models, service.sessions, service.samples
    run, saved = "training_runs/{run}", "training_runs/{run}/checkpoints/{kind}/{name}"
    verbs: dict[tuple[str, str], tuple[Any, _Verb]] = {
        ("POST", "client/config"): (dict, lambda q, o: {"sample_max_concurrent_requests": 1024}),
        ("POST", "client/dynamic_config"): (dict, lambda q, o: {"sample_cancel_enabled": True}),
        ("POST", "telemetry"): (dict, lambda q, o: {"status": "accepted"}),
        ("POST", "create_session"): (types.CreateSessionRequest, sessions.create),
        ("POST", "session_heartbeat"): (types.SessionHeartbeatRequest, sessions.beat),
        ("POST", "sessions/{session}/finish"): (dict, sessions.finish),
        ("POST", "create_model"): (types.CreateModelRequest, models.create),
        ("POST", "get_info"): (types.GetInfoRequest, service.info),
        ("POST", "weights_info"): (dict, service.weights),
        ("POST", "create_sampling_session"): (
            types.CreateSamplingSessionRequest, samples.create_sampler,
        ),
        ("POST", "asample"): (bytes, samples.call),
        ("POST", "cancel_future"): (dict, samples.cancel),
        **{
            ("POST", kind): (bytes, functools.partial(models.call, kind))
            for kind in ("forward_backward", *CALLS)
        },
        ("GET", "get_server_capabilities"): (dict, service.capabilities),
        ("GET", "sessions"): (dict, service.list_sessions),
        ("GET", "sessions/{session}"): (dict, service.session),
        ("GET", "samplers/{sampler:path}"): (dict, service.sampler),
        ("GET", "training_runs"): (dict, service.runs),
        ("GET", run): (dict, service.run),
        ("GET", "checkpoints"): (dict, service.checkpoints),
        ("GET", f"{run}/checkpoints"): (dict, service.checkpoints),
        ("DELETE", saved): (dict, service.delete),
        ("PUT", f"{saved}/ttl"): (dict, service.set_ttl),
    }  # fmt: skip
    handlers = {
        ("GET", "healthz"): gate.health,
        ("POST", "retrieve_future"): gate.retrieve,
        ("GET", f"{saved}/external_weights_urls"): gate.urls,
        ("GET", "files/{token}/{file:path}"): gate.file,
        **{path: functools.partial(gate.answer, *verb) for path, verb in verbs.items()},
    }
    routes = [
        *(Route(f"/api/v1/{p}", run, methods=[m]) for (m, p), run in handlers.items()),
        *http.completion_routes("/v1", gate.complete),
        *http.completion_routes("/oai/api/v1", gate.complete),
        Route("/{path:path}", _unknown, methods=["GET", "POST", "PUT", "DELETE"]),
    ]
    return http.make_app(routes, names=names)


async def _unknown(request: Request) -> Response:
    what = f"{request.method} {request.url.path:.120}: this server does not offer it"
    raise ApiError(404, what)


class _Gate:
    """Handlers."""

    def __init__(self, service: Service, keys: Sequence[str], limits: http.Limits) -> None:
        self._service, self._keys, self._limits = service, keys, limits
        self._links = dict[str, tuple[float, dict[str, Path]]]()  # until when, and files

    def _owner(self, request: Request) -> str:
        """Name of the owner of the key that a call comes with; "" where there are no keys."""
        http.check_key(request, self._keys)
        return hashlib.sha256(http.key_of(request)).hexdigest()[:16] if self._keys else ""

    async def _body(self, request: Request) -> bytes:
        body = await http.read_body(request, self._limits, _KINDS)
        kind = request.headers.get("content-encoding", "identity")
        if kind == "zstd":
            return await _run(_unpacked, body, self._limits.body)
        if kind != "identity":
            raise ApiError(415, f"Content-Encoding: expected zstd or none, got {kind!r:.40}")
        return body

    async def answer(self, kind: Any, verb: _Verb, request: Request) -> Response:
        """Answers a call, at once or with a promise.

        Args:
            kind: of the request; dict: path, query and JSON body together; bytes: the body.
        """
        owner, query = self._owner(request), {**request.query_params, **request.path_params}
        sent: Any = {}
        if request.method in ("POST", "PUT"):
            body = await self._body(request)
            sent = body if kind is bytes else wire.read_json(kind, body)
        answer = await _run(verb, {**sent, **query} if kind is dict else sent, owner)
        return Response(status_code=204) if answer is None else JSONResponse(answer)

    async def retrieve(self, request: Request) -> Response:
        owner, kind = self._owner(request), types.FutureRetrieveRequest
        id = wire.read_json(kind, await self._body(request)).request_id
        promise = self._service.promise(id, owner)
        try:
            result = await asyncio.wait_for(asyncio.shield(promise), _POLL_SECONDS)
        except TimeoutError:
            fields = {"type": "try_again", "request_id": id, "queue_state": "active"}
            return JSONResponse(fields, 408)
        self._service.samples.fetched(id)
        return Response(result, media_type=_KINDS[not result.startswith(b"{")])

    async def complete(self, read: Read, request: Request) -> Response:
        """Answers a call of OpenAI's API; the key may also be that of this API."""
        owner, choices = self._owner(request), self._service.samples.choices
        return await http.complete(read, request, functools.partial(choices, owner=owner))

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"}, 200 if self._service.samples.alive else 503)

    async def urls(self, request: Request) -> Response:
        """Addresses from which files of external weights can be fetched without a key."""
        saved, store, now = saved_of(request.path_params), self._service.store, time.time()
        store.facts(saved, self._owner(request))
        if saved.kind != "external_weights":
            raise ApiError(400, f"{saved.path}: expected what save_weights_external made")
        place, token = store.place(saved), secrets.token_hex()
        files = {str(x.relative_to(place)): x for x in place.rglob("adapter*")}
        self._links = {key: link for key, link in self._links.items() if link[0] > now}
        self._links[token] = until, _ = now + _URL_SECONDS, files
        urls = {name: f"{request.base_url}api/v1/files/{token}/{name}" for name in files}
        return JSONResponse({"urls": urls, "expires": stamp(until)})

    async def file(self, request: Request) -> Response:
        """Sends a file of external weights to whoever has its URL."""
        until, files = self._links.get(request.path_params["token"], (0.0, {}))
        file = files.get(request.path_params["file"])
        if until < time.time() or file is None or not file.exists():
            raise ApiError(403, "this URL has expired, was never given, or its weights are deleted")
        return FileResponse(file)


async def _run(verb: Callable[..., Any], *args: Any) -> Any:
    try:
        if inspect.iscoroutinefunction(verb):
            return await verb(*args)
        return await run_in_threadpool(verb, *args)
    except OSError as error:
        raise ApiError(503, f"the disk of the server: {reason(error)}") from None


def _unpacked(body: bytes, most: int) -> bytes:
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body)) as stream:
            content = stream.read(most + 1)
    except (zstandard.ZstdError, MemoryError) as error:
        raise ApiError(422, f"expected a body compressed with zstd: {error}"[:200]) from None
    if len(content) > most:
        raise ApiError(413, f"expected at most {most} bytes")
    return content
