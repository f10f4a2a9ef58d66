"""Continuous batching with an adapter per row.

A fixed number of slots decode together. The host hands in requests from any agent, turn or episode;
waiting ones are prefilled into free slots, and which enters which follows from the order of all
requests and never from the clock. Between two looks of the host the device decodes up to ``chunk``
tokens per row in one ``while_loop``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from marft_jax import random_keys
from marft_jax.engine.compiled import Prompts, Shape, empty_prompts, programs
from marft_jax.engine.kv_cache import Slots
from marft_jax.engine.prefix_cache import NOWHERE, Prefixes, Start, worthwhile
from marft_jax.engine.stops import stopped_at
from marft_jax.models import decoder, lora
from marft_jax.parallel import compilation
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.types import Sampling


class Request(NamedTuple):
    """An action to sample.

    Attributes:
        prompt: ids, at least one.
        owner: the adapter, or -1 for the bare base.
        sampling: how to draw them.
        key: numbers of their random stream, as of ``random_keys.ActionKey``.
        choices: the actions that may be drawn, ids with their end; () for any.
    """

    prompt: np.ndarray
    owner: int
    sampling: Sampling
    key: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...] = ()


class Completion(NamedTuple):
    """Sampled tokens with their behaviour log-probs.

    Attributes:
        finished: the turn was ended, by its end-of-turn token or a stop text.
        kept: the probability that choices, top-k, top-p and min-p left to sample from, mean of its
            tokens.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    finished: bool
    kept: float = 1.0


class _Kind(NamedTuple):
    """A shape of ``prefill``: the tokens of each row that it computes, and reads (0: as many)."""

    width: int
    read: int


class _Waiting(NamedTuple):
    ticket: int
    request: Request


