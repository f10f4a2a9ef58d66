"""Programs of the engine: pure functions of (base, adapters, slots), compiled for a few shapes.

``prefill``, ``decode`` and ``PromptRows`` define their arguments. Adapters are fused beforehand: a
program that splits them by layers takes 1.5 times as long to compile.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from marft_jax.engine import kv_cache as cache_lib
from marft_jax.engine.kv_cache import SETTINGS, Slots, SlotSampling
from marft_jax.engine.sample import sample
from marft_jax.models import decoder, lora
from marft_jax.models.decoder_config import Cache, DecoderConfig
from marft_jax.models.parts.attention import attend_cache
from marft_jax.models.parts.part import Reading
from marft_jax.parallel import compilation
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.parallel.ladder import bucket, round_up


class Shape(NamedTuple):
    """Sizes that the engine's programs are compiled for.

    Attributes:
        slots: rows of the cache.
        chunk: tokens per row that a decode samples, at most.
        context: longest prompt and action together, in tokens.
        longest: longest action, in tokens.
    """

    slots: int
    chunk: int
    context: int
    longest: int

    def on(self, mesh: Mesh) -> Shape:
        """Returns the shape with slots for every device that has rows of its own."""
        return self._replace(slots=round_up(self.slots, mesh_lib.row_shards(mesh)))

    def slots_per_shard(self, mesh: Mesh) -> int:
        """Number of slots of each of those devices."""
        return self.slots // mesh_lib.row_shards(mesh)

    def prefill_rows(self, width: int, mesh: Mesh) -> tuple[int, int, int]:
        """Returns the sizes of a group of prompts of that width: one row per shard, a quarter of
        the most, the most."""
        shards = mesh_lib.row_shards(mesh)
        tokens = compilation.prefill_tokens(mesh)
        most = min(self.slots, round_up(max(1, tokens // width), shards))
        return shards, max(shards, most // 4 // shards * shards), most

    def width(self, tokens: int, rungs: int = 2) -> int:
        """Returns the padded length of a prompt."""
        return min(bucket(tokens, rungs=rungs), self.context)

    def rest(self, tokens: int) -> int:
        """Returns the padded length of the tokens after a cached prefix; these are one token where
        the whole prompt is cached."""
        return min(bucket(tokens, least=16, rungs=1), self.context)

    def prefixed(self, tokens: int) -> int:
        """Returns the positions of the cache that prompts with cached prefixes read. At least 256:
        that halves the number of shapes, and reading costs little beside a prefill's products."""
        return self.width(max(tokens, 256), rungs=1)

    def read(self, longest: int) -> int:
        """Returns the positions of the cache that a chunk reads, for the longest row at its end."""
        return min(bucket(longest, least=64, rungs=2), self.context)

    @functools.cache  # a loop over all lengths  # noqa: B019
    def programs(self, mesh: Mesh, reuse: bool) -> int:
        """Counts the programs that requests can need: prefill without and with cached prefixes, and
        decode."""
        lengths = range(1, self.context + 1)
        new = {self.rest(n) for n in lengths} if reuse else set[int]()
        whole = {self.prefixed(n) for n in lengths}
        kinds = [*{self.width(n) for n in lengths}, *(w for w in new for r in whole if w <= r)]
        groups = sum(len({*self.prefill_rows(width, mesh)}) for width in kinds)
        return groups + len({self.read(n + self.chunk) for n in lengths})


class PromptRows(NamedTuple):
    """A group of prompts, one in each row. Rows with a slot number past the end are padding.

    Attributes:
        tokens_BT: tokens of each prompt after its cached prefix.
        lengths_B: length of each whole prompt.
        owners_B: adapter of each row.
        keys_B2: PRNG key data of each row.
        slots_B: slot that each row fills.
        starts_B, sources_B: length of its cached prefix, and the slot that holds it.
        settings: sampling of each row.
    """

    tokens_BT: Array
    lengths_B: Array
    owners_B: Array
    keys_B2: Array
    slots_B: Array
    starts_B: Array
    sources_B: Array
    settings: SlotSampling


def empty_prompts(rows: int, width: int) -> PromptRows:
    """Makes host arrays of a group in which all rows are padding."""

    def zeros(*more: int, dtype: DTypeLike = np.int32) -> Any:
        return np.zeros((rows, *more), dtype)

    return PromptRows(
        tokens_BT=zeros(width),
        lengths_B=zeros(),
        owners_B=zeros(),
        keys_B2=zeros(2, dtype=np.uint32),
        slots_B=zeros() + np.iinfo(np.int32).max,
        starts_B=zeros(),
        sources_B=zeros(),
        settings=SlotSampling(*(zeros(dtype=kind) for kind in SETTINGS)),
    )


