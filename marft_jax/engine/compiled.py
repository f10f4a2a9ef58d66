"""The engine's programs: pure functions of (base, adapters, slots), compiled for a few shapes.

The adapters are fused already: a program that cuts them up by layers takes half as long again to
compile, and there are many.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from marft_jax.engine import kv_cache as cache_lib
from marft_jax.engine.kv_cache import Settings, Slots
from marft_jax.engine.sampling import sample
from marft_jax.models import decoder, lora
from marft_jax.models.ops.attention import KV, attention
from marft_jax.models.ops.cache_writes import append
from marft_jax.parallel import compilation
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.parallel.ladder import bucket, round_up


class Shape(NamedTuple):
    """What the engine's programs are compiled for."""

    slots: int
    chunk: int
    context: int
    longest: int

    def on(self, mesh: Mesh) -> Shape:
        """With slots for every device that has rows of its own."""
        return self._replace(slots=round_up(self.slots, mesh_lib.row_shards(mesh)))

    def prefill_rows(self, width: int, mesh: Mesh) -> tuple[int, int, int]:
        """The sizes of a group of prompts of that width: one, a quarter of the most, the most."""
        shards = mesh_lib.row_shards(mesh)
        tokens = compilation.prefill_tokens(mesh)
        most = min(self.slots, round_up(max(1, tokens // width), shards))
        return shards, max(shards, most // 4 // shards * shards), most

    def width(self, tokens: int, rungs: int = 2) -> int:
        """What a prompt of so many tokens is padded to."""
        return min(bucket(tokens, rungs=rungs), self.context)


class Programs(NamedTuple):
    """The compiled functions of an engine; ``empty`` makes idle slots, ``slots`` in abstract, and
    ``fuse`` makes of adapters what the others take."""

    slots: Slots
    empty: Any
    fuse: Any
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
    static = dict(graphdef=graphdef, eos_ids=tuple(eos_ids))
    slots = cache_lib.placed(mesh, jax.eval_shape(make))
    places = jax.tree.map(lambda x: x.format, slots)
    return Programs(
        slots,
        jax.jit(make, out_shardings=places),
        jax.jit(
            functools.partial(lora.fuse, alpha=alpha, dtype=dtype),
            out_shardings=mesh_lib.replicated(mesh),
        ),
        jax.jit(
            functools.partial(mesh_lib.within(mesh, prefill), **static),
            donate_argnames="slots",
            static_argnames="read",
            out_shardings=places,
        ),
        jax.jit(
            functools.partial(decode, **static),
            donate_argnames="slots",
            static_argnames=("chunk", "read"),
            out_shardings=places,
        ),
    )


def prefill(
    *,
    graphdef,
    eos_ids: tuple[int, ...],
    base,
    adapters: lora.FusedAdapters,
    slots: Slots,
    tokens_BT,
    lengths_B,
    owners_B,
    keys_B2,
    settings: Settings,
    slots_B,
    starts_B,
    sources_B,
    read: int,
) -> Slots:
    """Runs prompts through the decoder, fills their slots and samples each first token.

    The vocabulary projection sees the last prompt token of each row only. Rows whose slot number
    lies past the end are padding and leave no trace.

    Args:
        tokens_BT: of each prompt, those that are not taken over.
        lengths_B: of the whole prompts.
        keys_B2: PRNG key data of each row.
        starts_B, sources_B: how many tokens are taken over from which slot.
        read: 0 if none are; else the keys and values that are read, at least the whole prompts.
    """
    b, t = tokens_BT.shape
    positions_BT = starts_B[:, None] + jnp.arange(t)[None]
    valid_BT = positions_BT < lengths_B[:, None]
    mask = lora.owner_mask(jnp.broadcast_to(owners_B[:, None], (b, t)), adapters)
    if read:
        model: decoder.Decoder = nnx.merge(graphdef, base)
        attend = _appending(jnp.where(valid_BT, positions_BT, read), positions_BT, read)
        held = cache_lib.cut(cache_lib.rows(slots.cache, sources_B), read)
        hidden_BTD, fresh = model.hidden(tokens_BT, positions_BT, attend, held, adapters, mask)
    else:
        until_BT = jnp.maximum(lengths_B[:, None] - 1, positions_BT)  # padding: itself
        hidden_BTD, fresh = decoder.forward(
            graphdef, base, tokens_BT, positions_BT, until_BT, adapters, mask
        )
    last_B = lengths_B - starts_B - 1
    last_BD = jnp.take_along_axis(hidden_BTD, last_B[:, None, None], axis=1)[:, 0]
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
    eos_ids: tuple[int, ...],
    base,
    adapters: lora.FusedAdapters,
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
    mask = lora.owner_mask(slots.owner_S[:, None], adapters)
    model: decoder.Decoder = nnx.merge(graphdef, base)
    row_S = jnp.arange(slots.length_S.shape[0])

    def body(carry: tuple[jax.Array, Slots]):
        step, s = carry
        positions_S1 = s.length_S[:, None]
        where_S = jnp.where(s.active_S, s.length_S, read)  # idle rows write nowhere
        attend = _appending(where_S[:, None], positions_S1, read)
        last_S1 = jnp.take_along_axis(s.ids_SA, jnp.maximum(s.count_S - 1, 0)[:, None], axis=1)
        hidden_S1D, cache = model.hidden(last_S1, positions_S1, attend, s.cache, adapters, mask)
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


def _appending(at_BT, positions_BT, read: int) -> decoder.Attend:
    """Attention of new tokens over what their rows hold, and over themselves.

    Args:
        at_BT: where the new keys and values go; those at ``read`` go nowhere.
        positions_BT: of the queries, which read up to there.
    """
    mask_BTR = jnp.arange(read)[None, None] <= positions_BT[:, :, None]

    def attend(q, new: KV, held: KV):
        held = append(held, new, at_BT)
        return attention(q, held, mask_BTR), held

    return attend


def _ends(ids, counts, settings: Settings, eos_ids: tuple[int, ...]):
    return jnp.isin(ids, jnp.asarray(eos_ids)) | (counts >= settings.limit)
