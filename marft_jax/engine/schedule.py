"""Schedules requests: which are prefilled next, in which slots, and which prefixes they copy.

The schedule follows from the order of requests and of free slots, not from the clock. Where the
mesh splits the rows into shards, each shard has its own slots and copies only among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from jax.sharding import Mesh

from marft_jax.engine.compiled import Shape
from marft_jax.engine.prefix_cache import NO_PREFIX, Prefixes, Start, worthwhile
from marft_jax.parallel import compilation
from marft_jax.sampling.protocol import Request


class PrefillShape(NamedTuple):
    """Sizes of a ``prefill``.

    Attributes:
        width: tokens that it computes in each row.
        read: positions of the cache that it reads; 0 where no row has a cached prefix.
    """

    width: int
    read: int


class Entry(NamedTuple):
    """A request in a row of a group: its slot, and the cached prefix that it begins with."""

    ticket: int
    request: Request
    row: int
    slot: int
    start: Start


class Group(NamedTuple):
    """Requests that are prefilled together; rows without one are padding."""

    shape: PrefillShape
    rows: int
    entries: Sequence[Entry]


class _Waiting(NamedTuple):
    ticket: int
    request: Request
    slots: range  # slots that it may get: all, or those of its shard once it has one


class Schedule:
    """The queue of requests, and the tokens of each slot.

    Args:
        shape: sizes of the programs, with equally many slots for each shard of ``mesh``.
        reuse: copy the beginning of a prompt from a slot that holds it.
        recurrent, slack: see ``Prefixes``.

    Attributes:
        held: the tokens of which each slot holds the keys and values.
        reused: number of prompt tokens that were copied since ``forget``.
    """

    def __init__(
        self,
        shape: Shape,
        mesh: Mesh,
        reuse: bool,
        recurrent: bool = False,
        slack: int | None = None,
    ):
        self._shape, self._mesh, self._reuse = shape, mesh, reuse
        each = shape.slots_per_shard(mesh)
        self._shards = [range(first, first + each) for first in range(0, shape.slots, each)]
        self._waiting: list[_Waiting] = []
        self._next_ticket = 0
        self._seen = 0  # tickets before this one have waited for a free slot
        self.held = Prefixes(shape.slots, shape.context, recurrent, slack)
        self._ahead = Prefixes(shape.slots, shape.context, recurrent, slack)  # will hold soon
        self._starts = dict[tuple[int, range], Start]()  # found prefixes, until a slot changes
        self.forget()

    def forget(self) -> None:
        """Forgets the tokens of all slots: the adapters have changed."""
        self.held.forget()
        self._filled = [-1] * self._shape.slots  # last ticket of each; the oldest is refilled first
        self.reused = 0

    def submit(self, request: Request) -> int:
        """Queues a request; returns its ticket."""
        self._waiting.append(_Waiting(self._next_ticket, request, range(self._shape.slots)))
        self._next_ticket += 1
        return self._next_ticket - 1

    @property
    def owners(self) -> set[int]:
        """Adapters of the requests that wait."""
        return {waiting.request.owner for waiting in self._waiting}

    def cancel(self, ticket: int) -> None:
        """Drops a request that waits."""
        self._waiting = [waiting for waiting in self._waiting if waiting.ticket != ticket]

    def clear(self) -> None:
        """Drops all waiting requests."""
        self._waiting = []

    @property
    def is_waiting(self) -> bool:
        """True if a request has no slot yet."""
        return bool(self._waiting)

    def groups(self, free: Sequence[int]) -> Iterator[Group]:
        """Yields groups of waiting requests, one request for each free slot, to be prefilled one
        group after another.

        The oldest request comes first. Then come new requests most of whose prompt is still in a
        slot, as when an episode goes on; then the others in their order. Where several prompts
        begin alike and no slot holds that beginning, one request goes ahead and the others copy
        from it. Slots from which a request will copy are overwritten last.
        """
        if not free or not self._waiting:
            return
        self._starts.clear()  # rows have grown
        oldest = min(self._waiting)
        self._waiting.sort(key=lambda w: (w is not oldest, not self._is_warm(w)))
        self._seen = self._next_ticket
        left, n = set(free), len(free)
        queue, self._waiting = self._with_shards(self._waiting[:n], left), self._waiting[n:]
        soon = [*queue, *self._waiting[: self._shape.slots]]
        starts = {waiting.ticket: self._start(waiting) for waiting in soon}
        wanted = {ticket: start.slot for ticket, start in starts.items() if start.tokens}
        while queue:
            ahead, queue = self._split(queue)
            while ahead:
                group = self._group(ahead, left, wanted)
                left -= {entry.slot for entry in group.entries}
                begun = {entry.ticket for entry in group.entries}
                ahead = [waiting for waiting in ahead if waiting.ticket not in begun]
                yield group

    def _is_warm(self, waiting: _Waiting) -> bool:
        is_new = waiting.ticket >= self._seen
        return is_new and 2 * self._start(waiting).tokens > len(waiting.request.prompt)

    def _with_shards(self, queue: Sequence[_Waiting], free: set[int]) -> list[_Waiting]:
        """Gives each request a shard with a free slot: the one that holds most of its prompt, or
        will hold it when the requests before have begun; among equals, the one with the most free
        slots."""
        if len(self._shards) == 1:
            return [waiting._replace(slots=self._shards[0]) for waiting in queue]
        left = {slots: len(free.intersection(slots)) for slots in self._shards}
        placed = list[_Waiting]()
        self._ahead.forget()
        for waiting in queue:
            choices = [waiting._replace(slots=slots) for slots in self._shards if left[slots]]
            chosen = max(choices, key=lambda choice: (self._begins(choice), left[choice.slots]))
            left[chosen.slots] -= 1
            slot = chosen.slots[left[chosen.slots]]
            self._ahead.put(slot, waiting.request.owner, waiting.request.prompt)
            placed.append(chosen)
        return placed

    def _begins(self, waiting: _Waiting) -> int:
        """Number of tokens of its prompt that its shard holds, or will hold."""
        return max(self._start(waiting).tokens, self._find(self._ahead, waiting).tokens)

    def _split(self, queue: Sequence[_Waiting]) -> tuple[list[_Waiting], list[_Waiting]]:
        """Splits requests into those that go ahead, and those that can then copy from them."""
        ahead, behind = list[_Waiting](), list[_Waiting]()
        self._ahead.forget()
        left = {slots: iter(slots) for slots in self._shards}
        for waiting in queue:
            prompt = waiting.request.prompt
            saved = self._find(self._ahead, waiting).tokens - self._start(waiting).tokens
            if worthwhile(saved, prompt):
                behind.append(waiting)
            else:
                self._ahead.put(next(left[waiting.slots]), waiting.request.owner, prompt)
                ahead.append(waiting)
        return ahead, behind

    def _group(self, queue: Sequence[_Waiting], free: set[int], wanted: dict[int, int]) -> Group:
        """Groups the first of these requests with others of its shape.

        Prefill is compiled for few shapes: three sizes of groups, two lengths per doubling.

        Args:
            wanted: slots from which requests will copy, by ticket; the slot that is needed first is
                overwritten last.
        """
        shape, n = self._prefill_shape(queue[0]), len(self._shards)
        sizes = self._shape.prefill_rows(shape.width, self._mesh)
        by_shard = list[list[_Waiting]]()
        for slots in self._shards:
            alike = (w for w in queue if w.slots == slots and self._prefill_shape(w) == shape)
            by_shard.append([*islice(alike, sizes[-1] // n)])
        most = compilation.prefill_tokens(self._mesh) // shape.width
        rows = _rows(sizes, n * max(map(len, by_shard)), most)
        by_shard = [of_shard[: rows // n] for of_shard in by_shard]
        for waiting in chain(*by_shard):
            wanted.pop(waiting.ticket, None)
        use = {slot: first for first, slot in reversed([*enumerate(wanted.values())])}
        entries = list[Entry]()
        for shard, of_shard in enumerate(by_shard):
            usable = [slot for slot in self._shards[shard] if slot in free]
            usable.sort(key=lambda slot: (-use.get(slot, len(wanted)), self._filled[slot]))
            starts = [self._start(waiting) for waiting in of_shard]
            slots = _slots(usable, starts)
            numbers = range(shard * (rows // n), rows)
            for row, waiting, slot, start in zip(numbers, of_shard, slots, starts, strict=False):
                entries.append(Entry(waiting.ticket, waiting.request, row, slot, start))
        for entry in entries:
            request = entry.request
            self.held.put(entry.slot, request.owner, request.prompt, entry.start.tokens)
            self._filled[entry.slot] = entry.ticket
            self.reused += entry.start.tokens
        self._starts.clear()
        return Group(shape, rows, entries)

    def _start(self, waiting: _Waiting) -> Start:
        """Returns the cached prefix that it would begin with now."""
        key = waiting.ticket, waiting.slots
        if key not in self._starts:
            self._starts[key] = self._find(self.held, waiting)
        return self._starts[key]

    def _find(self, prefixes: Prefixes, waiting: _Waiting) -> Start:
        if not self._reuse:
            return NO_PREFIX
        request, slots = waiting.request, waiting.slots
        return prefixes.find(request.owner, request.prompt, slice(slots.start, slots.stop))

    def _prefill_shape(self, waiting: _Waiting) -> PrefillShape:
        length, start = len(waiting.request.prompt), self._start(waiting)
        if not start.tokens:
            return PrefillShape(self._shape.width(length), 0)
        return PrefillShape(self._shape.rest(length - start.tokens), self._shape.prefixed(length))


def _rows(sizes: Sequence[int], requests: int, most: float) -> int:
    """Returns the size of groups in which this many requests are prefilled fastest.

    The cost of a call is its rows, padding included, plus a sixteenth of the most rows that a call
    may have: every call reads all weights.
    """
    cost = {rows: -(-requests // rows) * (rows + most / 16) for rows in sizes}
    return min(sizes, key=lambda rows: (cost[rows], -rows))


def _slots(free: Sequence[int], starts: Sequence[Start]) -> list[int]:
    """Chooses a free slot for each request: the slot of its cached prefix, if that is free."""
    slots: list[int | None] = []
    for start in starts:
        stays = start.tokens and start.slot in free and start.slot not in slots
        slots.append(start.slot if stays else None)
    others = iter([slot for slot in free if slot not in slots])
    return [next(others) if slot is None else slot for slot in slots]
