"""The step of anyone who has token ids: a base with its adapters, and verbs on data.

``README.md`` has a loop. ``pack`` makes rows once, which every pass reads; what a pass finds comes
back by datum, in the order of the data. What one datum gives depends on no other adapter's data,
bit for bit on a CPU in float32, as the data of each adapter are packed on their own, unless a
caller packs them in blocks, as the trainer of a team does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from marft_jax.errors import BadInput
from marft_jax.models import lora
from marft_jax.models.weights.load import BaseModel, load_base
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.policy import optimiser, programs
from marft_jax.policy.critic import Critic, CriticSpec
from marft_jax.policy.data import Datum
from marft_jax.policy.gradients import CriticSums, GradientSpec, GradientSums
from marft_jax.policy.objective import LOSSES, Inputs, Loss, Objective
from marft_jax.policy.optimiser import Adam, PolicyState
from marft_jax.policy.packing import PackedRows, pack_rows
from marft_jax.policy.rows import Rows, microbatches
from marft_jax.settings.config import Mesh as MeshSettings
from marft_jax.settings.config import Model
from marft_jax.types import Level

_TOKENS = 8192  # in one forward and backward pass


class Policy(NamedTuple):
    """Adapters over one base, in slots of a stack; the verbs return a new one.

    Attributes:
        state: adapters and Adam's state, leading axis N slots, of the largest rank. An adapter of a
            smaller rank, or of fewer matrices, is filled with zeros, which have no gradient.
            Without adapters the policy is the base itself.
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

    @property
    def as_arguments(self) -> dict[str, Any]:
        """The policy as compiled functions take it."""
        adapters = self.state.adapters or None
        return {"base": self.base.params, "adapters": adapters, "scale": self.scale_N}


class Part(NamedTuple):
    """Data in rows on a mesh.

    Attributes:
        numbers: of the data, in the order of the caller.
        host: their rows on the host, and where each datum stands in them.
        level: what a unit of a loss is, where the loss does not say.
        rows, inputs: of each microbatch; inputs are what data carry to a loss.
        features: what a critic read of each microbatch.
    """

    numbers: Sequence[int]
    host: PackedRows
    level: Level
    rows: list[Rows[jax.Array]]
    inputs: list[Inputs] = []
    features: list[jax.Array | None] = []


class Packed(NamedTuple):
    """Data on a mesh, read by every pass."""

    mesh: Mesh
    parts: tuple[Part, ...]

    def microbatches(
        self, blocks: Sequence[int] | np.ndarray | None = None
    ) -> Iterator[tuple[Part, int]]:
        """Each microbatch: its part, and its number there; None: of all blocks."""
        for part in self.parts:
            of_blocks = np.arange(len(part.rows)).reshape(part.host.blocks, -1)
            chosen = of_blocks if blocks is None else of_blocks[[*blocks]]
            yield from ((part, u) for u in chosen.ravel().tolist())

    def by_datum(self, read: Sequence[jax.Array], level: Level | None = None) -> list[np.ndarray]:
        """Numbers of the units (``action``) or learned tokens (``token``) of each datum.

        Args:
            read: of each microbatch, ``[B, K or A, ...]``; of parts whose units differ, the level
                is that of each part.
        """
        by_number, rest = dict[int, np.ndarray](), iter(mesh_lib.fetch(list(read)))
        for part in self.parts:
            x = np.stack([next(rest) for _ in part.rows])
            of_part = part.host.by_datum(x, level or part.level)
            by_number |= dict(zip(part.numbers, of_part, strict=True))
        return [by_number[i] for i in range(len(by_number))]

    def carry(
        self,
        level: Level,
        units: Mapping[str, Sequence[np.ndarray]],
        tokens: Mapping[str, Sequence[np.ndarray]],
    ) -> Packed:
        """Lets the data of one part carry numbers to a loss; see ``objective.Inputs``.

        Args:
            level: what a unit is.
            units, tokens: numbers by name, of the units and of the learned tokens of each datum.
        """
        [part] = self.parts
        mask = part.host.rows.decision_mask(level)
        of_units: Any = {"weights": mask, "counts": np.zeros_like(mask)}
        of_units |= {name: part.host.in_rows(x, level) for name, x in units.items()}
        of_tokens: Any = {name: part.host.in_rows(x, "token") for name, x in tokens.items()}
        inputs = microbatches(Inputs(of_units, of_tokens))
        part = part._replace(inputs=mesh_lib.put(inputs, mesh_lib.rows(self.mesh)))
        return self._replace(parts=(part,))


