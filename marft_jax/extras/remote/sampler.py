"""The sampler ``http``: servers of vLLM or SGLang that sample with our adapters, provably."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import logging
import queue
import weakref
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Annotated, Any, NamedTuple, TypeVar

import jax
import numpy as np
from pydantic import Field

from marft_jax.background import Background
from marft_jax.errors import BadInput, RunFailed
from marft_jax.extras.remote import proof
from marft_jax.extras.remote.dialects import Ask
from marft_jax.extras.remote.folders import Folders
from marft_jax.extras.remote.measuring import measure
from marft_jax.extras.remote.server import NoAnswer, Server
from marft_jax.sampling import Capabilities, Completion, Request, Sampler
from marft_jax.sampling.protocol import AdaptersOfBases
from marft_jax.sampling.settings import Matrices, SamplerSetup
from marft_jax.settings.config import RolloutSettings
from marft_jax.settings.setting import Count, PathText

LOGGER = logging.getLogger("marft_jax")

_T = TypeVar("_T")
_WAITS = (0.5, 1.0, 2.0, 4.0)  # seconds before a request is asked again
_LOOK_SECONDS = 0.1  # that ``step`` waits for an answer, so that a stop is seen
_PROVEN = 512  # tokens of an agent on a server that other versions score
_KEPT = 10_000  # actions of an agent on a server, where nobody settles them: in serving
_FEW = 8  # requests more than another server's, with which a server loses its prefixes


@dataclasses.dataclass(frozen=True)
class HttpSettings(RolloutSettings):
    """Settings of playing with servers of vLLM or SGLang."""

    urls: tuple[str, ...] = ()
    """Addresses of the servers, as http://host:8000. If they ask for a key, it is read from the
    variable SAMPLER_API_KEY."""
    sampler_folder: PathText | None = None
    """Folder in which the servers find adapters; HERE=THERE where they see it as THERE; none:
    `adapters` in the run directory."""
    at_once: Count = 64
    """Requests that a server has at the same time."""
    answer_seconds: Annotated[float, Field(ge=1)] = 600.0
    """Time limit for an answer of a server, in seconds. Then the request is asked again."""


class _Given(NamedTuple):
    """Adapters that the servers were given.

    Attributes:
        stacks: on the host.
        places: name and folder of each, by base and number.
    """

    version: str
    stacks: Mapping[str, Matrices]
    places: Mapping[tuple[str, int], tuple[str, str]]


_Pair = tuple[Request, Completion]
_Sampled = tuple[Request, Completion, Server | None]


class HttpSampler(Sampler):
    """Samples on servers; see ``README.md``.

    Raises:
        BadInput: a server cannot do what is needed.
    """

    Settings = HttpSettings

    def __init__(self, setup: SamplerSetup) -> None:
        settings = setup.settings
        assert isinstance(settings, HttpSettings)
        if not settings.urls:
            raise BadInput("--rollout.urls: expected addresses of servers, got none")
        self._bases, self._seed = setup.bases, setup.seed
        self._background = Background("requests")
        weakref.finalize(self, self._background.close)
        self._folders = Folders(settings.sampler_folder, setup.folder, setup.process)
        self._room = asyncio.Semaphore(settings.at_once * len(settings.urls))
        self._given, self._before = _Given("", {}, {}), dict[str, Matrices]()
        self._left, self._tickets = dict[int, Future[_Sampled]](), itertools.count()
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._sampled: dict[tuple[str, int, Server], list[_Pair]] = defaultdict(list)
        self._stats: dict[str, float] = defaultdict(float)
        self.servers, self._able = self._background.run(self._open(settings))

    async def _open(self, settings: HttpSettings) -> tuple[list[Server], Capabilities]:
        servers = [Server(url, settings.answer_seconds) for url in settings.urls]
        for server in servers:
            for name in filter(self._folders.is_of_run, await server.connect()):
                await server.unload(name)
        kinds = [await measure(server, self._bases, self._folders) for server in servers]
        if lacks := self._bases.keys() - {server.base for server in servers}:
            source = self._bases[min(lacks)].source
            raise BadInput(f"--rollout.urls: expected a server of {source} too, got none")
        by_length = sorted(servers, key=lambda server: -server.context)
        contexts = {s.base: s.context for s in by_length if s.context}
        any_temperature, before_filters = map(all, zip(*kinds, strict=True))
        return servers, Capabilities(
            contexts, settings.at_once * len(servers), repeats=False, masks_choices=False,
            policy_logprobs=before_filters, any_temperature=any_temperature, streams=False,
        )  # fmt: skip

    @property
    def capabilities(self) -> Capabilities:
        return self._able

    @property
    def busy(self) -> bool:
        return bool(self._left)

    def load(self, adapters: AdaptersOfBases, version: str) -> None:
        """Writes the adapters, and loads them on every server.

        Raises:
            RunFailed: no server of a base has them.
        """
        self._forget()
        stacks: dict[str, Matrices] = jax.tree.map(np.asarray, dict(adapters))
        places = dict[tuple[str, int], tuple[str, str]]()
        for base, stack in stacks.items():
            spellings = {server.spelling for server in self.servers if server.base == base}
            for n, agent in enumerate(self._bases[base].adapters):
                adapter = {name: {k: x[n] for k, x in pair.items()} for name, pair in stack.items()}
                label = f"{agent}-{version}"
                places[base, n] = self._folders.write(label, self._bases[base], adapter, spellings)
        if version != self._given.version:
            self._before = dict(self._given.stacks or stacks)
        self._given = _Given(version, stacks, places)
        counts = dict.fromkeys(("sampler/unproven", "sampler/retried", "sampler/failed"), 0.0)
        precision = max(server.precision for server in self.servers)
        self._stats = defaultdict(float, {**counts, "sampler/precision": precision})
        why = "; ".join(filter(None, self._background.run(_all(map(self._load_on, self.servers)))))
        if self._bases.keys() - {server.base for server in self.servers if not server.down}:
            raise RunFailed(f"no server has loaded this step's adapters: {why}")

    async def _load_on(self, server: Server) -> str:
        """Loads the adapters on a server, which else is left alone; returns why it has not."""
        places = [place for (base, _), place in self._given.places.items() if base == server.base]
        why = next(filter(None, [await server.load(*place) for place in places]), "")
        server.down, server.loads = bool(why), server.loads + 1
        if why:
            LOGGER.warning("%s does not load adapters, and is left alone: %s", server.url, why)
        return why and f"{server.url}: {why}"

    def submit(self, request: Request) -> int:
        ticket = next(self._tickets)
        future = self._background.start(self._answer(request))
        self._left[ticket] = future
        future.add_done_callback(lambda _: self._done.put(ticket))
        return ticket

    def cancel(self, ticket: int) -> None:
        if (future := self._left.pop(ticket, None)) is not None:
            future.cancel()

    def step(self) -> Sequence[tuple[int, Completion]]:
        """Waits a moment for an answer; returns those that are there."""
        answered = list[tuple[int, Completion]]()
        while self._left:
            try:
                ticket = self._done.get(block=not answered, timeout=_LOOK_SECONDS)
            except queue.Empty:
                break
            if (future := self._left.pop(ticket, None)) is not None:
                request, completion, server = future.result()
                if server is not None:
                    sampled = self._sampled[request.base, request.owner, server]
                    sampled.append((request, completion))
                    del sampled[:-_KEPT]
                answered.append((ticket, completion))
        return answered

    async def _answer(self, request: Request) -> _Sampled:
        """Has a request answered: by another server, or later, where one is gone or busy."""
        base, of_agent = self._bases[request.base], (request.base, request.owner)
        name, _ = self._given.places.get(of_agent, ("", ""))
        digest = hashlib.sha256(repr((self._seed, request.key)).encode()).digest()
        wanted = request.prompt.tolist(), request.sampling, int.from_bytes(digest[:6], "big")
        why, again, server = "", set[Server](), None
        async with self._room:
            for wait_seconds in (*_WAITS, None):
                server = self._choose(request, server)
                loads = server.loads
                ask = Ask(name or server.model, bool(name), *wanted, base.eos_ids)
                try:
                    completion = await server.ask(ask, base)
                    return request, completion._replace(version=self._given.version), server
                except NoAnswer as error:
                    why = f"{server.url}: {error}"
                    server.down |= error.kind == "gone"
                    if error.kind == "wrong" or wait_seconds is None or server in again:
                        break
                    if error.kind == "unknown":  # it was started anew
                        again.add(server)
                        async with server.lock:
                            if server.loads == loads:  # else another request has had it loaded
                                await self._load_on(server)
                        wait_seconds = 0.0
                self._stats["sampler/retried"] += 1
                await asyncio.sleep(wait_seconds)
        self._stats["sampler/failed"] += 1
        none = np.zeros(0, np.int32), np.zeros(0, np.float32)
        why = f"{self._agent(*of_agent)}: {why}"
        return request, Completion(*none, "cancelled", why=why), None

    def _choose(self, request: Request, last: Server | None) -> Server:
        """Chooses the server that has the prefixes of agent and task, unless it is much busier
        than another one, or was the ``last`` that was asked."""
        of_base = [server for server in self.servers if server.base == request.base]
        there = [server for server in of_base if not server.down] or of_base
        there = [server for server in there if server is not last] or there
        stream, _, task, *_ = request.key
        usual = there[hash((request.owner, int(stream), task)) % len(there)]
        least = min(there, key=lambda server: server.busy)
        return usual if usual.busy <= least.busy + _FEW else least

    def verify_adapters(self) -> None:
        """Proves which adapters sampled, see ``proof``."""
        sampled, self._sampled = self._sampled, defaultdict(list)
        faults = list[str]()
        for (base, owner, server), actions in sampled.items():
            verdict, agent = self._judge(base, owner, server, actions), self._agent(base, owner)
            name = f"sampler/gap/{agent}"
            self._stats[name] = max(self._stats[name], verdict.gap)
            self._stats["sampler/unproven"] += verdict.unproven
            if verdict.nearer or not verdict.misfit <= 1:
                near = f"are nearest to those of {verdict.nearer}" if verdict.nearer else "fit none"
                faults.append(
                    f"{server.url}: {agent}: expected log-probs of version {self._given.version}, "
                    f"got some that are {verdict.gap:.2g} from them, {verdict.misfit:.2g} times "
                    f"the most that rounding explains, and that {near}"
                )
        if faults:
            raise RunFailed(f"adapters did not arrive: {'; '.join(faults)}")

    def _judge(
        self, base: str, owner: int, server: Server, actions: Sequence[_Pair]
    ) -> proof.Verdict:
        """Scores actions under the claimed version, and some under others."""
        now, names = self._given.stacks[base], self._bases[base].adapters
        others = {f"agent {name}": n for n, name in enumerate(names) if n != owner}
        if owner >= 0:
            others |= {"the version before": len(names) + owner, "the base": -1}
        lengths = np.cumsum([len(completion.ids) for _, completion in actions])
        few = actions[: 1 + int((lengths < _PROVEN).sum())]
        sides = [(owner, actions), *((n, few) for n in others.values())]
        data = [
            (r.prompt, c.ids, n, r.sampling.temperature) for n, pairs in sides for r, c in pairs
        ]
        scores = iter(self._bases[base].tools.score([now, self._before.get(base, now)], data))
        claimed, *rest = [[next(scores) for _ in pairs] for _, pairs in sides]
        sent = [completion.logprobs for _, completion in actions]
        scored = dict(zip(others, rest, strict=True))
        coldest = min(request.sampling.temperature or 1.0 for request, _ in actions)
        return proof.judge(sent, claimed, scored, server.precision / min(coldest, 1.0))

    def _agent(self, base: str, owner: int) -> str:
        return self._bases[base].adapters[owner] if owner >= 0 else "base"

    def release(self) -> None:
        for ticket in [*self._left]:
            self.cancel(ticket)
        self._forget()

    def _forget(self) -> None:
        """Has the servers forget the adapters, and deletes these."""
        self._sampled.clear()
        places, self._given = self._given.places, self._given._replace(places={})
        for (base, _), (name, _) in places.items():
            there = [x for x in self.servers if x.base == base and not x.down]
            self._background.run(_all(server.unload(name) for server in there))
            self._folders.delete(name)

    def stats(self) -> Mapping[str, float]:
        """Returns the largest gap of each agent, and numbers of what could not be proven, of
        requests that were asked again, and of those that were given up."""
        return dict(self._stats)


async def _all(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    return await asyncio.gather(*work)
