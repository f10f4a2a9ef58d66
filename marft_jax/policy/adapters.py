"""Adapters in the slots of a policy: drawn, put in, taken out, written and read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from safetensors import safe_open
from safetensors.numpy import save_file

from marft_jax.errors import BadInput
from marft_jax.formats.foreign import readable
from marft_jax.models import lora
from marft_jax.policy.optimiser import PolicyState
from marft_jax.policy.policy import Policy, check_slot


class Adapter(NamedTuple):
    """One adapter by itself, on the host.

    Attributes:
        factors: ``{"q": {"a", "b"}, ...}`` of its rank.
        moments: Adam's means and mean squares, as ``factors``; None: it begins anew.
        count: Adam's steps.
    """

    alpha: float
    factors: lora.Adapters
    moments: tuple[lora.Adapters, lora.Adapters] | None = None
    count: int = 0

    @property
    def rank(self) -> int:
        return next(iter(self.factors.values()))["a"].shape[-1]


def fresh(
    policy: Policy, *, rank: int, alpha: float, targets: Sequence[str] | None = None, seed: int = 0
) -> Adapter:
    """Draws an adapter that changes nothing yet, for ``add``.

    Args:
        targets: its matrices; None: all that the policy has.

    Raises:
        BadInput: the base lacks the targets.
    """
    config, stacks = policy.base.config, {*policy.state.adapters}
    every = lora.ALL_LINEAR, "experts", lora.UNEMBED
    kinds = [kind for kind in every if stacks & {*lora.adapted(config, [kind])}]
    lora.check_targets([config], chosen := targets or kinds)
    drawn = lora.init(jax.random.key(seed), config, adapters=[0], rank=rank, targets=chosen)
    factors = {name: pair for name, pair in drawn.items() if targets or name in stacks}
    return Adapter(alpha, jax.tree.map(lambda x: np.asarray(x[0]), factors))


def add(policy: Policy, slot: int, adapter: Adapter) -> Policy:
    """Puts an adapter into a slot, in place of what is there.

    Raises:
        BadInput: its rank or its matrices do not fit into the stack, or there is no such slot.
    """
    check_slot(policy, slot)
    _, largest = lora.shape_of(policy.state.adapters)
    unknown = [*adapter.factors.keys() - policy.state.adapters.keys()]
    if unknown or not 1 <= adapter.rank <= largest:
        raise BadInput(
            f"an adapter: expected rank 1 to {largest} and matrices of "
            f"{', '.join(policy.state.adapters)}, got rank {adapter.rank} and "
            f"{', '.join(adapter.factors)}; open the policy with a larger rank or more targets"
        )
    zeros = jax.tree.map(np.zeros_like, adapter.factors)
    mu, nu = adapter.moments or (zeros, zeros)
    opt = policy.adam._replace(
        count=policy.adam.count.at[slot].set(adapter.count),
        mu=_written(policy.adam.mu, slot, mu),
        nu=_written(policy.adam.nu, slot, nu),
    )
    state = policy.state._replace(
        adapters=_written(policy.state.adapters, slot, adapter.factors),
        adapters_opt=(optax.EmptyState(), opt),
    )
    return _with(policy, slot, state, adapter.rank, adapter.alpha)


def drop(policy: Policy, slot: int) -> Policy:
    """Frees a slot."""
    check_slot(policy, slot)
    state = jax.tree.map(lambda x: x.at[slot].set(0), policy.state)
    return _with(policy, slot, state, 0, 1.0)


def _with(policy: Policy, slot: int, state: PolicyState, rank: int, alpha: float) -> Policy:
    rank_N, alpha_N = policy.rank_N.copy(), policy.alpha_N.copy()
    rank_N[slot], alpha_N[slot] = rank, alpha
    return policy._replace(state=state, rank_N=rank_N, alpha_N=alpha_N)


def _written(stack: lora.Adapters, slot: int, factors: Mapping[str, Any]) -> lora.Adapters:
    """The stack with these factors in a slot."""
    return jax.tree.map(lambda x, new: x.at[slot].set(new), stack, lora.padded(factors, stack))


def take(policy: Policy, slot: int) -> Adapter:
    """The adapter of a slot, with its optimiser; raises ``BadInput`` for a free slot."""
    check_slot(policy, slot, used=True)
    rank = int(policy.rank_N[slot])

    def of_slot(stack: lora.Adapters) -> lora.Adapters:
        factors = {}
        for name, pair in stack.items():
            if np.any(policy.state.adapters[name]["a"][slot]):  # of what it adapts, A was drawn
                a, b = (np.asarray(pair[kind][slot]) for kind in ("a", "b"))
                factors[name] = {"a": a[..., :rank], "b": b[..., :rank, :]}
        return factors

    factors, mu, nu = map(of_slot, (policy.state.adapters, policy.adam.mu, policy.adam.nu))
    return Adapter(float(policy.alpha_N[slot]), factors, (mu, nu), int(policy.adam.count[slot]))


def save(adapter: Adapter, file: Path | str) -> None:
    """Writes an adapter, with its optimiser if it has one, as safetensors."""
    trees = {"adapter": adapter.factors}
    if adapter.moments is not None:
        trees |= dict(zip(("mean", "square"), adapter.moments, strict=True))
    tensors = {
        f"{tree}.{name}.{kind}": np.ascontiguousarray(x)
        for tree, pairs in trees.items()
        for name, pair in pairs.items()
        for kind, x in pair.items()
    }
    facts = {"alpha": repr(adapter.alpha), "count": str(adapter.count)}
    save_file(tensors, file, facts)


def load(file: Path | str) -> Adapter:
    """Reads what ``save`` wrote.

    Raises:
        BadInput: it is no such file.
    """
    trees: dict[str, lora.Adapters] = {"adapter": {}, "mean": {}, "square": {}}
    with readable(file, "an adapter"), safe_open(file, "numpy") as opened:
        facts = opened.metadata() or {}
        if not {"alpha", "count"} <= facts.keys():
            raise BadInput(f"{file}: expected an adapter that policy.save wrote, got other tensors")
        for key in opened.keys():  # noqa: SIM118: no mapping
            tree, name, kind = key.split(".")
            trees[tree].setdefault(name, {})[kind] = opened.get_tensor(key)
    moments = (trees["mean"], trees["square"]) if trees["mean"] else None
    return Adapter(float(facts["alpha"]), trees["adapter"], moments, int(facts["count"]))
