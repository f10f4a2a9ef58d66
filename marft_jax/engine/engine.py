"""Continuous batching with an adapter per row.

A fixed number of slots decode together. The host hands in requests from any agent, turn or episode;
waiting ones are prefilled into free slots in the order they came, so that which act enters which
slot follows from the order of requests and never from the clock. Between two looks of the host the
device decodes up to ``chunk`` tokens per row in one ``while_loop``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from marft_jax import random_keys
from marft_jax.engine.compiled import Shape, programs
from marft_jax.engine.kv_cache import Settings, Slots
from marft_jax.engine.prefix_cache import NOWHERE, Prefixes, Start, common, worthwhile
from marft_jax.models import decoder, lora
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.parallel.ladder import bucket
from marft_jax.types import Sampling


class Request(NamedTuple):
    """Tokens wanted.

    Attributes:
        prompt: ids, at least one.
        owner: the adapter, or -1 for the bare base.
        sampling: how to draw them.
        key: numbers of their random stream, as of ``random_keys.ActionKey``.
    """

    prompt: np.ndarray
    owner: int
    sampling: Sampling
    key: tuple[int, ...]


class Completion(NamedTuple):
    """Tokens sampled, with their behaviour log-probs; ``finished`` if the turn was ended."""

    ids: np.ndarray
    logprobs: np.ndarray
    finished: bool


class _Kind(NamedTuple):
    """Programs of ``prefill``: how many tokens of each row they compute, and read (0: as many)."""

    width: int
    read: int


class Engine:
    """Samples for requests; ``submit`` them, then ``step`` until all are answered.

    Args:
        config, graphdef, base: the decoder's shape, and its split, placed on ``mesh``.
        mesh: rows are spread over its data and fsdp axes.
        shape: slots are rounded up to a multiple of those axes.
        eos_ids: tokens that end a turn.
        seed: of the run's random streams.
        alpha: LoRA scaling (alpha / rank).
        reuse: take over the beginning of a prompt from a slot that holds it. Rows of the cache that
            lie on several devices are never taken over.

    Attributes:
        reused: prompt tokens taken over since ``load``.
    """

    def __init__(
        self,
        config: decoder.DecoderConfig,
        graphdef,
        base,
        mesh: Mesh,
        shape: Shape,
        *,
        eos_ids: Sequence[int],
        seed: int,
        alpha: float,
        reuse: bool = True,
    ):
        self.shape = shape.on(mesh)
        self._mesh, self._base, self._eos_ids = mesh, base, tuple(eos_ids)
        dtype = jax.tree.leaves(base)[0].dtype
        run = programs(config, graphdef, mesh, self.shape, dtype, eos_ids=eos_ids, alpha=alpha)
        self._fuse, self._prefill, self._decode = run.fuse, run.prefill, run.decode
        self._seed = seed
        self._empty = run.empty
        self._slots: Slots | None = None
        self._adapters: lora.Adapters | None = None
        self._fused: lora.FusedAdapters | None = None
        self._reuse = reuse and mesh_lib.row_shards(mesh) == 1
        self._waiting: deque[tuple[int, Request]] = deque()
        self._tickets: list[int | None] = [None] * self.shape.slots
        self._lengths = np.zeros(self.shape.slots, np.int64)
        self._next_ticket = 0
        self._prefixes = Prefixes(self.shape.slots)
        self.reused = 0

    def load(self, adapters: lora.Adapters) -> None:
        """Uses these adapters from now on."""
        self._adapters = mesh_lib.localized(adapters, self._mesh)
        self._fused = self._fuse(self._adapters)
        if self._slots is None:
            self._slots = self._empty()
        self._prefixes.forget()
        self.reused = 0

    def rest(self) -> None:
        """Gives its memory back, until the next ``load``: others may need it."""
        assert not self.busy
        self._slots = self._fused = None

    @property
    def adapters(self) -> lora.Adapters:
        """Those in use, of ``load``."""
        assert self._adapters is not None
        return self._adapters

    def submit(self, request: Request) -> int:
        """Queues a request; the ticket comes back with its completion."""
        room = self.shape.context - len(request.prompt)
        assert 0 < request.sampling.max_new_tokens <= min(room, self.shape.longest)
        ticket = self._next_ticket
        self._next_ticket += 1
        self._waiting.append((ticket, request))
        return ticket

    @property
    def busy(self) -> bool:
        """Whether any request is unanswered."""
        return bool(self._waiting) or any(t is not None for t in self._tickets)

    def step(self) -> list[tuple[int, Completion]]:
        """Refills free slots, decodes a chunk, and returns what got finished, in slot order."""
        while self._waiting and None in self._tickets:
            self._refill()
        if all(ticket is None for ticket in self._tickets):
            return []
        in_use = [i for i, ticket in enumerate(self._tickets) if ticket is not None]
        longest = int(self._lengths[in_use].max()) + self.shape.chunk
        self._slots = self._decode(
            base=self._base,
            adapters=self._fused,
            slots=self._slots,
            leave_at=jnp.int32(len(in_use) * 3 // 4 if self._waiting else 0),
            chunk=self.shape.chunk,
            read=min(bucket(longest, least=64, rungs=2), self.shape.context),
        )
        return self._collect(in_use)

    def _refill(self) -> None:
        """Prefills one group of waiting requests of about the same length.

        Groups have one of three sizes, and prompts one of two lengths per doubling: prefill is
        compiled for few shapes. What would fill no more than half of a group makes smaller ones.
        """
        free = [i for i, ticket in enumerate(self._tickets) if ticket is None]
        kind, _ = self._begin(self._waiting[0][1])
        sizes = self.shape.prefill_rows(kind.width, self._mesh)
        group = self._take(kind, min(len(free), sizes[-1]))
        rows = _rows(sizes, len(group))
        group, later = group[:rows], group[rows:]
        self._waiting.extendleft((ticket, request) for ticket, request, _ in reversed(later))
        slots = self._places(free, [start for *_, start in group])
        for slot, (ticket, request, start) in zip(slots, group, strict=True):
            self._tickets[slot], self._lengths[slot] = ticket, len(request.prompt)
            self._prefixes.put(slot, request.owner, request.prompt)
            self.reused += start.tokens
        begun = [(request, start) for _, request, start in group]
        fields = _request_arrays(begun, rows, kind.width, self._seed)
        fields["slots_B"] = np.full(rows, self.shape.slots, np.int32)
        fields["slots_B"][: len(slots)] = slots
        self._slots = self._prefill(
            base=self._base,
            adapters=self._fused,
            slots=self._slots,
            read=kind.read,
            **jax.device_put(fields, mesh_lib.rows(self._mesh)),
        )

    def _take(self, kind: _Kind, most: int) -> list[tuple[int, Request, Start]]:
        """The first waiting requests of that kind, each with where its beginning lies.

        One that begins like another of the group stays: it can take over that one's beginning next.
        """
        taken: list[tuple[int, Request, Start]] = []
        left: deque[tuple[int, Request]] = deque()
        while self._waiting and len(taken) < most:
            ticket, request = self._waiting.popleft()
            own, start = self._begin(request)
            if own == kind and not (
                self._reuse and kind.read == 0 and any(_alike(request, r) for _, r, _ in taken)
            ):
                taken.append((ticket, request, start))
            else:
                left.append((ticket, request))
        self._waiting.extendleft(reversed(left))
        return taken

    @staticmethod
    def _places(free: Sequence[int], starts: Sequence[Start]) -> list[int]:
        """Free slots for a group: each row where its beginning lies already, if it can be there."""
        places: list[int | None] = []
        for start in starts:
            stays = start.tokens and start.slot in free and start.slot not in places
            places.append(start.slot if stays else None)
        others = iter([slot for slot in free if slot not in places])
        return [next(others) if place is None else place for place in places]

    def _begin(self, request: Request) -> tuple[_Kind, Start]:
        """Which program prefills it, by the lengths of the rest and of the whole, and where its
        beginning lies."""
        find, length = self._prefixes.find, len(request.prompt)
        start = find(request.owner, request.prompt) if self._reuse else NOWHERE
        if not start.tokens:
            return _Kind(self.shape.width(length), 0), start
        whole, rest = (self.shape.width(n, rungs=1) for n in (length, length - start.tokens))
        return _Kind(rest, whole), start

    def _collect(self, in_use: list[int]) -> list[tuple[int, Completion]]:
        s = self._slots
        assert s is not None
        fetch = (s.active_S, s.count_S, s.length_S, s.ids_SA, s.logprobs_SA)
        active, count, length, ids, logprobs = (np.asarray(x) for x in jax.device_get(fetch))
        self._lengths = length.astype(np.int64)
        done = []
        for slot in in_use:
            ticket = self._tickets[slot]
            if ticket is not None and not active[slot]:
                n = int(count[slot])
                finished = int(ids[slot, n - 1]) in self._eos_ids
                answer = Completion(ids[slot, :n].copy(), logprobs[slot, :n].copy(), finished)
                done.append((ticket, answer))
                self._tickets[slot] = None
                self._prefixes.extend(slot, answer.ids[:-1])  # the last one was never read
        return done


def _rows(sizes: Sequence[int], requests: int) -> int:
    """The size of a group: the next that holds them, unless half of that would be padding."""
    fits = next(i for i, size in enumerate(sizes) if size >= requests)
    return sizes[fits - 1] if fits and 2 * requests <= sizes[fits] else sizes[fits]


def _alike(a: Request, b: Request) -> bool:
    """Whether one could take over the other's beginning."""
    return a.owner == b.owner and worthwhile(common(b.prompt, a.prompt), a.prompt)


