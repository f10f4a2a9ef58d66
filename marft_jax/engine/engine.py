"""Continuous batching with an adapter per row.

A fixed number of slots decode together. The host hands in requests from any agent, turn or episode;
waiting ones are prefilled into free slots as their ``Schedule`` has it. Between two looks of the
host the device decodes up to ``chunk`` tokens per row in one ``while_loop``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from marft_jax import random_keys
from marft_jax.engine.compiled import Prompts, Shape, empty_prompts, programs
from marft_jax.engine.kv_cache import Slots
from marft_jax.engine.schedule import Group, Schedule
from marft_jax.models import decoder, lora
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.sampling.protocol import Completion, Request
from marft_jax.sampling.stops import stopped_at


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
        reuse: copy the beginning of a prompt from a slot that holds it, of the same place.

    Attributes:
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
        self._schedule = Schedule(self.shape, mesh, reuse)
        self._reuse = reuse
        self._tickets: list[int | None] = [None] * self.shape.slots
        self._choices: list[tuple[tuple[int, ...], ...]] = [()] * self.shape.slots
        self._vocabulary = config.vocab_size
        self._stops: list[tuple[str, ...]] = [()] * self.shape.slots
        self._lengths = np.zeros(self.shape.slots, np.int64)
        self.partial: dict[int, np.ndarray] = {}

    def place(self, adapters: lora.Adapters) -> lora.Adapters:
        """Adapters on the engine's devices: a copy, where these are not the learner's."""
        return mesh_lib.placed(adapters, self._mesh)

    def load(self, adapters: lora.Adapters) -> None:
        """Uses these adapters from now on."""
        self._adapters = self.place(adapters)
        self._fused = self._fuse(self._adapters)
        self._slots = self._empty() if self._slots is None else self._slots
        self._schedule.forget()

    def release(self) -> None:
        """Frees the cache, until the next ``load``: others may need its memory. What is unanswered
        is dropped."""
        self._schedule.clear()
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
        return self._schedule.submit(request)

    def cancel(self, ticket: int) -> None:
        """Drops a request; the next one may have its slot."""
        self._schedule.cancel(ticket)
        self._tickets = [None if own == ticket else own for own in self._tickets]

    @property
    def reused(self) -> int:
        """Prompt tokens copied since ``load``."""
        return self._schedule.reused

    @property
    def most_programs(self) -> int:
        """How many programs its requests can need, whatever they are."""
        return self.shape.programs(self._mesh, self._reuse)

    @property
    def busy(self) -> bool:
        """True if any request is unanswered."""
        return self._schedule.is_waiting or any(t is not None for t in self._tickets)

    def step(self) -> list[tuple[int, Completion]]:
        """Refills free slots, decodes a chunk, and returns what got finished, in slot order."""
        free = [slot for slot, ticket in enumerate(self._tickets) if ticket is None]
        for group in self._schedule.groups(free):
            self._begin(group)
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
            stop_at=jnp.int32(len(in_use) * 3 // 4 if self._schedule.is_waiting else 0),
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

    def _begin(self, group: Group) -> None:
        """Prefills the requests of a group."""
        choices: list[tuple[tuple[int, ...], ...]] = [()] * group.rows
        for ticket, request, row, slot, _ in group.entries:
            self._tickets[slot], self._lengths[slot] = ticket, len(request.prompt)
            self._stops[slot] = request.sampling.stop
            self._choices[slot] = choices[row] = request.choices
        prompts = self._prompts(group)
        self._slots = self._prefill(
            base=self._base,
            adapters=self._fused,
            slots=self._slots,
            prompts=jax.device_put(prompts, mesh_lib.rows(self._mesh)),
            read=group.kind.read,
            allowed_BV=self._mask(choices, [[]] * group.rows) if any(choices) else None,
        )

    def _prompts(self, group: Group) -> Prompts:
        """Host arrays of a group; padding repeats one of its rows, and has no slot."""
        prompts = empty_prompts(group.rows, group.kind.width)
        tokens_BT, *columns = jax.tree.leaves(prompts)
        each = self.shape.slots_of_place(self._mesh)
        for _, request, row, slot, start in group.entries:
            new, s = request.prompt[start.tokens :], request.sampling
            tokens_BT[row, : len(new)] = new
            key_2 = random_keys.key_2(self._seed, *random_keys.numbers_of(request.key))
            values = (len(request.prompt), request.owner, key_2, slot % each)
            values += (start.tokens, start.slot % each)
            values += (s.temperature, s.top_p, s.top_k, s.min_p, s.max_new_tokens)
            for column, value in zip(columns, values, strict=True):
                column[row] = value
        used = [entry.row for entry in group.entries]
        padding = np.setdiff1d(np.arange(group.rows), used)
        for column in (tokens_BT, *columns):
            if column is not prompts.slots_B:
                column[padding] = column[used[0]]
        return prompts

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
                self._schedule.extend(slot, answer.ids[:-1])  # the last one was never read
        return done
