"""New keys and values written in place into a cache that is held, in each platform's form."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from marft_jax.models.ops.attention import KV

KEYS_IN_MEMORY = {"tpu": (0, 1, 3, 2)}
"""The order of the keys' dimensions in memory: a TPU's products want channels last, and would copy
keys that have their positions there in every chunk of decoding."""


def append(held: KV, new: KV, at_BT) -> KV:
    """``held`` with new tokens at these positions of their rows; what lies past the end is dropped.

    A CPU writes all heads of a token at once. A TPU would rearrange all that is held for that, so
    that the heads lie together, and back for the product that reads it.
    """
    row_B1, groups = jnp.arange(len(at_BT))[:, None], new.v_BGTC.shape[1]

    def together(k, v, new_k, new_v):
        k_BTGC, v_BTGC = new_k.transpose(0, 3, 1, 2), new_v.swapaxes(1, 2)
        return (
            write(k, jnp.s_[row_B1, :, :, at_BT], k_BTGC),
            write(v, jnp.s_[row_B1, :, at_BT], v_BTGC),
        )

    def apart(k, v, new_k, new_v):
        row_B11, at_B1T, head_G1 = row_B1[:, None], at_BT[:, None], jnp.arange(groups)[:, None]
        return (
            write(k, jnp.s_[row_B11, head_G1, :, at_B1T], new_k.swapaxes(2, 3)),
            write(v, jnp.s_[row_B11, head_G1, at_B1T], new_v),
        )

    return KV(*jax.lax.platform_dependent(*held, *new, cpu=together, default=apart))


def write(held, where: tuple, new):
    """``held`` with ``new`` in these places; what lies past the end is dropped.

    A CPU writes halves as integers: it would turn all that is held into float32 and back. A TPU
    would copy all that is held to take it for integers.
    """

    def put(held, new):
        return held.at[where].set(new, mode="drop")

    def put_bits(held, new):
        bits = jax.lax.bitcast_convert_type
        return bits(put(bits(held, jnp.uint16), bits(new, jnp.uint16)), held.dtype)

    new = new.astype(held.dtype)
    if held.dtype.itemsize == 4:
        return put(held, new)
    return jax.lax.platform_dependent(held, new, cpu=put_bits, default=put)
