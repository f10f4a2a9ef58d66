"""Continuous batching with an adapter per row.

A fixed number of slots decode together. Requests of any agent, turn or episode wait until
``Schedule`` assigns them to free slots, where they are prefilled. In one call the device decodes up
to ``chunk`` tokens per row in a ``while_loop``; then the host looks at the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from marft_jax import random_keys
from marft_jax.engine.compiled import PromptRows, Shape, empty_prompts, programs
from marft_jax.engine.kv_cache import Slots
from marft_jax.engine.schedule import Entry, Group, Schedule
from marft_jax.models import decoder, lora
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.sampling.constraints import Constraint, Forms, constraint_of
from marft_jax.sampling.protocol import Capabilities, Completion, Request
from marft_jax.sampling.stops import stopped_at
from marft_jax.types import MAIN


class Engine:
    """Samples on our own devices; its methods are those of ``sampling.Sampler``.

    Args:
        config, graphdef, base: settings of the decoder, and its split, placed on ``mesh``.
        mesh: rows are spread over its data and fsdp axes.
        shape: slots are rounded up to a multiple of those axes.
        eos_ids: tokens that end a turn.
        seed: ``run.seed``.
        alpha: LoRA scaling (alpha / rank).
        decode: turns ids into the text in which stop texts are searched.
        name: the name of its base, whose adapters it samples with.
        reuse: copy the beginning of a prompt from a slot on the same devices that holds it.
        forms: makes the constraint of a ``Request.form``.

    Attributes:
        partial: ids so far of each unfinished request after the last step, by ticket.
    """

    def __init__(
        self,
        config: DecoderConfig,
        graphdef: Any,
        base: decoder.Base,
        mesh: Mesh,
        shape: Shape,
        *,
        eos_ids: Sequence[int],
        seed: int,
        alpha: float,
        decode: Callable[[list[int]], str],
        name: str = MAIN,
        reuse: bool = True,
        forms: Forms | None = None,
    ):
        self._shape, self._name = shape.on(mesh), name
        self._mesh, self._base, self._eos_ids = mesh, base, tuple(eos_ids)
        dtype = jax.tree.leaves(base)[0].dtype
        run = programs(
            config, graphdef, mesh, self._shape, dtype, eos_ids=eos_ids, alpha=alpha, reuse=reuse
        )
        self._fuse, self._replace, self._empty = run.fuse, run.replace, run.empty
        self._prefill, self._decode = run.prefill, run.decode
        self._seed, self._decode_text = seed, decode
        self._slots: Slots | None = None
        self._version, self._versions = "", dict[int, str]()  # of all; of replaced adapters
        self._stack: lora.Adapters = {}  # shapes
        self._fused: lora.FusedAdapters | None = None
        slack = config.slack(self._shape.context)
        self._schedule = Schedule(self._shape, mesh, reuse, config.recurrent, slack)
        self._reuse, self._recurrent = reuse, config.recurrent
        self._vocabulary = config.vocab_size
        self._forms, self._constraints = forms, dict[int, Constraint | None]()  # by slot
        self._active = dict[int, Entry]()  # requests that are being sampled, by slot
        self._started = False  # a chunk is being decoded
        self._lengths = np.zeros(self._shape.slots, np.int64)
        self.partial: dict[int, np.ndarray] = {}

    @property
    def capabilities(self) -> Capabilities:
        """Everything that a sampler may offer."""
        programs = self._shape.programs(self._mesh, self._reuse)
        return Capabilities({self._name: self._shape.context}, self._shape.slots, programs)

    def load(self, adapters: Mapping[str, lora.Adapters], version: str) -> None:
        """Samples with these adapters from now on, copied to its devices where they are elsewhere;
        no request may be unanswered."""
        assert not self.busy
        self._stack = jax.eval_shape(lambda x: x, adapters[self._name])
        self._fused = self._fuse(mesh_lib.placed(adapters[self._name], self._mesh))
        self._version, self._versions = version, {}
        self._slots = self._empty() if self._slots is None else self._slots
        self._schedule.forget()

    def replace(self, owner: int, factors: Mapping[str, Any], scale: float, version: str) -> None:
        """Puts an adapter in place of one of those that were loaded, while others are sampled
        with; no request of this owner may be unanswered.

        Args:
            factors: as of ``lora.Adapters`` without the axis N, of no larger rank and no more
                matrices than those that were loaded.
            scale: alpha / rank.
        """
        assert owner not in self._schedule.owners
        assert all(entry.request.owner != owner for entry in self._active.values())
        adapter = lora.padded(factors, self._stack)
        self._fused = self._replace(self._fused, adapter, np.float32(scale), np.int32(owner))
        self._versions[owner] = version
        self._schedule.held.forget(owner)

    def verify_adapters(self) -> None:
        """Its own adapters sample."""

    def release(self) -> None:
        """Frees the cache and the adapters' copy until the next ``load``, and drops unanswered
        requests."""
        self._schedule.clear()
        self._active.clear()
        self._started = False
        self._slots = self._fused = None

    def submit(self, request: Request) -> int:
        """Queues a request; its ticket comes back with the completion."""
        room = self._shape.context - len(request.prompt)
        assert 0 < request.sampling.max_new_tokens <= min(room, self._shape.longest)
        return self._schedule.submit(request)

    def cancel(self, ticket: int) -> None:
        """Drops a request and frees its slot."""
        self._schedule.cancel(ticket)
        self._active = {s: entry for s, entry in self._active.items() if entry.ticket != ticket}

    def stats(self) -> Mapping[str, float]:
        """Returns the number of prompt tokens copied since ``load``."""
        return {"tokens/prefix_cached": self._schedule.reused}

    @property
    def busy(self) -> bool:
        """True while a request is unanswered."""
        return self._schedule.is_waiting or bool(self._active)

    def step(self) -> list[tuple[int, Completion]]:
        """Refills free slots, decodes a chunk, and returns what is finished, in slot order."""
        self.start()
        self._started, self.partial = False, {}
        return self._collect(sorted(self._active)) if self._active else []

    def start(self) -> None:
        """Refills free slots, and launches the decoding of a chunk."""
        if self._started:
            return
        free = [slot for slot in range(self._shape.slots) if slot not in self._active]
        for group in self._schedule.groups(free):
            self._begin(group)
        if not self._active:
            return
        in_use = sorted(self._active)
        longest = int(self._lengths[in_use].max()) + self._shape.chunk
        allowed_SV = self._allowed()
        self._slots = self._decode(
            base=self._base,
            adapters=self._fused,
            slots=self._slots,
            stop_at=jnp.int32(len(in_use) * 3 // 4 if self._schedule.is_waiting else 0),
            chunk=self._shape.chunk if allowed_SV is None else 1,
            allowed_SV=allowed_SV,
            read=self._shape.read(longest),
        )
        self._started = True

    def _allowed(self) -> jax.Array | None:
        """Tokens that may come next in each slot; None where any token may in all slots."""
        slots = range(self._shape.slots)
        constraints = [self._constraints[slot] if slot in self._active else None for slot in slots]
        if not any(constraints):
            return None
        s = self._slots
        assert s is not None
        count, ids = map(np.asarray, jax.device_get((s.count_S, s.ids_SA)))
        begun = [ids[slot, : count[slot]].tolist() for slot in range(self._shape.slots)]
        return self._mask(constraints, begun)

    def _mask(
        self, constraints: Sequence[Constraint | None], begun: Sequence[list[int]]
    ) -> jax.Array:
        """Tokens that may continue what each row has begun."""
        mask = np.ones((len(constraints), self._vocabulary), bool)
        for row, (constraint, ids) in enumerate(zip(constraints, begun, strict=True)):
            if constraint is not None and (allowed := constraint(ids)) is not None:
                mask[row] = allowed
        return jax.device_put(mask, mesh_lib.rows(self._mesh))

    def _begin(self, group: Group) -> None:
        """Prefills the requests of a group."""
        constraints: list[Constraint | None] = [None] * group.rows
        for entry in group.entries:
            self._active[entry.slot] = entry
            self._lengths[entry.slot] = len(entry.request.prompt)
            asked = entry.request.choices, entry.request.form
            constraints[entry.row] = constraint_of(*asked, self._vocabulary, self._forms)
            self._constraints[entry.slot] = constraints[entry.row]
        prompts = self._prompts(group)
        self._slots = self._prefill(
            base=self._base,
            adapters=self._fused,
            slots=self._slots,
            prompts=jax.device_put(prompts, mesh_lib.rows(self._mesh)),
            read=group.shape.read,
            allowed_BV=self._mask(constraints, [[]] * group.rows) if any(constraints) else None,
        )

    def _prompts(self, group: Group) -> PromptRows:
        """Fills the host arrays of a group; padding repeats one of its rows, and has no slot."""
        prompts = empty_prompts(group.rows, group.shape.width)
        tokens_BT, *columns = jax.tree.leaves(prompts)
        each = self._shape.slots_per_shard(self._mesh)
        for _, request, row, slot, start in group.entries:
            new, s = request.prompt[start.tokens :], request.sampling
            tokens_BT[row, : len(new)] = new
            key_2 = random_keys.key_2(self._seed, *random_keys.numbers_of(request.key))
            values = (len(request.prompt), request.owner, key_2, slot % each)
            values += (start.tokens, start.slot % each)
            values += (s.temperature, s.top_p, s.top_k, s.min_p, s.max_new_tokens, request.ends)
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
        self._schedule.held.grown(self._lengths)
        done: list[tuple[int, Completion]] = []
        for slot in in_use:
            entry, n = self._active[slot], int(count[slot])
            end = self._stopped_at(entry.request, ids[slot, :n])
            if end is None and active[slot]:
                self.partial[entry.ticket] = ids[slot, :n].copy()
            else:
                share = float(kept[slot]) / n
                is_ended = entry.request.ends and int(ids[slot, n - 1]) in self._eos_ids
                why = "stop" if end is not None else "end" if is_ended else "length"
                n = end or n
                sampled = ids[slot, :n].copy(), logprobs[slot, :n].copy()
                version = self._versions.get(entry.request.owner, self._version)
                done.append((entry.ticket, Completion(*sampled, why, share, version)))
                del self._active[slot]
                if end is None or not self._recurrent:  # no state is as old as a stop text
                    self._schedule.held.extend(slot, sampled[0][:-1])  # the last one was never read
        return done

    def _stopped_at(self, request: Request, ids: np.ndarray) -> int | None:
        """Number of ids up to the first stop text or stop id; None where there is none."""
        ends, stops = list[int](), request.sampling.stop
        if request.stop_ids:
            ends += (np.flatnonzero(np.isin(ids, request.stop_ids))[:1] + 1).tolist()
        if stops and (end := stopped_at(ids.tolist(), stops, self._decode_text)) is not None:
            ends.append(end)
        return min(ends, default=None)
