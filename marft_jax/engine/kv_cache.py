"""Key-value cache, and what else the device knows of each slot."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from marft_jax.models.decoder import DecoderConfig
from marft_jax.models.ops.attention import KV, Cache
from marft_jax.models.ops.kv import KEYS_IN_MEMORY, write
from marft_jax.parallel import mesh as mesh_lib


class Settings(NamedTuple):
    """Sampling settings as per-row arrays, so that changing one never recompiles."""

    temperature: Array  # float32, 0 is greedy
    top_p: Array  # float32
    top_k: Array  # int32, 0 keeps all
    min_p: Array  # float32
    limit: Array  # int32, the longest action


SETTINGS = (jnp.float32, jnp.float32, jnp.int32, jnp.float32, jnp.int32)
"""Types of its arrays."""


class Slots(NamedTuple):
    """A row per agent that is acting.

    Attributes:
        cache: keys and values of S rows and ``context`` positions.
        length_S: tokens in the cache; the position of the next token.
        count_S: tokens sampled so far.
        active_S: still sampling.
        owner_S: the row's adapter.
        keys_S2: the row's own PRNG key; token i is drawn with ``fold_in(key, i)``.
        kept_S: over its tokens, the sum of the probability that the filters kept.
        ids_SA, logprobs_SA: sampled tokens and their behaviour log-probs.
    """

    cache: Cache
    length_S: Array
    count_S: Array
    active_S: Array
    owner_S: Array
    keys_S2: Array
    settings: Settings
    kept_S: Array
    ids_SA: Array
    logprobs_SA: Array


def empty_slots(
    config: DecoderConfig, slots: int, context: int, longest: int, dtype: DTypeLike
) -> Slots:
    """Idle slots for sequences of up to ``context`` tokens, ``longest`` of them sampled."""
    rows, channels = (slots, config.n_kv_heads), config.head_dim

    def layers(*stacked: int) -> KV:
        keys, values = (*stacked, *rows, channels, context), (*stacked, *rows, context, channels)
        return KV(jnp.zeros(keys, dtype), jnp.zeros(values, dtype))

    n, zeros = config.n_layers, jnp.zeros(slots, jnp.int32)
    return Slots(
        cache=layers(n) if config.stacked else [layers() for _ in range(n)],
        length_S=zeros,
        count_S=zeros,
        active_S=jnp.zeros(slots, bool),
        owner_S=zeros - 1,
        keys_S2=jnp.zeros((slots, 2), jnp.uint32),
        settings=Settings(*(jnp.zeros(slots, kind) for kind in SETTINGS)),
        kept_S=jnp.zeros(slots, jnp.float32),
        ids_SA=jnp.zeros((slots, longest), jnp.int32),
        logprobs_SA=jnp.zeros((slots, longest), jnp.float32),
    )  # fmt: skip


def placed(mesh: Mesh, slots: Slots) -> Slots:
    """Abstract slots with their places: rows over ``data`` and ``fsdp``; heads of the cache over
    ``tensor``, where that divides them."""
    *layers, _, heads, _, _ = jax.tree.leaves(slots.cache)[0].shape
    split = "tensor" if heads % mesh.shape["tensor"] == 0 else None
    keys = values = NamedSharding(mesh, P(*[None] * len(layers), *mesh_lib.ROWS, split))
    if order := KEYS_IN_MEMORY.get(mesh.devices.flat[0].platform):
        before = len(layers) + 2
        keys = Format(Layout((*range(before), *(before + i for i in order))), values)

    def at(place: Any, x: Array) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    cache = each(lambda kv: KV(*map(at, (keys, values), kv)), slots.cache)
    return jax.tree.map(functools.partial(at, mesh_lib.rows(mesh)), slots)._replace(cache=cache)


def each(change: Callable[..., KV], *caches: Cache) -> Any:
    """Caches, changed layer by layer, or as a whole where the layers are stacked."""
    return jax.tree.map(change, *caches, is_leaf=lambda x: isinstance(x, KV))


def insert(slots: Slots, rows: Slots, slots_B: Array, places: int) -> Slots:
    """Copies prefilled rows into slots of the place that computed them, by their numbers there; one
    past the end is dropped."""
    t = jax.tree.leaves(rows.cache)[0].shape[-1]

    def put(old: Array, new: Array, at: Array) -> Array:
        return old.at[at].set(new, mode="drop")

    def put_keys(old: Array, new: Array, at: Array) -> Array:
        return write(old, jnp.s_[..., at, :, :, :t], new)

    def put_values(old: Array, new: Array, at: Array) -> Array:
        return write(old, jnp.s_[..., at, :, :t, :], new)

    def put_cache(old: KV, new: KV) -> KV:
        keys = _by_place(put_keys, places, slots_B, old.k_BGCT, new.k_BGCT)
        return KV(keys, _by_place(put_values, places, slots_B, old.v_BGTC, new.v_BGTC))

    cache = each(put_cache, slots.cache, rows.cache)
    put_row = functools.partial(_by_place, put, places, slots_B, row_axis=0)
    others = jax.tree.map(put_row, slots._replace(cache=[]), rows._replace(cache=[]))
    return others._replace(cache=cache)


def first_positions(cache: Cache, length: int) -> Cache:
    """First ``length`` positions."""
    return each(lambda kv: kv.cut(length), cache)


def rows_of(cache: Cache, rows_B: Array, places: int) -> Cache:
    """Copies of some rows, by their numbers in the place that asks for them."""

    def take(x: Array, at: Array) -> Array:
        return x[..., at, :, :, :]

    return jax.tree.map(functools.partial(_by_place, take, places, rows_B), cache)


def _by_place(
    change: Callable[..., Array], places: int, at_B: Array, *rows: Array, row_axis: int = -4
) -> Array:
    """``change(*rows, at)`` in each place that has a part of the rows, so that none travels."""
    if places == 1:
        return change(*rows, at_B)

    def split(x: Array, axis: int) -> Array:
        return jnp.reshape(x, (*x.shape[:axis], places, -1, *x.shape[axis + 1 :]))

    axes = [row_axis % x.ndim for x in rows]
    changed = jax.vmap(change, (*axes, 0), axes[0])(*map(split, rows, axes), split(at_B, 0))
    return changed.reshape(*changed.shape[: axes[0]], -1, *changed.shape[axes[0] + 2 :])


def overwrite(cache: Cache, first: Cache) -> Cache:
    """Writes ``first`` over the first positions of ``cache``."""
    return jax.tree.map(
        lambda whole, part: jax.lax.dynamic_update_slice(whole, part, (0,) * whole.ndim),
        cache, first,
    )  # fmt: skip