class DatumResult(NamedTuple):
    """What a forward and backward pass computes for one datum.

    Attributes:
        logprobs: of its learned tokens, ``[A]``.
        losses: of its units.
    """

    logprobs: np.ndarray
    losses: np.ndarray


class Results(NamedTuple):
    """Results of a forward and backward pass, still on the mesh."""

    packed: Packed
    read: list[tuple[jax.Array, jax.Array]]

    def by_datum(self) -> list[DatumResult]:
        """Fetches the results of each datum, in the order of the data."""
        logprobs, losses = zip(*self.read, strict=True)
        columns = self.packed.by_datum(logprobs, "token"), self.packed.by_datum(losses)
        return list(map(DatumResult, *columns))


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


def policy_of(base: BaseModel, mesh: Mesh, state: PolicyState, alpha: float) -> Policy:
    """The policy of a full stack, whose adapters all have its rank; or of the base alone, where
    there are no adapters."""
    n, rank = lora.shape_of(state.adapters) if state.adapters else (0, 1)
    return Policy(base, mesh, state, np.full(n, rank), np.full(n, alpha))


def pack(policy: Policy, data: Sequence[Datum]) -> Packed:
    """Packs data for this policy and those on the same base and mesh, the data of each adapter, and
    those with other inputs, on their own.

    Raises:
        BadInput: a datum of a free slot, or tokens that the base lacks.
    """
    groups, config = dict[Any, list[int]](), policy.base.config
    for i, datum in enumerate(data):
        check_slot(policy, datum.owner, f"data[{i}].owner", used=True)
        for name, ids in (("ids", datum.ids), ("targets", datum.targets)):
            if ids.min() < 0 or ids.max() >= config.vocab_size:
                raise BadInput(
                    f"data[{i}].{name}: expected tokens from 0 to {config.vocab_size - 1}, got "
                    f"{ids.min()} to {ids.max()}"
                )
        level: Level = "token" if datum.units[-1] + 1 == len(datum.targets) else "action"
        key = level, datum.owner, datum.forbidden is None, *sorted(datum.inputs)
        groups.setdefault(key, []).append(i)
    if not groups:
        raise BadInput("expected data, got none")
    parts = list[Part]()
    for (level, *_), numbers in groups.items():
        alike = [data[i] for i in numbers]
        host = pack_rows(
            alike, [range(len(alike))], _TOKENS, shards=mesh_lib.row_shards(policy.mesh),
            rng=np.random.default_rng(0), branches=config.branches, d_model=config.d_model,
        )  # fmt: skip
        units = {name: [datum.inputs[name] for datum in alike] for name in alike[0].inputs}
        [part] = place(policy.mesh, host, level).carry(level, units, {}).parts
        parts.append(part._replace(numbers=numbers))
    return Packed(policy.mesh, tuple(parts))


def place(mesh: Mesh, host: PackedRows, level: Level = "action") -> Packed:
    """Puts packed rows on a mesh, as one part; ``level``: as of ``Part``."""
    rows = [mesh_lib.put(micro, mesh_lib.rows(mesh)) for micro in microbatches(host.rows)]
    return Packed(mesh, (Part(range(len(host.counts)), host, level, rows),))


def forward(policy: Policy, packed: Packed) -> list[np.ndarray]:
    """Log-probs of the learned tokens of each datum, ``[A]``."""
    run = programs.forward(policy.mesh, policy.base.graphdef)
    return packed.by_datum(_each(policy, packed, run), "token")


