"""Continuous batching with an adapter per row.

A fixed number of slots decode together. The host hands in requests from any agent, turn or episode;
waiting ones are prefilled into free slots in the order they came, so that which act enters which
slot follows from the order of requests and never from the clock. Between two looks of the host the
device decodes up to ``chunk`` tokens per row in one ``while_loop``.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from marft_jax import lora
from marft_jax import mesh as mesh_lib
from marft_jax.buckets import bucket
from marft_jax.engine import cache as cache_lib
from marft_jax.engine.cache import Settings, Slots
from marft_jax.engine.sampling import sample
from marft_jax.models import decoder
from marft_jax.models.attention import KV, attention
from marft_jax.types import Sampling

_PREFILL_TOKENS = 8192  # bounds the activations of one prefill


class Request(NamedTuple):
    """Tokens wanted.

    Attributes:
        prompt: ids, at least one.
        owner: the adapter, or -1 for the bare base.
        sampling: how to draw them.
        fold: integers folded into the run's key, one after another: (step, episode, turn).
    """

    prompt: np.ndarray
    owner: int
    sampling: Sampling
    fold: tuple[int, int, int]


class Completion(NamedTuple):
    """Tokens sampled, with their behaviour log-probs; ``finished`` if the turn was ended."""

    ids: np.ndarray
    logprobs: np.ndarray
    finished: bool


class Shape(NamedTuple):
    """What the engine's programs are compiled for."""

    slots: int
    chunk: int
    context: int
    longest: int

    def on(self, mesh: Mesh) -> Shape:
        """With slots for every device that has rows of its own."""
        return self._replace(slots=_round_up(self.slots, mesh_lib.row_shards(mesh)))

    def prefill_rows(self, width: int, mesh: Mesh) -> tuple[int, int]:
        """The two sizes of a group of prompts of that width: few, and as many as the bound on a
        prefill's tokens allows."""
        shards = mesh_lib.row_shards(mesh)
        full = min(self.slots, _round_up(max(1, _PREFILL_TOKENS // width), shards))
        return min(full, _round_up(-(-self.slots // 4), shards)), full

    def width(self, tokens: int) -> int:
        """What a prompt of so many tokens is padded to."""
        return min(bucket(tokens, rungs=2), self.context)


class Programs(NamedTuple):
    """The compiled functions of an engine; ``empty`` makes its idle slots."""

    empty: Any
    prefill: Any
    decode: Any


def programs(
    config: decoder.DecoderConfig,
    graphdef,
    mesh: Mesh,
    shape: Shape,
    dtype,
    *,
    eos_ids: Sequence[int],
    alpha: float,
) -> Programs:
    """``prefill`` and ``decode`` for one base and mesh; arguments as of ``Engine``."""
    make = functools.partial(
        cache_lib.empty_slots, config, shape.slots, shape.context, shape.longest, dtype
    )
    static = dict(graphdef=graphdef, alpha=alpha, eos_ids=tuple(eos_ids))
    places = cache_lib.shardings(mesh, jax.eval_shape(make))
    return Programs(
        jax.jit(make, out_shardings=places),
        jax.jit(
            functools.partial(prefill, **static), donate_argnames="slots", out_shardings=places
        ),
        jax.jit(
            functools.partial(decode, **static),
            donate_argnames="slots",
            static_argnames=("chunk", "read"),
            out_shardings=places,
        ),
    )


class Engine:
    """Samples for requests; ``submit`` them, then ``step`` until all are answered.

    Args:
        config, graphdef, base: the decoder's shape, and its split, placed on ``mesh``.
        mesh: rows are spread over its data and fsdp axes.
        shape: slots are rounded up to a multiple of those axes.
        eos_ids: tokens that end a turn.
        seed: of the run's key.
        alpha: LoRA scaling (alpha / rank).
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
    ):
        self.shape = shape.on(mesh)
        self._mesh, self._base, self._eos_ids = mesh, base, tuple(eos_ids)
        dtype = jax.tree.leaves(base)[0].dtype
        run = programs(config, graphdef, mesh, self.shape, dtype, eos_ids=eos_ids, alpha=alpha)
        self._prefill, self._decode = run.prefill, run.decode
        self._key_2 = jax.device_put(
            jax.random.key_data(jax.random.key(seed)), mesh_lib.replicated(mesh)
        )
        self._slots: Slots = run.empty()
        self._adapters: lora.Adapters | None = None
        self._waiting: deque[tuple[int, Request]] = deque()
        self._tickets: list[int | None] = [None] * self.shape.slots
        self._lengths = np.zeros(self.shape.slots, np.int64)
        self._next_ticket = 0

    def load(self, adapters: lora.Adapters) -> None:
        """Uses these adapters from now on."""
        self._adapters = mesh_lib.localized(adapters, self._mesh)

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
        read = min(bucket(longest, least=64, rungs=2), self.shape.context)
        self._slots = self._decode(
            base=self._base,
            adapters=self._adapters,
            slots=self._slots,
            leave_at=jnp.int32(len(in_use) * 3 // 4 if self._waiting else 0),
            chunk=self.shape.chunk,
            read=read,
        )
        return self._collect(in_use)

    def _refill(self) -> None:
        """Prefills one group of waiting requests of about the same length.

        Groups have one of two sizes, a quarter of the slots or all of them, as far as the bound on
        a prefill's tokens allows, and prompts one of two lengths per doubling: prefill is compiled
        for few shapes.
        """
        free = [i for i, ticket in enumerate(self._tickets) if ticket is None]
        width = self._width(self._waiting[0][1])
        few, full = self.shape.prefill_rows(width, self._mesh)
        most = min(len(free), full)
        group: list[tuple[int, Request]] = []
        while self._waiting and len(group) < most and self._width(self._waiting[0][1]) == width:
            group.append(self._waiting.popleft())
        rows = few if len(group) <= few else full
        slots = free[: len(group)]
        for slot, (ticket, request) in zip(slots, group, strict=True):
            self._tickets[slot], self._lengths[slot] = ticket, len(request.prompt)
        fields = _request_arrays([request for _, request in group], rows, width)
        fields["slots_B"] = np.full(rows, self.shape.slots, np.int32)
        fields["slots_B"][: len(slots)] = slots
        placed = jax.device_put(fields, mesh_lib.rows(self._mesh))
        self._slots = self._prefill(
            base=self._base,
            adapters=self._adapters,
            slots=self._slots,
            key_2=self._key_2,
            **placed,
        )

    def _width(self, request: Request) -> int:
        return self.shape.width(len(request.prompt))

    def _collect(self, in_use: list[int]) -> list[tuple[int, Completion]]:
        s = self._slots
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
        return done


def prefill(
    *,
    graphdef,
    alpha: float,
    eos_ids: tuple[int, ...],
    base,
    adapters,
    slots: Slots,
    key_2,
    tokens_BT,
    lengths_B,
    owners_B,
    folds_B3,
    settings: Settings,
    slots_B,
) -> Slots:
    """Runs prompts through the decoder, fills their slots and samples each first token.

    The vocabulary projection sees the last prompt token of each row only. Rows whose slot number
    lies past the end are padding and leave no trace.
    """
    b, t = tokens_BT.shape
    positions_BT = jnp.broadcast_to(jnp.arange(t)[None], (b, t))
    segments_BT = (positions_BT < lengths_B[:, None]).astype(jnp.int32)
    fused, mask = _adapt(adapters, jnp.broadcast_to(owners_B[:, None], (b, t)), alpha, base)
    hidden_BTD, fresh = decoder.forward(
        graphdef, base, tokens_BT, positions_BT, segments_BT, fused, mask
    )
    last_BD = jnp.take_along_axis(hidden_BTD, lengths_B[:, None, None] - 1, axis=1)[:, 0]
    keys_B2 = jax.vmap(functools.partial(_fold, key_2))(folds_B3)
    zeros_B = jnp.zeros_like(lengths_B)
    ids_B, logprobs_B = sample(decoder.project(graphdef, base, last_BD), keys_B2, zeros_B, settings)

    def put(old, new):
        return old.at[slots_B].set(new, mode="drop")

    return Slots(
        cache=cache_lib.insert(slots.cache, fresh, slots_B),
        length_S=put(slots.length_S, lengths_B),
        count_S=put(slots.count_S, zeros_B + 1),
        active_S=put(slots.active_S, ~_ends(ids_B, zeros_B + 1, settings, eos_ids)),
        owner_S=put(slots.owner_S, owners_B),
        keys_S2=put(slots.keys_S2, keys_B2),
        settings=jax.tree.map(put, slots.settings, settings),
        ids_SA=slots.ids_SA.at[slots_B, 0].set(ids_B, mode="drop"),
        logprobs_SA=slots.logprobs_SA.at[slots_B, 0].set(logprobs_B, mode="drop"),
    )


def decode(
    *,
    graphdef,
    alpha: float,
    eos_ids: tuple[int, ...],
    base,
    adapters,
    slots: Slots,
    leave_at,
    chunk: int,
    read: int,
) -> Slots:
    """Samples up to ``chunk`` tokens for every active slot.

    Args:
        leave_at: stop early once no more than this many slots are active.
        read: positions of the cache that are read; every active slot must end below it.
    """
    fused, mask = _adapt(adapters, slots.owner_S[:, None], alpha, base)
    model: decoder.Decoder = nnx.merge(graphdef, base)
    row_S = jnp.arange(slots.length_S.shape[0])

    def body(carry: tuple[jax.Array, Slots]):
        step, s = carry
        where_S = jnp.where(s.active_S, s.length_S, read)  # idle rows write nowhere
        mask_S1R = (jnp.arange(read)[None] <= s.length_S[:, None])[:, None]

        def attend(q, new: KV, held: KV):
            k = held.k_BGCT.at[row_S, :, :, where_S].set(new.k_BGCT[..., 0], mode="drop")
            v = held.v_BGTC.at[row_S, :, where_S].set(new.v_BGTC[:, :, 0], mode="drop")
            kept = KV(k, v)
            return attention(q, kept, mask_S1R), kept

        last_S1 = jnp.take_along_axis(s.ids_SA, jnp.maximum(s.count_S - 1, 0)[:, None], axis=1)
        hidden_S1D, cache = model.hidden(last_S1, s.length_S[:, None], attend, s.cache, fused, mask)
        logits_SV = model.logits(hidden_S1D[:, 0])
        ids_S, logprobs_S = sample(logits_SV, s.keys_S2, s.count_S, s.settings)
        at_S = jnp.where(s.active_S, s.count_S, s.ids_SA.shape[1])
        moved_S = s.active_S.astype(jnp.int32)
        count_S = s.count_S + moved_S
        return step + 1, s._replace(
            cache=cache,
            length_S=s.length_S + moved_S,
            count_S=count_S,
            active_S=s.active_S & ~_ends(ids_S, count_S, s.settings, eos_ids),
            ids_SA=s.ids_SA.at[row_S, at_S].set(ids_S, mode="drop"),
            logprobs_SA=s.logprobs_SA.at[row_S, at_S].set(logprobs_S, mode="drop"),
        )

    def goes_on(carry: tuple[jax.Array, Slots]):
        step, s = carry
        return (step < chunk) & (jnp.sum(s.active_S) > leave_at)

    small = slots._replace(cache=cache_lib.cut(slots.cache, read))
    _, small = jax.lax.while_loop(goes_on, body, (jnp.int32(0), small))
    return small._replace(cache=cache_lib.paste(slots.cache, small.cache))


def _adapt(adapters, owners, alpha: float, base):
    dtype = jax.tree.leaves(base)[0].dtype
    return lora.fuse(adapters, dtype), lora.owner_mask(owners, adapters, alpha, dtype)


def _fold(key_2, fold_3):
    key = jax.random.wrap_key_data(key_2)
    for i in range(3):
        key = jax.random.fold_in(key, fold_3[i])
    return jax.random.key_data(key)


def _ends(ids, counts, settings: Settings, eos_ids: tuple[int, ...]):
    return jnp.isin(ids, jnp.asarray(eos_ids)) | (counts >= settings.limit)


def _request_arrays(requests: Sequence[Request], rows: int, width: int) -> dict:
    """Requests as arrays of ``rows`` rows; the rows past the last request repeat it."""
    padded = [*requests, *[requests[-1]] * (rows - len(requests))]
    tokens_BT = np.zeros((rows, width), np.int32)
    for i, request in enumerate(padded):
        tokens_BT[i, : len(request.prompt)] = request.prompt

    def column(values, dtype):
        return np.asarray(list(values), dtype)

    sampling = [request.sampling for request in padded]
    return dict(
        tokens_BT=tokens_BT,
        lengths_B=column((len(r.prompt) for r in padded), np.int32),
        owners_B=column((r.owner for r in padded), np.int32),
        folds_B3=column((r.fold for r in padded), np.uint32),
        settings=Settings(
            temperature=column((s.temperature for s in sampling), np.float32),
            top_p=column((s.top_p for s in sampling), np.float32),
            top_k=column((s.top_k for s in sampling), np.int32),
            min_p=column((s.min_p for s in sampling), np.float32),
            limit=column((s.max_new_tokens for s in sampling), np.int32),
        ),
    )


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
