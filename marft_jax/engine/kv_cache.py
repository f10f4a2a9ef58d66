"""Slots of the engine: the cache of each mixer, and what else the device knows of each slot."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from marft_jax.models.decoder_config import Cache, DecoderConfig
from marft_jax.parallel import mesh as mesh_lib


class SlotSampling(NamedTuple):
    """Sampling settings as per-row arrays, so that changing one never recompiles."""

    temperature: Array  # float32, 0 is greedy
    top_p: Array  # float32
    top_k: Array  # int32, 0 keeps all
    min_p: Array  # float32
    limit: Array  # int32, the longest action
    ends: Array | bool = True  # bool, end-of-turn tokens end it


SETTINGS = (jnp.float32, jnp.float32, jnp.int32, jnp.float32, jnp.int32, jnp.bool_)
"""Types of the arrays of ``SlotSampling``."""


class Slots(NamedTuple):
    """A row per agent that is acting.

    Attributes:
        cache: what each layer's mixer keeps of S rows and up to ``context`` positions.
        length_S: tokens in the cache; the position of the next token.
        count_S: tokens sampled so far.
        active_S: true while the row is sampling.
        owner_S: the row's adapter.
        keys_S2: the row's own PRNG key; token i is drawn with ``fold_in(key, i)``.
        kept_S: sum over the row's tokens of the probability that the filters kept.
        ids_SA, logprobs_SA: sampled tokens and their behaviour log-probs.
    """

    cache: Cache
    length_S: Array
    count_S: Array
    active_S: Array
    owner_S: Array
    keys_S2: Array
    settings: SlotSampling
    kept_S: Array
    ids_SA: Array
    logprobs_SA: Array


def empty_slots(
    config: DecoderConfig,
    slots: int,
    context: int,
    longest: int,
    dtype: DTypeLike,
    places: int,
    reuse: bool,
) -> Slots:
    """Idle slots for sequences of up to ``context`` tokens, ``longest`` of them sampled.

    Args:
        places: devices along the mesh's axis ``tensor``.
        reuse: prompts start from what lies in other slots.
    """
    cache = config.init_cache(slots, context, dtype, places)
    zeros = jnp.zeros(slots, jnp.int32)
    return Slots(
        cache=each(lambda layer: layer.resumable(), cache) if reuse else cache,
        length_S=zeros,
        count_S=zeros,
        active_S=jnp.zeros(slots, bool),
        owner_S=zeros - 1,
        keys_S2=jnp.zeros((slots, 2), jnp.uint32),
        settings=SlotSampling(*(jnp.zeros(slots, kind) for kind in SETTINGS)),
        kept_S=jnp.zeros(slots, jnp.float32),
        ids_SA=jnp.zeros((slots, longest), jnp.int32),
        logprobs_SA=jnp.zeros((slots, longest), jnp.float32),
    )  # fmt: skip


def placed(mesh: Mesh, slots: Slots) -> Slots:
    """Abstract slots with their places: rows over ``data`` and ``fsdp``, caches as they say."""

    def at(x: Array) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=mesh_lib.rows(mesh))

    cache = each(lambda layer: layer.placed(mesh), slots.cache)
    return jax.tree.map(at, slots._replace(cache=[]))._replace(cache=cache)


def each(change: Callable[..., Any], *caches: Cache) -> Any:
    """Changes caches layer by layer, or place by place where the layers are stacked."""
    return type(caches[0])(change(*layers) for layers in zip(*caches, strict=True))


def insert(slots: Slots, rows: Slots, slots_B: Array, places: int) -> Slots:
    """Copies prefilled rows into slots of the place that computed them.

    Args:
        slots_B: indices of slots within their place; indices past the end are dropped.
        places: parts that the rows are split into.
    """

    def put(old: Array, new: Array, at: Array) -> Array:
        return old.at[at].set(new, mode="drop")

    def put_cache(old: Any, new: Any) -> Any:
        axis = _row_axis(slots.cache)
        at = slots_B, rows.length_S
        return _by_place(lambda o, n, at: o.insert(n, *at), places, at, old, new, axis=axis)

    cache = each(put_cache, slots.cache, rows.cache)
    put_row = functools.partial(_by_place, put, places, slots_B)
    others = jax.tree.map(put_row, slots._replace(cache=[]), rows._replace(cache=[]))
    return others._replace(cache=cache)


def rows_of(cache: Cache, rows_B: Array, places: int) -> Cache:
    """Copies of some rows, by their indices in the place that asks for them."""
    axis = _row_axis(cache)

    def take(x: Array, at: Array) -> Array:
        return x[(slice(None),) * axis + (at,)]

    return jax.tree.map(lambda x: _by_place(take, places, rows_B, x, axis=axis), cache)


def _row_axis(cache: Cache) -> int:
    """Axis of the rows: behind the layers where these are stacked."""
    return 0 if isinstance(cache, list) else 1


def _by_place(change: Callable[..., Any], places: int, at_B: Any, *rows: Any, axis: int = 0) -> Any:
    """``change(*rows, at)`` in each place that has a part of the rows, so that none travels."""
    if places == 1:
        return change(*rows, at_B)

    def split(x: Array, axis: int = axis) -> Array:
        return jnp.reshape(x, (*x.shape[:axis], places, -1, *x.shape[axis + 1 :]))

    def merge(x: Array) -> Array:
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    in_axes = (*[axis] * len(rows), 0)
    at = jax.tree.map(lambda x: split(x, 0), at_B)
    changed = jax.vmap(change, in_axes, axis)(*jax.tree.map(split, rows), at)
    return jax.tree.map(merge, changed)


def overwrite(cache: Cache, first: Cache) -> Cache:
    """Writes ``first`` over the first positions of ``cache``."""
    return jax.tree.map(
        lambda whole, part: jax.lax.dynamic_update_slice(whole, part, (0,) * whole.ndim),
        cache, first,
    )  # fmt: skip
