"""The step of anyone who has token ids: adapters over a base, and verbs on data.

``README.md`` has a loop. Data of several adapters and of several losses may be in one call. What
one datum gives depends on no other adapter's data, bit for bit on a CPU in float32, as the data of
each adapter and loss are packed on their own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from safetensors import safe_open
from safetensors.numpy import save_file

from marft_jax.config import Mesh as MeshSettings
from marft_jax.config import Model
from marft_jax.errors import BadInput
from marft_jax.formats.foreign import readable
from marft_jax.learning.batch import microbatches
from marft_jax.learning.state import PolicyState
from marft_jax.models import lora
from marft_jax.models.weights.load import BaseModel, load_base
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.policy import optimiser
from marft_jax.policy.data import Datum
from marft_jax.policy.gradients import PolicySpec, Sums
from marft_jax.policy.logprobs import Graph, top_tokens
from marft_jax.policy.objective import LOSSES, Inputs, Loss, Objective
from marft_jax.policy.optimiser import Adam
from marft_jax.policy.packing import Packed, pack
from marft_jax.policy.programs import Compiled, Compiling
from marft_jax.policy.rows import Level

_TOKENS = 8192  # in one forward and backward pass
_NO_LOSS = Objective("token", LOSSES["cross_entropy"])  # of programs that compute none


class Policy(NamedTuple):
    """Adapters over one base, in slots of a stack; the verbs return a new one.

    Attributes:
        state: adapters and Adam's state, leading axis N slots, of the largest rank. An adapter of a
            smaller rank, or of fewer matrices, is filled with zeros, which have no gradient.
        rank_N, alpha_N: of each slot's own adapter; rank 0: the slot is free.
    """

    base: BaseModel
    mesh: Mesh
    state: PolicyState
    rank_N: np.ndarray
    alpha_N: np.ndarray

    @property
    def adam(self) -> Any:
        """Adam's state, ``optax.ScaleByAdamState``, leading axis N."""
        _, adam = self.state.adapters_opt  # type: ignore[misc]
        return adam

    @property
    def scale_N(self) -> np.ndarray:
        """alpha/rank of each adapter."""
        return (self.alpha_N / np.maximum(self.rank_N, 1)).astype(np.float32)


class Adapter(NamedTuple):
    """One adapter by itself, on the host.

    Attributes:
        factors: ``{"q": {"a", "b"}, ...}`` of its own rank.
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


class Learned(NamedTuple):
    """What a pass found of one datum.

    Attributes:
        logprobs: of its learned tokens, ``[A]``.
        losses: of its units.
    """

    logprobs: np.ndarray
    losses: np.ndarray


def open_policy(
    model: Model | str, *, room: int, rank: int, targets: Sequence[str] = (lora.ALL_LINEAR,)
) -> Policy:
    """Opens a base on all devices, with a stack of free slots.

    Args:
        model: settings of the base, or its name as of ``--model.base``.
        room: number of slots.
        rank: largest rank of an adapter.
        targets: matrices that an adapter may have, as of ``--lora.targets``.

    Raises:
        BadInput: there is no such base, or it lacks the targets.
    """
    mesh = mesh_lib.make_mesh(MeshSettings())
    settings = Model(base=model) if isinstance(model, str) else model
    base = load_base(settings, mesh_lib.placer(mesh), mesh.devices.flat[0].platform)
    return on_base(base, mesh, room=room, rank=rank, targets=targets)


def on_base(base: BaseModel, mesh: Mesh, *, room: int, rank: int, targets: Sequence[str]) -> Policy:
    """A stack of free slots over a base that others may share; arguments as of ``open_policy``."""
    lora.check_targets([base.config], targets)
    adapters = lora.empty(base.config, adapters=room, rank=rank, targets=targets)
    state = PolicyState(adapters, optimiser.init(adapters))
    state = jax.device_put(state, mesh_lib.replicated(mesh))
    return Policy(base, mesh, state, np.zeros(room, int), np.ones(room))


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
    own = {name: pair for name, pair in drawn.items() if targets or name in stacks}
    return Adapter(alpha, jax.tree.map(lambda x: np.asarray(x[0]), own))


def add(policy: Policy, slot: int, adapter: Adapter) -> Policy:
    """Puts an adapter into a slot, in place of what is there.

    Raises:
        BadInput: its rank or its matrices do not fit into the stack, or there is no such slot.
    """
    _check_slot(policy, slot)
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
    _check_slot(policy, slot)
    state = jax.tree.map(lambda x: x.at[slot].set(0), policy.state)
    return _with(policy, slot, state, 0, 1.0)


def _check_slot(policy: Policy, slot: int, what: str = "slot", used: bool = False) -> None:
    """Raises ``BadInput`` for a slot that the policy lacks, or that is free and must be used."""
    free = used and 0 <= slot < len(policy.rank_N) and not policy.rank_N[slot]
    if free or not 0 <= slot < len(policy.rank_N):
        wanted = "a slot with an adapter" if used else "a slot"
        raise BadInput(f"{what}: expected {wanted}, from 0 to {len(policy.rank_N) - 1}, got {slot}")


def _with(policy: Policy, slot: int, state: PolicyState, rank: int, alpha: float) -> Policy:
    rank_N, alpha_N = policy.rank_N.copy(), policy.alpha_N.copy()
    rank_N[slot], alpha_N[slot] = rank, alpha
    return policy._replace(state=state, rank_N=rank_N, alpha_N=alpha_N)


def _written(stack: lora.Adapters, slot: int, factors: Mapping[str, Any]) -> lora.Adapters:
    """The stack with these factors in a slot."""
    return jax.tree.map(lambda x, own: x.at[slot].set(own), stack, lora.padded(factors, stack))


def take(policy: Policy, slot: int) -> Adapter:
    """The adapter of a slot, with its optimiser; raises ``BadInput`` for a free slot."""
    _check_slot(policy, slot, used=True)
    rank = int(policy.rank_N[slot])

    def own(stack: lora.Adapters) -> lora.Adapters:
        found = {}
        for name, pair in stack.items():
            if np.any(policy.state.adapters[name]["a"][slot]):  # of what it adapts, A was drawn
                a, b = (np.asarray(pair[kind][slot]) for kind in ("a", "b"))
                found[name] = {"a": a[..., :rank], "b": b[..., :rank, :]}
        return found

    factors, moments = own(policy.state.adapters), (own(policy.adam.mu), own(policy.adam.nu))
    return Adapter(float(policy.alpha_N[slot]), factors, moments, int(policy.adam.count[slot]))


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
            raise BadInput(
                f"{file}: expected an adapter that learning.save wrote, got other tensors"
            )
        for key in opened.keys():  # noqa: SIM118: no mapping
            tree, name, kind = key.split(".")
            trees[tree].setdefault(name, {})[kind] = opened.get_tensor(key)
    moments = (trees["mean"], trees["square"]) if trees["mean"] else None
    return Adapter(float(facts["alpha"]), trees["adapter"], moments, int(facts["count"]))


def forward(policy: Policy, data: Sequence[Datum]) -> list[np.ndarray]:
    return _through(policy, data, _compiled(policy, _NO_LOSS)["forward"])


def top(policy: Policy, data: Sequence[Datum], k: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The k likeliest tokens at the place of each learned token of each datum, the likeliest first:
    (ids, log-probs), ``[A, k]`` each."""
    run = _top(policy.mesh, policy.base.graphdef, k)
    return _through(policy, data, run)


