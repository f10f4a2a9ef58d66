"""The routes of the API: each reads, checks, calls one verb of the service, answers."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import io
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import zstandard
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from tinker import types

from marft_jax.errors import BadInput
from marft_jax.extras.gateway import http
from marft_jax.extras.gateway.paths import READS, Read
from marft_jax.extras.gateway.tinker import wire
from marft_jax.extras.gateway.tinker.checkpoints import stamp
from marft_jax.extras.gateway.tinker.completing import complete
from marft_jax.extras.gateway.tinker.models import CALLS
from marft_jax.extras.gateway.tinker.service import Service
from marft_jax.extras.gateway.tinker.store import Saved
from marft_jax.extras.gateway.tinker.wire import TinkerError

LIMITS = http.DEFAULT._replace(body=256 << 20, read_seconds=120.0)
_KINDS = ("application/json", "application/x-protobuf")
_POLL_SECONDS = 25.0  # the SDK waits for 45
_URL_SECONDS = 3600
_CONFIG = {"sample_max_concurrent_requests": 1024, "sample_join_sampling_session": True}
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
    gate, models = _Gate(service, [key.encode() for key in keys], limits), service.models
    sessions, saved_weights = service.sessions, service.checkpoints
    run = "training_runs/{run}"
    saved = f"{run}/checkpoints/{{kind}}/{{name}}"
    posts: dict[str, tuple[Any, _Verb]] = {
        "client/config": (None, lambda q, o: _CONFIG),
        "client/dynamic_config": (None, lambda q, o: {"sample_cancel_enabled": True}),
        "telemetry": (None, lambda q, o: {"status": "accepted"}),
        "create_session": (types.CreateSessionRequest, sessions.create),
        "session_heartbeat": (types.SessionHeartbeatRequest, sessions.beat),
        "sessions/{session}/finish": (None, sessions.finish),
        "create_model": (types.CreateModelRequest, service.create_model),
        "get_info": (types.GetInfoRequest, lambda q, o: models.info(models.find(q.model_id, o))),
        "copy_weights": (types.CopyWeightsRequest, saved_weights.copy),
        "weights_info": (None, saved_weights.info),
        "create_sampling_session": (types.CreateSamplingSessionRequest, service.create_sampler),
        "join_sampling_session": (types.JoinSamplingSessionRequest, sessions.join),
        "cancel_future": (None, service.cancel),
        "create_custom_loss": (None, _no_custom_loss),
    }
    gets: dict[str, _Verb] = {
        "get_server_capabilities": lambda q, o: {"supported_models": models.described()},
        "sessions": sessions.listed,
        "sessions/{session}": sessions.describe,
        "samplers/{sampler:path}": sessions.describe_sampler,
        "training_runs": saved_weights.runs,
        run: lambda q, o: saved_weights.run(q["run"], o),
        "checkpoints": saved_weights.listed,
        f"{run}/checkpoints": saved_weights.listed,
        f"{saved}/external_weights_urls": gate.urls,
    }
    own: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
        *(("POST", path, gate.verb(*verb)) for path, verb in posts.items()),
        *(("GET", path, gate.verb(None, verb)) for path, verb in gets.items()),
        *(("POST", kind, gate.call(kind)) for kind in (*CALLS, "asample")),
        ("DELETE", saved, gate.verb(None, saved_weights.delete)),
        ("PUT", f"{saved}/ttl", gate.verb(None, saved_weights.set_ttl)),
        ("GET", f"{saved}/files/{{file}}", gate.file),
        ("GET", "healthz", gate.health),
        ("POST", "retrieve_future", gate.retrieve),
        ("POST", "retrieve_futures", gate.retrieve_many),
    ]
    chat = [
        Route(f"{root}/v1{path}", gate.completes(read), methods=["POST"])
        for root in ("", "/oai/api")
        for path, read in READS.items()
    ]
    routes = [Route(f"/api/v1/{path}", run, methods=[method]) for method, path, run in own]
    rest = Route("/{path:path}", _unknown, methods=["GET", "POST", "PUT", "DELETE"])
    return http.make_app([*routes, *chat, rest], lambda status: None, names)


async def _unknown(request: Request) -> Response:
    what = f"{request.method} {request.url.path:.120}: this server does not offer it"
    raise TinkerError(404, what)


def _no_custom_loss(asked: Any, owner: str) -> Any:
    raise TinkerError(400, "custom losses run in the client: forward_backward_custom does that")


class _Gate:
    """Handlers."""

    def __init__(self, service: Service, keys: Sequence[bytes], limits: http.Limits) -> None:
        self._service, self._keys, self._limits = service, keys, limits
        self._secret = secrets.token_bytes(32)

    def _owner(self, request: Request) -> str:
        """Name of the owner of the key that a call comes with; "" where there are no keys."""
        key = request.headers.get("x-api-key", "").encode("latin-1") or http.bearer(request)
        if not self._keys:
            return ""
        if not any([hmac.compare_digest(key, own) for own in self._keys]):
            raise TinkerError(401, "expected X-API-Key with a key that this server knows")
        return hashlib.sha256(key).hexdigest()[:16]

    def completes(self, read: Read) -> Callable[[Request], Awaitable[Response]]:
        """A handler of OpenAI's calls; the key may also be that of this API."""

        async def handle(request: Request) -> Response:
            return await complete(self._service, self._owner(request), read, request)

        return handle

    async def _body(self, request: Request) -> bytes:
        body = await http.read_body(request, self._limits, _KINDS)
        kind = request.headers.get("content-encoding", "identity")
        if kind == "zstd":
            return await run_in_threadpool(_unpacked, body, self._limits.body)
        if kind != "identity":
            raise TinkerError(415, f"Content-Encoding: expected zstd or none, got {kind!r:.40}")
        return body

    def verb(self, kind: Any, verb: _Verb) -> Callable[[Request], Awaitable[Response]]:
        """A handler of a call that is answered at once.

        Args:
            kind: of the request; None: its path, query and JSON body as one dict.
        """

        async def handle(request: Request) -> Response:
            owner, asked = self._owner(request), {**request.query_params, **request.path_params}
            asked["base_url"] = str(request.base_url).rstrip("/")
            if request.method in ("POST", "PUT"):
                body = await self._body(request)
                given = wire.read_json(kind or dict, body)
                asked = {**given, **asked} if kind is None else given
            found = await _run(verb, asked, owner)
            return Response(status_code=204) if found is None else JSONResponse(found)

        return handle

    def call(self, kind: str) -> Callable[[Request], Awaitable[Response]]:
        """A handler of a call that is answered with a promise."""
        service = self._service

        async def handle(request: Request) -> Response:
            owner, body = self._owner(request), await self._body(request)
            if kind == "asample":
                return JSONResponse(await _run(service.sample, body, owner))
            if kind == "load_weights":
                asked = wire.read_json(types.LoadWeightsRequest, body)
                if asked.session_id is not None:
                    return JSONResponse(await _run(service.create_model, asked, owner))
            return JSONResponse(await _run(service.models.call, kind, body, owner))

        return handle

    async def retrieve(self, request: Request) -> Response:
        owner, kind = self._owner(request), types.FutureRetrieveRequest
        id = wire.read_json(kind, await self._body(request)).request_id
        future = asyncio.wrap_future(self._service.promise(id, owner))
        try:
            found = await asyncio.wait_for(asyncio.shield(future), _POLL_SECONDS)
        except TimeoutError:
            fields = {"type": "try_again", "request_id": id, "queue_state": "active"}
            return JSONResponse(fields, 408)
        self._service.fetched(id)
        return Response(found.body, media_type=_KINDS[found.proto])

    async def retrieve_many(self, request: Request) -> Response:
        """Waits until a sample of a session is done."""
        owner, kind = self._owner(request), types.FuturesRetrieveRequest
        asked, service = wire.read_json(kind, await self._body(request)), self._service
        target, until = asked.target, time.monotonic() + min(asked.timeout or 0, _POLL_SECONDS)
        which = target.sampling_session_id, target.cloned_sampler_id, owner
        while not (done := service.finished(*which)) and time.monotonic() < until:
            await asyncio.sleep(0.02)
        return JSONResponse({"completions": done, "cursor": asked.prev_cursor + 1})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"}, 200 if self._service.alive else 503)

    def urls(self, asked: Any, owner: str) -> dict[str, Any]:
        """Addresses from which the files of external weights can be fetched without a key."""
        saved, _ = self._service.checkpoints.saved(asked, owner)
        if saved.kind != "external_weights":
            raise TinkerError(400, f"{saved.path}: expected what save_weights_external made")
        until = int(time.time()) + _URL_SECONDS
        names = [x.name for x in self._service.store.place(saved).glob("adapter*")]
        signed = [f"{x}?until={until}&signature={self._signed(saved, x, until)}" for x in names]
        run = f"{asked['base_url']}/api/v1/training_runs/{saved.model}"
        files = f"{run}/checkpoints/{saved.kind}/{saved.name}/files"
        urls = {name: f"{files}/{one}" for name, one in zip(names, signed, strict=True)}
        return {"urls": urls, "expires": stamp(until)}

    def _signed(self, saved: Saved, file: str, until: int) -> str:
        text = f"{saved.path}/{file} {until}".encode()
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()

    async def file(self, request: Request) -> Response:
        """Sends a file of external weights to whoever has its URL."""
        asked = {**request.query_params, **request.path_params}
        saved = Saved(asked["run"], asked["kind"], asked["name"])
        until = int(asked["until"]) if asked.get("until", "").isdecimal() else 0
        signature = self._signed(saved, asked["file"], until)
        if until < time.time() or not hmac.compare_digest(signature, asked.get("signature", "")):
            raise TinkerError(403, "this URL has expired, or was never given")
        return FileResponse(self._service.store.place(saved) / asked["file"])


async def _run(verb: Callable[..., Any], *args: Any) -> Any:
    try:
        return await run_in_threadpool(verb, *args)
    except BadInput as error:
        raise TinkerError(400, str(error)) from None


def _unpacked(body: bytes, most: int) -> bytes:
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body)) as stream:
            found = stream.read(most + 1)
    except (zstandard.ZstdError, MemoryError) as error:
        raise TinkerError(422, f"expected a body compressed with zstd: {error}"[:200]) from None
    if len(found) > most:
        raise TinkerError(413, f"expected at most {most} bytes")
    return found