class EnginePrograms(NamedTuple):
    """Compiled functions of an engine.

    Attributes:
        slots: shapes and shardings of the slots.
        empty: makes idle slots.
        fuse: lays adapters out for ``prefill`` and ``decode``.
        replace: puts another adapter in place of one of them; (fused, adapter, scale, number).
        prefill, decode: the functions of this module for one model; they return slots.
    """

    slots: Slots
    empty: Any
    fuse: Any
    replace: Any
    prefill: Any
    decode: Any


def programs(
    config: DecoderConfig,
    graphdef: Any,
    mesh: Mesh,
    shape: Shape,
    dtype: DTypeLike,
    *,
    eos_ids: Sequence[int],
    alpha: float,
    reuse: bool = True,
) -> EnginePrograms:
    """Makes the programs for one base and mesh; see ``Engine`` for the arguments."""
    sizes = shape.slots, shape.context, shape.longest
    make = functools.partial(
        cache_lib.empty_slots, config, *sizes, dtype, mesh.shape["tensor"], reuse
    )
    slots = cache_lib.placed(mesh, jax.eval_shape(make))
    formats = jax.tree.map(lambda x: x.format, slots)
    model: dict[str, Any] = dict(graphdef=graphdef, eos_ids=tuple(eos_ids))
    kept: dict[str, Any] = dict(donate_argnames="slots", out_shardings=formats)
    options = compilation.decode_options(mesh)

    def lay_out(adapters: lora.Adapters, scale: Array | float) -> lora.FusedAdapters:
        fused = lora.fuse(adapters, scale, dtype)
        if config.stacked:
            return fused
        return fused._replace(layers=[fused.of(i, config) for i in range(config.n_layers)])

    def fuse(adapters: lora.Adapters) -> lora.FusedAdapters:
        return lay_out(adapters, lora.scale_of(adapters, alpha))

    def replace(
        fused: lora.FusedAdapters, adapter: lora.Adapters, scale: Array, n: Array
    ) -> lora.FusedAdapters:
        adapter = jax.tree.map(lambda x: x[None], adapter)
        return lora.replaced(fused, lay_out(adapter, scale), n)

    places = mesh_lib.row_shards(mesh)
    fill = functools.partial(mesh_lib.with_mesh(mesh, prefill), places=places, **model)
    write = functools.partial(mesh_lib.with_mesh(mesh, decode), **model)
    serialised, everywhere = functools.partial(mesh_lib.serialised, mesh), mesh_lib.replicated(mesh)
    return EnginePrograms(
        slots,
        empty=serialised(jax.jit(make, out_shardings=formats)),
        fuse=serialised(jax.jit(fuse, out_shardings=everywhere)),
        replace=serialised(jax.jit(replace, donate_argnums=0, out_shardings=everywhere)),
        prefill=serialised(jax.jit(fill, static_argnames="read", **kept)),
        decode=serialised(
            jax.jit(write, static_argnames=("chunk", "read"), compiler_options=options, **kept)
        ),
    )


def prefill(
    *,
    graphdef: Any,
    eos_ids: tuple[int, ...],
    base: decoder.Base,
    adapters: lora.FusedAdapters,
    slots: Slots,
    prompts: PromptRows,
    read: int,
    places: int,
    allowed_BV: Array | None = None,
) -> Slots:
    """Runs prompts through the decoder, fills their slots and samples each first token.

    The vocabulary projection sees the last prompt token of each row only.

    Args:
        read: 0 without cached prefixes; else how many positions of the cache are read, at least
            the whole prompts.
        places: that have a part of the rows each.
        allowed_BV: tokens that each row may begin with, where not all.
    """
    p = prompts
    hidden_BTD, fresh = _read_prompts(graphdef, base, adapters, slots.cache, p, read, places)
    fresh = cache_lib.each(lambda new, cache: new.like(cache), fresh, slots.cache)
    last_B = p.lengths_B - p.starts_B - 1
    last_BD = jnp.take_along_axis(hidden_BTD, last_B[:, None, None], axis=1)[:, 0]
    vocabulary = decoder.vocabulary(graphdef, base).adapted(adapters, p.owners_B)
    logits_BV = decoder.logits(last_BD, vocabulary)
    counts_B = jnp.zeros_like(p.lengths_B)
    ids_B, logprobs_B, kept_B = sample(logits_BV, p.keys_B2, counts_B, p.settings, allowed_BV)
    others = ((0, 0), (0, slots.ids_SA.shape[1] - 1))
    rows = Slots(
        cache=fresh,
        length_S=p.lengths_B,
        count_S=counts_B + 1,
        active_S=~_ends(ids_B, counts_B + 1, p.settings, eos_ids),
        owner_S=p.owners_B,
        keys_S2=p.keys_B2,
        settings=p.settings,
        kept_S=kept_B,
        ids_SA=jnp.pad(ids_B[:, None], others),
        logprobs_SA=jnp.pad(logprobs_B[:, None], others),
    )
    return cache_lib.insert(slots, rows, p.slots_B, places)