def _through(policy: Policy, data: Sequence[Datum], run: Compiled) -> list[Any]:
    """What a pass finds of the learned tokens of each datum."""
    found, on = dict[int, Any](), {"base": policy.base.params, "adapters": policy.state.adapters}
    for numbers, packed, _ in _packed(policy, data, [None] * len(data)):
        rows = [
            mesh_lib.put(micro, mesh_lib.rows(policy.mesh)) for micro in microbatches(packed.rows)
        ]
        told = mesh_lib.fetch([run(**on, scale=policy.scale_N, r=micro) for micro in rows])
        whole, form = jax.tree.flatten(jax.tree.map(lambda *x: np.stack(x), *told))
        sizes = [len(data[i].targets) for i in numbers]
        tokens = [x.reshape(-1, *x.shape[3:])[packed.tokens] for x in whole]
        parts = [_by_datum(numbers, x, sizes) for x in tokens]
        found |= {i: form.unflatten([part[i] for part in parts]) for i in numbers}
    return [found[i] for i in range(len(data))]


def forward_backward(
    policy: Policy,
    data: Sequence[Datum],
    loss: Loss | str | Sequence[Loss | str],
    sums: Sums | None = None,
) -> tuple[Sums, list[Learned]]:
    """Gradient sums of each adapter: Σ over the units of its data of weight · loss.

    Args:
        loss: of all data, or one for each: a name of ``LOSSES``, or a pure function of (log-probs
            of units, their inputs). It is compiled once for each function, so make it once.
        sums: of earlier calls since the last step, to which these are added; they are donated.
    """
    each = [loss] * len(data) if isinstance(loss, str) or callable(loss) else loss
    if len(data) != len(each) or (unknown := {x for x in each if isinstance(x, str)} - {*LOSSES}):
        got = f"{len(each)} for {len(data)} data" if len(data) != len(each) else str(unknown)
        raise BadInput(f"loss: expected one, or one for each datum, of {[*LOSSES]}, got {got:.80}")
    chosen = [LOSSES[one] if isinstance(one, str) else one for one in each]
    found, split = dict[int, Learned](), mesh_lib.rows(policy.mesh)
    for numbers, packed, level in _packed(policy, data, chosen):
        own = [data[i] for i in numbers]
        sizes = [int(datum.units[-1]) + 1 for datum in own]
        run = _compiled(policy, Objective(level, chosen[numbers[0]]))
        sums = run["no_sums"](policy.state.adapters) if sums is None else sums
        inputs, told = _inputs(own, packed, level), list[Any]()
        for u, rows in enumerate(microbatches(packed.rows)):
            one = Inputs({name: x[u] for name, x in inputs.items()}, {})
            rows, one = mesh_lib.put((rows, one), split)
            sums, numbers_of = run["accumulate"](
                base=policy.base.params,
                adapters=policy.state.adapters,
                scale=policy.scale_N,
                rows=rows,
                inputs=one,
                sums=sums,
            )
            told.append(numbers_of)
        logprobs, losses = (
            np.stack(x).reshape(-1) for x in zip(*mesh_lib.fetch(told), strict=True)
        )
        tokens = _by_datum(numbers, logprobs[packed.tokens], [len(x.targets) for x in own])
        units = _by_datum(numbers, losses[packed.places(level)], sizes)
        found |= {i: Learned(tokens[i], units[i]) for i in numbers}
    if sums is None:
        raise BadInput("forward_backward: expected data, got none")
    return sums, [found[i] for i in range(len(data))]