def _request_arrays(
    group: Sequence[tuple[Request, Start]], rows: int, width: int, seed: int
) -> dict:
    """Requests as arrays of ``rows`` rows; the rows past the last request repeat it."""
    repeated = [*group, *[group[-1]] * (rows - len(group))]
    padded, starts = [r for r, _ in repeated], [start for _, start in repeated]
    tokens_BT = np.zeros((rows, width), np.int32)
    for i, (request, start) in enumerate(repeated):
        rest = request.prompt[start.tokens :]
        tokens_BT[i, : len(rest)] = rest

    def column(values, dtype):
        return np.asarray(list(values), dtype)

    sampling = [request.sampling for request in padded]
    return dict(
        tokens_BT=tokens_BT,
        lengths_B=column((len(r.prompt) for r in padded), np.int32),
        owners_B=column((r.owner for r in padded), np.int32),
        keys_B2=np.stack([random_keys.key_2(seed, *r.key) for r in padded]),
        starts_B=column((start.tokens for start in starts), np.int32),
        sources_B=column((start.slot for start in starts), np.int32),
        settings=Settings(
            temperature=column((s.temperature for s in sampling), np.float32),
            top_p=column((s.top_p for s in sampling), np.float32),
            top_k=column((s.top_k for s in sampling), np.int32),
            min_p=column((s.min_p for s in sampling), np.float32),
            limit=column((s.max_new_tokens for s in sampling), np.int32),
        ),
    )