def _read_prompts(
    graphdef: Any,
    base: decoder.Base,
    adapters: lora.FusedAdapters,
    cache: Cache,
    p: PromptRows,
    read: int,
    places: int,
) -> tuple[Array, Cache]:
    """Hidden states of the prompts' tokens, and their keys and values of each layer."""
    t = p.tokens_BT.shape[1]
    positions_BT = p.starts_B[:, None] + jnp.arange(t)[None]
    mask = lora.owner_mask(jnp.broadcast_to(p.owners_B[:, None], p.tokens_BT.shape), adapters)
    valid_BT = positions_BT < p.lengths_B[:, None]
    if not read:
        until_BT = jnp.maximum(p.lengths_B[:, None] - 1, positions_BT)  # padding: itself
        rows = p.tokens_BT, positions_BT, until_BT
        return decoder.forward(graphdef, base, *rows, adapters, mask, valid_BT)
    model: decoder.Decoder = nnx.merge(graphdef, base)
    where_BT = jnp.where(valid_BT, positions_BT, read)
    attend = attend_cache(where_BT, positions_BT, read, model.config.window)
    prefixes = cache_lib.rows_of(cache, p.sources_B, places)
    prefixes = cache_lib.each(lambda layer: layer.whole(read), prefixes)
    reading = Reading(attend, jnp.full_like(p.tokens_BT, t - 1), valid_BT, p.starts_B)
    return model.hidden(p.tokens_BT, positions_BT, reading, prefixes, adapters, mask)


def decode(
    *,
    graphdef: Any,
    eos_ids: tuple[int, ...],
    base: decoder.Base,
    adapters: lora.FusedAdapters,
    slots: Slots,
    stop_at: Array,
    chunk: int,
    read: int,
    allowed_SV: Array | None = None,
) -> Slots:
    """Samples up to ``chunk`` tokens for every active slot.

    Args:
        stop_at: stop early once no more than this many slots are active.
        read: positions of the cache that are read; every active slot must end below it.
        allowed_SV: tokens that may come next, where not all; of a chunk of one.
    """
    mask = lora.owner_mask(slots.owner_S[:, None], adapters)
    model: decoder.Decoder = nnx.merge(graphdef, base)
    vocabulary = model.vocabulary.adapted(adapters, slots.owner_S)

    def body(carry: tuple[Array, Slots]) -> tuple[Array, Slots]:
        step, s = carry
        where_S = jnp.where(s.active_S, s.length_S, read)  # idle rows write nowhere
        attend = attend_cache(where_S[:, None], s.length_S[:, None], read, model.config.window)
        reading = Reading(attend, jnp.zeros_like(where_S)[:, None], s.active_S[:, None])
        last_S1 = jnp.take_along_axis(s.ids_SA, jnp.maximum(s.count_S - 1, 0)[:, None], axis=1)
        hidden_S1D, cache = model.hidden(
            last_S1, s.length_S[:, None], reading, s.cache, adapters, mask
        )
        logits_SV = decoder.logits(hidden_S1D[:, 0], vocabulary)
        drawn = sample(logits_SV, s.keys_S2, s.count_S, s.settings, allowed_SV)
        return step + 1, _append_tokens(s._replace(cache=cache), drawn, eos_ids)

    def unfinished(carry: tuple[Array, Slots]) -> Array:
        step, s = carry
        return (step < chunk) & (jnp.sum(s.active_S) > stop_at)

    shorter = slots._replace(cache=cache_lib.each(lambda layer: layer.cut(read), slots.cache))
    _, shorter = jax.lax.while_loop(unfinished, body, (jnp.int32(0), shorter))
    return shorter._replace(cache=cache_lib.overwrite(slots.cache, shorter.cache))


def _append_tokens(s: Slots, drawn: tuple[Array, ...], eos_ids: tuple[int, ...]) -> Slots:
    """Appends a token, as ``sample`` draws it, to every active slot."""
    ids_S, logprobs_S, kept_S = drawn
    rows, longest = s.ids_SA.shape
    at = jnp.arange(rows), jnp.where(s.active_S, s.count_S, longest)
    one_S = s.active_S.astype(jnp.int32)
    count_S = s.count_S + one_S
    return s._replace(
        length_S=s.length_S + one_S,
        count_S=count_S,
        active_S=s.active_S & ~_ends(ids_S, count_S, s.settings, eos_ids),
        kept_S=s.kept_S + jnp.where(s.active_S, kept_S, 0),
        ids_SA=s.ids_SA.at[at].set(ids_S, mode="drop"),
        logprobs_SA=s.logprobs_SA.at[at].set(logprobs_S, mode="drop"),
    )


def _ends(ids: Array, counts: Array, settings: SlotSampling, eos_ids: tuple[int, ...]) -> Array:
    is_end = jnp.isin(ids, jnp.asarray(eos_ids)) & settings.ends
    return is_end | (counts >= settings.limit)