def optim_step(policy: Policy, sums: Sums, how: Adam) -> tuple[Policy, np.ndarray]:
    """Takes a step of Adam for each adapter that has data in the sums; also returns the norms of
    the gradients, ``[N]``.

    Args:
        sums: of ``forward_backward`` calls. What they hold of an adapter is divided by the sum of
            its units' ``counts``, if these are given: counts of 1 make a mean.
        how: see ``optimiser.adam``; each number is for all slots, or an array over them.
    """
    run = _compiled(policy, _NO_LOSS)["optim_step"]
    state = jax.tree.map(jnp.copy, policy.state)  # is donated, and the policy stays
    state, norm_N = run(policy=state, sums=sums, how=how)
    return policy._replace(state=state), np.asarray(norm_N)


def _compiled(policy: Policy, objective: Objective) -> dict[str, Compiled]:
    slots, _ = lora.shape_of(policy.state.adapters)
    return _programs(policy.mesh, PolicySpec(policy.base.graphdef, objective, labels=slots))


@functools.lru_cache(maxsize=64)
def _programs(mesh: Mesh, spec: PolicySpec) -> dict[str, Compiled]:
    return Compiling(mesh).policy(spec)


@functools.lru_cache(maxsize=16)
def _top(mesh: Mesh, graphdef: Graph, k: int) -> Compiled:
    compiling = Compiling(mesh)
    return compiling(mesh_lib.rows(mesh), top_tokens, graphdef, k, **compiling.options)


def _packed(
    policy: Policy, data: Sequence[Datum], losses: Sequence[Loss | None]
) -> list[tuple[list[int], Packed, Level]]:
    """Packs the data of each adapter, loss and names of inputs, with and without masks, on their
    own, with their numbers and what their units are."""
    groups, config = dict[Any, list[int]](), policy.base.config
    for i, (datum, loss) in enumerate(zip(data, losses, strict=True)):
        _check_slot(policy, datum.owner, f"data[{i}].owner", used=True)
        for name, ids in (("ids", datum.ids), ("targets", datum.targets)):
            if ids.min() < 0 or ids.max() >= config.vocab_size:
                raise BadInput(
                    f"data[{i}].{name}: expected tokens from 0 to {config.vocab_size - 1}, got "
                    f"{ids.min()} to {ids.max()}"
                )
        level: Level = "token" if datum.units[-1] + 1 == len(datum.targets) else "action"
        key = level, datum.owner, loss, datum.forbidden is None, *sorted(datum.inputs)
        groups.setdefault(key, []).append(i)
    how = {"shards": mesh_lib.row_shards(policy.mesh), "d_model": config.d_model}
    return [
        (
            own,
            pack(
                [data[i] for i in own], [range(len(own))], _TOKENS,
                rng=np.random.default_rng(0), branches=config.branches, **how,
            ),
            key[0],
        )
        for key, own in groups.items()
    ]  # fmt: skip


def _inputs(data: Sequence[Datum], packed: Packed, level: Level) -> dict[str, np.ndarray]:
    """Numbers of the units of data where they stand in rows, ``[U, B, X]``; 0 for padding."""
    mask, places = packed.rows.decision_mask(level), packed.places(level)
    found = {"weights": mask, "counts": np.zeros_like(mask)}
    for name in data[0].inputs:
        found[name] = np.zeros_like(mask)
        found[name].flat[places] = np.concatenate([datum.inputs[name] for datum in data])
    return found


def _by_datum(
    numbers: Sequence[int], flat: np.ndarray, sizes: Sequence[int]
) -> dict[int, np.ndarray]:
    return dict(zip(numbers, np.split(flat, np.cumsum(sizes)[:-1]), strict=True))
