"""Which waiting requests are prefilled next, in which slots, and what they copy from others.

All of it follows from the order of requests and of what became free, never from the clock. Each
place of the mesh that has rows of its own has its share of the slots, and copies within them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from marft_jax.engine.compiled import Shape
from marft_jax.engine.prefix_cache import NOWHERE, Prefixes, Start, worthwhile
from marft_jax.parallel import compilation
from marft_jax.sampling.protocol import Request


class Kind(NamedTuple):
    """A shape of ``prefill``: the tokens of each row that it computes, and reads (0: as many)."""

    width: int
    read: int


class Entry(NamedTuple):
    """A request in a row of a group: where it goes, and the cached prefix that it begins with."""

    ticket: int
    request: Request
    row: int
    slot: int
    start: Start


class Group(NamedTuple):
    """Requests that are prefilled together; rows without one are padding."""

    kind: Kind
    rows: int
    entries: Sequence[Entry]


class _Waiting(NamedTuple):
    ticket: int
    request: Request
    slots: range  # those that it may have: once it has a place, those of the place


class Schedule:
    """The queue of requests, and what lies in each slot.

    Args:
        shape: of the programs, with as many slots for each place of ``mesh``.
        reuse: copy the beginning of a prompt from a slot that holds it.

    Attributes:
        reused: prompt tokens that were copied since ``forget``.
    """

    def __init__(self, shape: Shape, mesh: Mesh, reuse: bool):
        self._shape, self._mesh, self._reuse = shape, mesh, reuse
        each = shape.slots_of_place(mesh)
        self._places = [range(first, first + each) for first in range(0, shape.slots, each)]
        self._waiting: list[_Waiting] = []
        self._next_ticket = 0
        self._seen = 0  # tickets before this one have waited for a free slot
        self._held = Prefixes(shape.slots, shape.context)
        self._ahead = Prefixes(shape.slots, shape.context)  # what will be held soon
        self._starts = dict[tuple[int, range], Start]()  # what has been found, until a slot changes
        self.forget()

    def forget(self) -> None:
        """Forgets what lies in the slots: adapters have changed."""
        self._held.forget()
        self._filled = [-1] * self._shape.slots  # by which ticket: the oldest is refilled first
        self.reused = 0

    def extend(self, slot: int, ids: np.ndarray) -> None:
        """Notes what has been sampled in a slot."""
        self._held.extend(slot, ids)

    def submit(self, request: Request) -> int:
        """Queues a request; returns its ticket."""
        self._waiting.append(_Waiting(self._next_ticket, request, range(self._shape.slots)))
        self._next_ticket += 1
        return self._next_ticket - 1

    def cancel(self, ticket: int) -> None:
        """Drops a request, if it waits."""
        self._waiting = [waiting for waiting in self._waiting if waiting.ticket != ticket]

    def clear(self) -> None:
        """Drops all that wait."""
        self._waiting = []

    @property
    def is_waiting(self) -> bool:
        """True if any request has no slot yet."""
        return bool(self._waiting)

    def groups(self, free: Sequence[int]) -> Iterator[Group]:
        """Takes a waiting request for each free slot, in groups to be prefilled one after another.

        The oldest comes first, then new ones most of whose prompt still lies in a slot, as when an
        episode goes on, and the others as they came. Of those that have a beginning in common that
        lies nowhere, one goes ahead, and the others copy it. What one will copy is overwritten
        last.
        """
        if not free or not self._waiting:
            return
        self._starts.clear()  # rows have grown
        oldest = min(self._waiting)
        self._waiting.sort(key=lambda w: (w is not oldest, not self._is_warm(w)))
        self._seen = self._next_ticket
        left, n = set(free), len(free)
        queue, self._waiting = self._with_places(self._waiting[:n], left), self._waiting[n:]
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

    def _with_places(self, queue: Sequence[_Waiting], free: set[int]) -> list[_Waiting]:
        """Gives each request a place with a free slot: where most of its prompt lies, or will when
        those before it have begun; among equals where most slots are free."""
        if len(self._places) == 1:
            return [waiting._replace(slots=self._places[0]) for waiting in queue]
        left = {slots: len(free.intersection(slots)) for slots in self._places}
        placed = list[_Waiting]()
        self._ahead.forget()
        for waiting in queue:
            choices = [waiting._replace(slots=slots) for slots in self._places if left[slots]]
            chosen = max(choices, key=lambda own: (self._begins(own), left[own.slots]))
            left[chosen.slots] -= 1
            slot = chosen.slots[left[chosen.slots]]
            self._ahead.put(slot, waiting.request.owner, waiting.request.prompt)
            placed.append(chosen)
        return placed

    def _begins(self, waiting: _Waiting) -> int:
        """Tokens of its prompt that lie in its place, or will."""
        return max(self._start(waiting).tokens, self._find(self._ahead, waiting).tokens)

    def _split(self, queue: Sequence[_Waiting]) -> tuple[list[_Waiting], list[_Waiting]]:
        """Splits requests into those that go ahead, and those that save by waiting for them."""
        ahead, behind = list[_Waiting](), list[_Waiting]()
        self._ahead.forget()
        left = {slots: iter(slots) for slots in self._places}
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

        Groups have one of three sizes, and prompts one of two lengths per doubling: prefill is
        compiled for few shapes. ``wanted`` are the slots that requests will copy from, by ticket;
        the one that is needed first is overwritten last.
        """
        kind, n = self._kind(queue[0]), len(self._places)
        sizes = self._shape.prefill_rows(kind.width, self._mesh)
        by_place = list[list[_Waiting]]()
        for slots in self._places:
            alike = (w for w in queue if w.slots == slots and self._kind(w) == kind)
            by_place.append([*islice(alike, sizes[-1] // n)])
        most = compilation.prefill_tokens(self._mesh) // kind.width
        rows = _rows(sizes, n * max(map(len, by_place)), most)
        by_place = [own[: rows // n] for own in by_place]
        for waiting in chain(*by_place):
            wanted.pop(waiting.ticket, None)
        use = {slot: first for first, slot in reversed([*enumerate(wanted.values())])}
        entries = list[Entry]()
        for place, own in enumerate(by_place):
            here = [slot for slot in self._places[place] if slot in free]
            here.sort(key=lambda slot: (-use.get(slot, len(wanted)), self._filled[slot]))
            starts = [self._start(waiting) for waiting in own]
            slots = _slots(here, starts)
            numbers = range(place * (rows // n), rows)
            for row, waiting, slot, start in zip(numbers, own, slots, starts, strict=False):
                entries.append(Entry(waiting.ticket, waiting.request, row, slot, start))
        for entry in entries:
            self._held.put(entry.slot, entry.request.owner, entry.request.prompt)
            self._filled[entry.slot] = entry.ticket
            self.reused += entry.start.tokens
        self._starts.clear()
        return Group(kind, rows, entries)

    def _start(self, waiting: _Waiting) -> Start:
        """The prefix that it would begin with now."""
        key = waiting.ticket, waiting.slots
        if key not in self._starts:
            self._starts[key] = self._find(self._held, waiting)
        return self._starts[key]

    def _find(self, prefixes: Prefixes, waiting: _Waiting) -> Start:
        if not self._reuse:
            return NOWHERE
        request, slots = waiting.request, waiting.slots
        return prefixes.find(request.owner, request.prompt, slice(slots.start, slots.stop))

    def _kind(self, waiting: _Waiting) -> Kind:
        length, start = len(waiting.request.prompt), self._start(waiting)
        if not start.tokens:
            return Kind(self._shape.width(length), 0)
        return Kind(self._shape.rest(length - start.tokens), self._shape.prefixed(length))


def _rows(sizes: Sequence[int], requests: int, most: float) -> int:
    """Size of the groups in which so many requests are prefilled soonest.

    A call takes as long as its rows, padding too, and a sixteenth of the ``most`` that it may have:
    it reads the weights, however few there are.
    """
    cost = {rows: -(-requests // rows) * (rows + most / 16) for rows in sizes}
    return min(sizes, key=lambda rows: (cost[rows], -rows))


def _slots(free: Sequence[int], starts: Sequence[Start]) -> list[int]:
    """Free slots for requests: each where its cached prefix lies, if that slot is free."""
    slots: list[int | None] = []
    for start in starts:
        stays = start.tokens and start.slot in free and start.slot not in slots
        slots.append(start.slot if stays else None)
    others = iter([slot for slot in free if slot not in slots])
    return [next(others) if slot is None else slot for slot in slots]