def top(policy: Policy, packed: Packed, k: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The k likeliest tokens at the place of each learned token of each datum, the likeliest first:
    (ids, log-probs), ``[A, k]`` each."""
    read = _each(policy, packed, programs.top(policy.mesh, policy.base.graphdef, k))
    ids, logprobs = (packed.by_datum(x, "token") for x in zip(*read, strict=True))
    return list(zip(ids, logprobs, strict=True))


def _each(policy: Policy, packed: Packed, run: programs.Compiled) -> list[Any]:
    """What a program computes for each microbatch."""
    policy_arrays = policy.as_arguments
    return [run(**policy_arrays, r=part.rows[u]) for part, u in packed.microbatches()]


def forward_backward(
    policy: Policy,
    packed: Packed,
    loss: Loss | str | Objective,
    sums: GradientSums | None = None,
    *,
    labels: int | None = None,
    blocks: Sequence[int] | np.ndarray | None = None,
    check: Callable[[], object] = lambda: None,
) -> tuple[GradientSums, Results]:
    """Gradient sums of each adapter: Σ over the units of its data of weight · loss.

    Args:
        loss: a name of ``LOSSES``, a pure function of (log-probs of units, their inputs), or a
            whole objective. It is compiled once for each function, so make it once.
        sums: of earlier calls since the last step, to which these are added; they are donated.
        labels: number of labels of the data; None: as many as slots.
        blocks: of the packed data; None: all.
        check: is called before every microbatch; what it raises ends the pass.

    Raises:
        BadInput: there is no such loss, or it has not one number for each unit.
    """
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise BadInput(f"loss: expected one of {[*LOSSES]}, or a function, got {loss!r:.80}")
        loss = LOSSES[loss]

    def programs_at(level: Level) -> programs.GradientPrograms:
        objective = loss if isinstance(loss, Objective) else Objective(level, loss)
        spec = GradientSpec(policy.base.graphdef, objective, labels or len(policy.rank_N))
        return programs.of_gradients(policy.mesh, spec)

    policy_arrays, read = policy.as_arguments, list[Any]()
    total = programs_at("action").no_sums(policy.state.adapters) if sums is None else sums
    for part, u in packed.microbatches(blocks):
        check()
        total, of_microbatch = programs_at(part.level).accumulate(
            **policy_arrays, rows=part.rows[u], inputs=part.inputs[u], sums=total
        )
        read.append(of_microbatch)
    return total, Results(packed, read)


def optim_step(
    policy: Policy, sums: GradientSums, rule: Adam, *, donate: bool = False
) -> tuple[Policy, jax.Array]:
    """Takes a step of Adam for each adapter that has data in the sums; also returns the norms of
    the gradients, ``[N]``.

    Args:
        sums: of ``forward_backward`` calls. What they hold of an adapter is divided by the sum of
            its units' ``counts``, if these are given: counts of 1 make a mean.
        rule: see ``optimiser.adam``; each number is for all slots, or an array over them.
        donate: the new state takes the memory of the old one, which ends.
    """
    state = policy.state if donate else jax.tree.map(jnp.copy, policy.state)
    state, norm_N = programs.optim_step(policy.mesh)(policy=state, sums=sums, rule=rule)
    return policy._replace(state=state), norm_N


def read_critic(
    policy: Policy, spec: CriticSpec, critic: Critic, packed: Packed
) -> tuple[Packed, list[np.ndarray], list[np.ndarray] | None]:
    """Reads a critic over the base.

    Returns:
        (the data with what the critic read of them, the value of each unit of each datum,
        log-probs of learned tokens under the base where the spec asks for them).
    """
    run, params = programs.of_critic(policy.mesh, spec).read, policy.base.params
    read = [run(base=params, critic=critic, r=part.rows[u]) for part, u in packed.microbatches()]
    [part] = packed.parts
    packed = packed._replace(parts=(part._replace(features=[x.features_BXD for x in read]),))
    logprobs = None
    if spec.with_logprobs:
        logprobs = packed.by_datum([x.logprobs_BA for x in read], "token")
    return packed, packed.by_datum([x.values_BX for x in read], spec.level), logprobs


def critic_step(
    policy: Policy,
    spec: CriticSpec,
    critic: Critic,
    critic_opt: Critic,
    packed: Packed,
    rule: Adam,
    *,
    blocks: Sequence[int] | np.ndarray | None = None,
    check: Callable[[], object] = lambda: None,
) -> tuple[Critic, Critic, CriticSums, jax.Array]:
    """Takes a step of a critic, which is donated with its optimiser.

    Args:
        packed: as of ``read_critic``; the data carry what the critic's loss reads.
        rule, blocks, check: as of ``optim_step`` and ``forward_backward``.

    Returns:
        (critic, its optimiser, its gradient sums, the gradient norms of its parts).
    """
    run, params = programs.of_critic(policy.mesh, spec), policy.base.params
    sums = run.no_sums(critic)
    for part, u in packed.microbatches(blocks):
        check()
        arrays = {"rows": part.rows[u], "inputs": part.inputs[u], "features_BXD": part.features[u]}
        sums = run.accumulate(base=params, critic=critic, **arrays, sums=sums)
    critic, critic_opt, norm_M = run.step(
        critic=critic, critic_opt=critic_opt, sums=sums, rule=rule
    )
    return critic, critic_opt, sums, norm_M


def check_slot(policy: Policy, slot: int, what: str = "slot", used: bool = False) -> None:
    """Raises ``BadInput`` for a slot that the policy lacks, or that is free and must be used."""
    if not 0 <= slot < len(policy.rank_N) or (used and not policy.rank_N[slot]):
        wanted = "a slot with an adapter" if used else "a slot"
        raise BadInput(f"{what}: expected {wanted}, from 0 to {len(policy.rank_N) - 1}, got {slot}")
