"""Adapters of clients over the shared base, each in a slot of a policy of its own."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from jax.sharding import Mesh
from tinker import types

from marft_jax import policy as verbs
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.interop import peft
from marft_jax.models.weights.load import BaseModel
from marft_jax.policy import Adapter
from marft_jax.policy.policy import Policy, on_base

_ALPHA = 32.0  # of every rank, as in the API
LADDER = (4, 8, 16, 32, 64, 128)  # ranks that passes are compiled for; others are filled with zeros
Lora = Mapping[str, Any]
"""Rank and matrices of an adapter: the fields of ``types.LoraConfig`` without the seed."""


class Adapters:
    """Makes adapters of what clients ask for.

    Attributes:
        names: of the base, as clients call it.
        rank: the largest of an adapter.
        context: longest sequence, in tokens.
    """

    def __init__(
        self, base: BaseModel, mesh: Mesh, *, names: Sequence[str], rank: int, context: int
    ) -> None:
        self.base, self.names, self.rank, self.context = base, tuple(names), rank, context
        self._mesh = mesh
        self._empty = dict[tuple[int, tuple[str, ...]], Policy]()

    def check_base(self, name: str | None) -> str:
        """Returns the name of a base that is served; raises ``ApiError``, 400."""
        if name not in self.names:
            what = f"base_model: expected one of {', '.join(self.names)}, got {name!r:.120}"
            raise ApiError(400, f"{what}; the server's --names adds names of its base")
        return name

    def check(self, lora: types.LoraConfig | None) -> Lora:
        """Returns rank and matrices that are possible; raises ``ApiError``, 400."""
        if lora is None:
            raise ApiError(400, "lora_config: expected one; full fine-tuning is not offered")
        if not 1 <= lora.rank <= self.rank:
            raise ApiError(400, f"rank: expected 1 to {self.rank} (--rank), got {lora.rank}")
        if not self._targets(fields := lora.model_dump(exclude={"seed"})):
            raise ApiError(400, "expected train_attn, train_mlp or train_unembed")
        return fields

    def draw(self, lora: Lora, seed: int | None) -> Adapter:
        """Draws an adapter that changes nothing yet."""
        seed = secrets.randbelow(1 << 31) if seed is None else seed % (1 << 32)
        empty, rank, targets = self._policy(lora), lora["rank"], self._targets(lora)
        return verbs.fresh(empty, rank=rank, alpha=_ALPHA, targets=targets, seed=seed)

    def policy_of(self, adapter: Adapter | None, lora: Lora) -> Policy:
        """A policy with this adapter, which was trained as ``lora`` says; None: the bare base."""
        empty = self._policy(lora)
        adapter = verbs.fresh(empty, rank=1, alpha=1.0) if adapter is None else adapter
        return verbs.add(empty, 0, adapter)

    def _policy(self, lora: Lora) -> Policy:
        """A policy with one free slot, for adapters of this rank or less."""
        rank, targets = next(r for r in LADDER if r >= lora["rank"]), self._targets(lora)
        if (key := (rank, targets)) not in self._empty:
            empty = on_base(self.base, self._mesh, room=1, rank=rank, targets=targets)
            self._empty[key] = empty
        return self._empty[key]

    def _targets(self, lora: Lora) -> tuple[str, ...]:
        """Matrices that an adapter has, as of ``--lora.targets``."""
        layers = self.base.config.layers
        parts = [layer.mixer for layer in layers] if lora["train_attn"] else []
        parts += [layer.mlp for layer in layers] if lora["train_mlp"] else []
        names = [m.target or name for part in parts for name, m in part.matrices().items()]
        return tuple(dict.fromkeys(names + ["unembed"] * lora["train_unembed"]))

    def write_peft(self, folder: Path, adapter: Adapter) -> None:
        """Writes an adapter as a peft folder."""
        config, source = self.base.config, self.base.source
        factors, layers = cast(peft.Factors, adapter.factors), peft.layers_in(source)
        spelling = dict(config.spelling)
        peft.publish(folder, factors, adapter.alpha, source, layers, config.layers_with, spelling)


BARE = types.LoraConfig(rank=1, train_mlp=False, train_unembed=False).model_dump()
"""Of the base without an adapter."""
