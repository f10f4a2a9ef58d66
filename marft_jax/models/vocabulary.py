"""From hidden states to logits."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from marft_jax.models.lora import Fused, FusedAdapters, OwnerMask, add_lora, owner_mask
from marft_jax.models.ops.attention import soft_cap
from marft_jax.models.ops.products import product

_NEVER = -1e30


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["matrix_VD", "never", "lora", "owners"],
    meta_fields=["divisor", "cap", "gaps"],
)
@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Matrix from hidden states to logits: cap · tanh(W h / divisor / cap).

    Attributes:
        cap: 0 for none.
        gaps: see ``DecoderConfig``; their logits are so low that their probability is exactly 0.
        never: further tokens like these, ``bool [..., V]``; None for none.
        lora, owners: adapters of the matrix, and the owner of each hidden state.
    """

    matrix_VD: Array
    divisor: float = 1.0
    cap: float = 0.0
    gaps: tuple[tuple[int, int], ...] = ()
    never: Array | None = None
    lora: Fused | None = None
    owners: OwnerMask | None = None

    def adapted(self, lora: FusedAdapters | None, owners: Array) -> Vocabulary:
        """The vocabulary of the policies that own hidden states ``[...]``; see ``owner_mask``."""
        if lora is None or lora.unembed is None:
            return self
        return dataclasses.replace(self, lora=lora.unembed, owners=owner_mask(owners, lora))

    def products(self, hidden: Array) -> Array:
        """``[..., D] -> float32 [..., V]``."""
        products = product(hidden, self.matrix_VD)
        if self.lora is not None:
            none = jnp.zeros((), hidden.dtype)
            products += _isolated(add_lora(none, hidden, self.lora, self.owners))
        return products.astype(jnp.float32)

    def finish(self, products: Array) -> Array:
        """Logits of these products."""
        divided = products if self.divisor == 1 else products / self.divisor
        logits = soft_cap(divided, self.cap)
        if self.never is not None:
            logits = jnp.where(self.never, _NEVER, logits)
        if not self.gaps:
            return logits
        ids_V = np.arange(logits.shape[-1]).reshape((1,) * (logits.ndim - 1) + (-1,))
        without_V = np.any([(first <= ids_V) & (ids_V < end) for first, end in self.gaps], axis=0)
        return jnp.where(without_V, _NEVER, logits)  # not -inf: 0 · inf is no entropy


@jax.custom_vjp
def _isolated(x: Array) -> Array:
    """The same; a gradient that is not finite goes no further. All adapters share the products, in
    which 0 · NaN of one token would be NaN of all."""
    return x


_isolated.defvjp(lambda x: (x, None), lambda _, d: (jnp.where(jnp.isfinite(d), d, 0),))