class Engine:
    """Samples for requests; ``submit`` them, then ``step`` until all are answered.

    Args:
        config, graphdef, base: the decoder's shape, and its split, placed on ``mesh``.
        mesh: rows are spread over its data and fsdp axes.
        shape: slots are rounded up to a multiple of those axes.
        eos_ids: tokens that end a turn.
        seed: of the run's random streams.
        alpha: LoRA scaling (alpha / rank).
        decode: ids to text, in which stop texts are looked for.
        reuse: copy the prefix of a prompt from a slot that holds it. It needs the rows of the cache
            on one device.

    Attributes:
        reused: prompt tokens copied since ``load``.
        partial: ids so far of what the last step left unfinished, by ticket.
    """

    def __init__(
        self,
        config: decoder.DecoderConfig,
        graphdef: Any,
        base: decoder.Base,
        mesh: Mesh,
        shape: Shape,
        *,
        eos_ids: Sequence[int],
        seed: int,
        alpha: float,
        decode: Callable[[list[int]], str],
        reuse: bool = True,
    ):
        self.shape = shape.on(mesh)
        self._mesh, self._base, self._eos_ids = mesh, base, tuple(eos_ids)
        dtype = jax.tree.leaves(base)[0].dtype
        run = programs(config, graphdef, mesh, self.shape, dtype, eos_ids=eos_ids, alpha=alpha)
        self._fuse, self._empty = run.fuse, run.empty
        self._prefill, self._decode = run.prefill, run.decode
        self._seed, self._decode_text = seed, decode
        self._slots: Slots | None = None
        self._adapters: lora.Adapters | None = None
        self._fused: lora.FusedAdapters | None = None
        self._waiting: list[_Waiting] = []
        self._tickets: list[int | None] = [None] * self.shape.slots
        self._choices: list[tuple[tuple[int, ...], ...]] = [()] * self.shape.slots
        self._vocabulary = config.vocab_size
        self._stops: list[tuple[str, ...]] = [()] * self.shape.slots
        self._lengths = np.zeros(self.shape.slots, np.int64)
        self._next_ticket = 0
        self._seen = 0  # tickets before this one have waited for a free slot
        self._filled = [-1] * self.shape.slots  # by which ticket: the oldest is refilled first
        self._reuse = reuse and mesh_lib.row_shards(mesh) == 1
        self._prefixes = Prefixes(self.shape.slots, self.shape.context)
        self._ahead = Prefixes(self.shape.slots, self.shape.context)
        self.reused = 0
        self.partial: dict[int, np.ndarray] = {}

    def place(self, adapters: lora.Adapters) -> lora.Adapters:
        """Adapters on the engine's devices: a copy, where these are not the learner's."""
        return mesh_lib.placed(adapters, self._mesh)

    def load(self, adapters: lora.Adapters) -> None:
        """Uses these adapters from now on."""
        self._adapters = self.place(adapters)
        self._fused = self._fuse(self._adapters)
        self._slots = self._empty() if self._slots is None else self._slots
        self._prefixes.forget()
        self._filled = [-1] * self.shape.slots
        self.reused = 0

    def release(self) -> None:
        """Frees the cache, until the next ``load``: others may need its memory. What is unanswered
        is dropped."""
        self._waiting.clear()
        self._tickets = [None] * self.shape.slots
        self._slots = self._fused = None

    @property
    def adapters(self) -> lora.Adapters:
        """Adapters of the last ``load``."""
        assert self._adapters is not None
        return self._adapters

    def submit(self, request: Request) -> int:
        """Queues a request; the ticket comes back with its completion."""
        room = self.shape.context - len(request.prompt)
        assert 0 < request.sampling.max_new_tokens <= min(room, self.shape.longest)
        self._waiting.append(_Waiting(self._next_ticket, request))
        self._next_ticket += 1
        return self._next_ticket - 1

    def cancel(self, ticket: int) -> None:
        """Drops a request; the next one may have its slot."""
        self._waiting = [waiting for waiting in self._waiting if waiting.ticket != ticket]
        self._tickets = [None if own == ticket else own for own in self._tickets]

    @property
    def most_programs(self) -> int:
        """How many programs its requests can need, whatever they are."""
        return self.shape.programs(self._mesh, self._reuse)

    @property
    def busy(self) -> bool:
        """True if any request is unanswered."""
        return bool(self._waiting) or any(t is not None for t in self._tickets)

    def step(self) -> list[tuple[int, Completion]]:
        """Refills free slots, decodes a chunk, and returns what got finished, in slot order."""
        self._refill()
        in_use = [i for i, ticket in enumerate(self._tickets) if ticket is not None]
        self.partial = {}
        if not in_use:
            return []
        longest = int(self._lengths[in_use].max()) + self.shape.chunk
        allowed_SV = self._allowed(in_use)
        self._slots = self._decode(
            base=self._base,
            adapters=self._fused,
            slots=self._slots,
            stop_at=jnp.int32(len(in_use) * 3 // 4 if self._waiting else 0),
            chunk=self.shape.chunk if allowed_SV is None else 1,
            allowed_SV=allowed_SV,
            read=self.shape.read(longest),
        )
        return self._collect(in_use)

    def _allowed(self, in_use: Sequence[int]) -> jax.Array | None:
        """Tokens that may come next in each slot; None where all may in all of them."""
        if not any(self._choices[slot] for slot in in_use):
            return None
        s = self._slots
        assert s is not None
        count, ids = map(np.asarray, jax.device_get((s.count_S, s.ids_SA)))
        begun = [ids[slot, : count[slot]].tolist() for slot in range(self.shape.slots)]
        return self._mask(self._choices, begun)

    def _mask(
        self, choices: Sequence[tuple[tuple[int, ...], ...]], begun: Sequence[list[int]]
    ) -> jax.Array:
        """Tokens with which rows that have begun so may go on, to one of their choices."""
        mask = np.ones((len(choices), self._vocabulary), bool)
        for row, (own, ids) in enumerate(zip(choices, begun, strict=True)):
            n = len(ids)
            left = {c[n] for c in own if len(c) > n and list(c[:n]) == ids}
            if left:  # none once it is finished
                mask[row] = np.isin(np.arange(self._vocabulary), list(left))
        return jax.device_put(mask, mesh_lib.rows(self._mesh))

    def _refill(self) -> None:
        """Prefills waiting requests, one for each free slot.

        The oldest comes first, then new ones most of whose prompt still lies in a slot, as when an
        episode goes on, and the others as they came. Of those that have a beginning in common that
        lies nowhere, one goes ahead, and the others copy it.
        """
        free = self._tickets.count(None)
        if not free or not self._waiting:
            return
        oldest = min(self._waiting)
        self._waiting.sort(key=lambda w: (w is not oldest, not self._is_warm(w)))
        self._seen = self._next_ticket
        queue, self._waiting = self._waiting[:free], self._waiting[free:]
        soon = [*queue, *self._waiting[: self.shape.slots]]
        starts = {waiting.ticket: self._start(waiting.request) for waiting in soon}
        wanted = {ticket: start.slot for ticket, start in starts.items() if start.tokens}
        while queue:
            ahead, queue = self._split(queue)
            while ahead:
                ahead = self._prefill_some(ahead, wanted)

    def _is_warm(self, waiting: _Waiting) -> bool:
        is_new = waiting.ticket >= self._seen
        return is_new and 2 * self._start(waiting.request).tokens > len(waiting.request.prompt)

    def _split(self, queue: Sequence[_Waiting]) -> tuple[list[_Waiting], list[_Waiting]]:
        """Splits requests into those that go ahead, and those that save by waiting for them."""
        if not self._reuse:
            return [*queue], []
        ahead, behind = list[_Waiting](), list[_Waiting]()
        self._ahead.forget()
        for waiting in queue:
            owner, prompt = waiting.request.owner, waiting.request.prompt
            saved = self._ahead.find(owner, prompt).tokens - self._start(waiting.request).tokens
            if worthwhile(saved, prompt):
                behind.append(waiting)
            else:
                self._ahead.put(len(ahead), owner, prompt)
                ahead.append(waiting)
        return ahead, behind

    def _prefill_some(self, queue: Sequence[_Waiting], wanted: dict[int, int]) -> list[_Waiting]:
        """Prefills the first of these requests, with others of its shape; returns what is left.

        Groups have one of three sizes, and prompts one of two lengths per doubling: prefill is
        compiled for few shapes. The slots from which requests will copy, ``wanted`` by ticket, are
        overwritten last, the one that is needed first the very last.
        """
        kind = self._kind(queue[0].request)
        sizes = self.shape.prefill_rows(kind.width, self._mesh)
        group = list[_Waiting]()
        for waiting in queue:
            if len(group) < sizes[-1] and self._kind(waiting.request) == kind:
                group.append(waiting)
        rows = _rows(sizes, len(group), compilation.prefill_tokens(self._mesh) // kind.width)
        group = group[:rows]
        requests = [waiting.request for waiting in group]
        starts = [self._start(request) for request in requests]
        for waiting in group:
            wanted.pop(waiting.ticket, None)
        use = {slot: n for n, slot in reversed([*enumerate(wanted.values())])}
        free = [slot for slot, ticket in enumerate(self._tickets) if ticket is None]
        free.sort(key=lambda slot: (-use.get(slot, len(wanted)), self._filled[slot]))
        slots = _places(free, starts)
        for slot, (ticket, request), start in zip(slots, group, starts, strict=True):
            self._tickets[slot], self._lengths[slot] = ticket, len(request.prompt)
            self._choices[slot] = request.choices
            self._stops[slot] = request.sampling.stop
            self._prefixes.put(slot, request.owner, request.prompt)
            self._filled[slot] = ticket
            self.reused += start.tokens
        prompts = empty_prompts(rows, kind.width)
        _fill(prompts, requests, starts, slots, self._seed)
        choices = [request.choices for request in requests]
        choices += choices[-1:] * (rows - len(group))
        self._slots = self._prefill(
            base=self._base,
            adapters=self._fused,
            slots=self._slots,
            prompts=jax.device_put(prompts, mesh_lib.rows(self._mesh)),
            read=kind.read,
            allowed_BV=self._mask(choices, [[]] * rows) if any(choices) else None,
        )
        begun = {waiting.ticket for waiting in group}
        return [waiting for waiting in queue if waiting.ticket not in begun]

    def _start(self, request: Request) -> Start:
        reuse = self._reuse
        return self._prefixes.find(request.owner, request.prompt) if reuse else NOWHERE

    def _kind(self, request: Request) -> _Kind:
        length, start = len(request.prompt), self._start(request)
        if not start.tokens:
            return _Kind(self.shape.width(length), 0)
        return _Kind(self.shape.rest(length - start.tokens), self.shape.prefixed(length))

    def _collect(self, in_use: Sequence[int]) -> list[tuple[int, Completion]]:
        s = self._slots
        assert s is not None
        fetch = (s.active_S, s.count_S, s.length_S, s.ids_SA, s.logprobs_SA, s.kept_S)
        active, count, length, ids, logprobs, kept = map(np.asarray, jax.device_get(fetch))
        self._lengths = length.astype(np.int64)
        done: list[tuple[int, Completion]] = []
        for slot in in_use:
            ticket, n = self._tickets[slot], int(count[slot])
            if ticket is None:
                continue
            stops, end = self._stops[slot], None
            if stops:
                end = stopped_at(ids[slot, :n].tolist(), stops, self._decode_text)
            if end is None and active[slot]:
                self.partial[ticket] = ids[slot, :n].copy()
            else:
                share = float(kept[slot]) / n
                finished = end is not None or int(ids[slot, n - 1]) in self._eos_ids
                n = end or n
                own = ids[slot, :n].copy(), logprobs[slot, :n].copy()
                answer = Completion(*own, finished, share)
                done.append((ticket, answer))
                self._tickets[slot] = None
                self._prefixes.extend(slot, answer.ids[:-1])  # the last one was never read
        return done


def _rows(sizes: Sequence[int], requests: int, most: float) -> int:
    """Size of the groups in which so many requests are prefilled soonest.

    A call takes as long as its rows, padding too, and a sixteenth of the ``most`` that it may have:
    it reads the weights, however few there are.
    """
    cost = {rows: -(-requests // rows) * (rows + most / 16) for rows in sizes}
    return min(sizes, key=lambda rows: (cost[rows], -rows))


def _places(free: Sequence[int], starts: Sequence[Start]) -> list[int]:
    """Free slots for a group: each row where its cached prefix lies, if that slot is free."""
    places: list[int | None] = []
    for start in starts:
        stays = start.tokens and start.slot in free and start.slot not in places
        places.append(start.slot if stays else None)
    others = iter([slot for slot in free if slot not in places])
    return [next(others) if place is None else place for place in places]


def _fill(
    prompts: Prompts,
    group: Sequence[Request],
    starts: Sequence[Start],
    slots: Sequence[int],
    seed: int,
) -> None:
    """Writes requests into host arrays; padding repeats the last of them."""
    tokens_BT, *columns = jax.tree.leaves(prompts)
    for row, (request, start, slot) in enumerate(zip(group, starts, slots, strict=True)):
        new, s = request.prompt[start.tokens :], request.sampling
        tokens_BT[row, : len(new)] = new
        key_2 = random_keys.key_2(seed, *random_keys.numbers_of(request.key))
        values = (len(request.prompt), request.owner, key_2, slot, start.tokens, start.slot)
        values += (s.temperature, s.top_p, s.top_k, s.min_p, s.max_new_tokens)
        for column, value in zip(columns, values, strict=True):
            column[row] = value
    for column in (tokens_BT, *columns):
        if column is not prompts.slots_B:
            column[len(group) :] = column[len(group) - 1]
