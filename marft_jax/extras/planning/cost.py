"""Counts the FLOPs and bytes that each program of a training step needs at least.

FLOPs and bytes are counted by formulas, because XLA's ``cost_analysis`` counts a loop's body once
and does not count custom kernels. For n tokens in causal rows of length T, with P weights in the
blocks, L layers, H heads of C channels, vocabulary V and width D:

    forward      2 P n + 2 n T H C L + 2 n R N (in + out of each target) L, and 2 V D a token scored
                 (a layer with a sliding window reads at most its window instead of T / 2)
    backward     the forward FLOPs once more for frozen weights, twice more for attention and
                 adapters, plus recomputed parts: the logits, and those of ``model.remat``

Bytes: weights once per pass, the cache that a decode step reads, and activations, written and read
once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh

from marft_jax.extras.planning.compile import Compiled, PlannedRun, per_chip, prompt_rows
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.models.lora import adapted, shape_of
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.parallel import processes
from marft_jax.policy.packing import PackedRows
from marft_jax.settings.config import Algo

PLAYING = ("decode", "prefill")
LEARNING = ("values", "teacher", "gradients", "critic", "optimiser")


class Cost(NamedTuple):
    """Cost of one call of a program on one chip.

    Attributes:
        calls: calls in a training step.
        flops: floating-point operations.
        bytes: bytes read from and written to memory.
    """

    calls: int
    flops: float
    bytes: float


def costs(run: PlannedRun, programs: dict[str, Compiled]) -> dict[str, Cost]:
    """Computes the cost of each program."""
    counted = {
        "decode": _decode,
        "prefill": _prefill,
        "values": _values,
        "teacher": _teacher,
        "gradients": _gradients,
        "critic": _critic,
        "optimiser": _optimiser,
    }
    least = {name: counted[name](run) for name in programs}
    return {
        name: cost._replace(bytes=cost.bytes + 2 * programs[name].scratch)
        for name, cost in least.items()
    }


def forward_flops(
    model: DecoderConfig, tokens: int, read: float, columns: int = 0, targets: Sequence[str] = ()
) -> float:
    """Returns FLOPs from tokens to hidden states.

    Args:
        read: mean number of keys that a token reads; half the width for whole rows.
        columns: total rank of the adapters on ``targets``.
    """
    mixing = sum(layer.mixer.flops(tokens, read) for layer in model.layers)
    products = 2 * active_weights(model) * tokens
    return products + mixing + _lora(model, tokens, columns, targets)


def block_weights(model: DecoderConfig) -> int:
    """Counts the weights in the matrices of all blocks."""
    return sum(x.weights for layers in model.matrices().values() for x in layers)


def active_weights(model: DecoderConfig) -> int:
    """Counts of ``block_weights`` those that a token meets: of experts, the chosen experts."""
    return sum(x.active_weights for layers in model.matrices().values() for x in layers)


def _lora(model: DecoderConfig, tokens: int, columns: int, targets: Sequence[str]) -> int:
    layers = model.adaptable()
    matrices = (x for name in adapted(model, targets) for x in layers[name])
    return 2 * tokens * columns * sum((x.d_in + x.d_out) * max(1, x.chosen) for x in matrices)


def _vocabulary(model: DecoderConfig, tokens: int) -> int:
    return 2 * model.vocab_size * model.d_model * tokens


def _decode(run: PlannedRun) -> Cost:
    """Counts a chunk of decode steps with all slots in use."""
    model, shape, steps = run.model, run.shape, run.shape.chunk
    episodes, turns = (processes.share(n, run.hosts) for n in (run.work.episodes, run.work.turns))
    waves = -(-turns // min(shape.slots, episodes))
    flops = forward_flops(model, shape.slots, shape.context, *_adapters(run))
    flops += _vocabulary(model, shape.slots)
    moved = steps * decode_bytes(run)
    return Cost(waves * -(-shape.longest // steps), steps * flops / run.here.size, moved)


def decode_bytes(run: PlannedRun) -> float:
    """Returns the least bytes of a decode step: weights and cache are read, logits written.

    Of experts, those count that the rows choose if each row chooses at random.

    Embedding tables that are not tied to the logits are left out: a step reads few of their rows. A
    cache counts for each layer that reads it.
    """
    weights = _weights(run.base_here, run.here)
    unread = unread_weights(run.model, run.shape.slots) / block_weights(run.model)
    weights -= unread * _weights(run.base_here["layers"], run.here)
    if not run.model.tie_embeddings:
        weights -= _weights(run.base_here["embed"], run.here)
    if run.model.layer_input:
        weights -= _weights(run.base_here["layer_inputs"]["embedding"], run.here)
    cache = run.slots.cache
    read = [cache[i] for i in run.model.caches] if isinstance(cache, list) else cache
    shards = mesh_lib.row_shards(run.here) * run.here.shape["tensor"]
    logits = 4 * run.shape.slots * run.model.vocab_size / shards
    return per_chip(read) + weights + logits


def unread_weights(model: DecoderConfig, rows: int) -> float:
    """Counts the weights of experts that no row chooses, on average."""
    matrices = (x for layers in model.matrices().values() for x in layers if x.experts)
    return sum(x.weights * (1 - x.chosen / x.experts) ** rows for x in matrices)


def _prefill(run: PlannedRun) -> Cost:
    rows, width = prompt_rows(run)
    turns = processes.share(run.work.turns, run.hosts)
    flops = forward_flops(run.model, rows * width, width / 2, *_adapters(run))
    flops += _vocabulary(run.model, rows)
    return Cost(-(-turns // rows), flops / run.here.size, _weights(run.base_here, run.here))


def _values(run: PlannedRun) -> Cost:
    learning = run.learning
    read = run.batch.rows if run.batch.prompts is None else run.batch.prompts
    micros, tokens, width, actions = _microbatch(read)
    with_reference = learning.reference == "base"
    frozen = learning.has_frozen_critic or with_reference
    adapted = learning.critic is not None and not learning.has_frozen_critic
    flops = frozen * forward_flops(run.model, tokens, width / 2)
    if adapted:
        flops += forward_flops(run.model, tokens, width / 2, *_adapters(run))
    if with_reference:
        flops += _vocabulary(run.model, actions)
    passes = frozen + adapted
    return Cost(micros, flops / run.mesh.size, passes * _weights(run.base, run.mesh))


def _teacher(run: PlannedRun) -> Cost:
    """Counts a pass of a base over what its teachers read."""
    assert run.taught is not None
    micros, tokens, width, actions = _microbatch(run.taught)
    columns = shape_of(run.teachers) if run.teachers else (0, 0)
    of_adapters = math.prod(columns), run.config.lora.targets
    flops = forward_flops(run.model, tokens, width / 2, *of_adapters)
    flops += _vocabulary(run.model, actions)
    return Cost(micros, flops / run.mesh.size, _weights(run.base, run.mesh))


def _gradients(run: PlannedRun) -> Cost:
    micros, _, _, actions = _microbatch(run.batch.rows)
    epochs, reads = run.config.algo.epochs, 2 * _weights(run.base, run.mesh)
    trained, forward = _trained(run)
    vocabulary = _vocabulary(run.model, actions)
    trained += (3 if run.config.algo.part(Algo).entropy_coef else 2) * vocabulary
    scored = (run.learning.correction != "none") + (run.learning.reference == "start")
    trained += scored * (forward + vocabulary) / epochs  # once per step, not per epoch
    reads += scored * _weights(run.base, run.mesh) / epochs
    return Cost(epochs * micros, trained / run.mesh.size, reads)


def _critic(run: PlannedRun) -> Cost:
    calls = run.config.algo.epochs * len(run.batch.rows.rows.tokens.ids_BT)
    if run.learning.has_frozen_critic:  # the heads alone
        return Cost(calls, 0.0, 0.0)
    return Cost(calls, _trained(run)[0] / run.mesh.size, 2 * _weights(run.base, run.mesh))


def _trained(run: PlannedRun) -> tuple[float, float]:
    """FLOPs of a microbatch forwards and backwards through base and adapters, and forwards."""
    _, tokens, width, _ = _microbatch(run.batch.rows)
    forward = forward_flops(run.model, tokens, width / 2)
    lora = _lora(run.model, tokens, *_adapters(run))
    attention = forward - forward_flops(run.model, tokens, 0)
    again = {"none": 0, "products": attention, "block": forward + lora}[run.config.model.remat]
    return 2 * forward + attention + 3 * lora + again, forward + lora


def _microbatch(packed: PackedRows) -> tuple[int, int, int, int]:
    """Returns the number of microbatches; of one: padded tokens, row width, action tokens."""
    micros, height, width = packed.rows.tokens.ids_BT.shape
    return micros, height * width, width, height * packed.rows.actions.mask_BA.shape[2]


def _optimiser(run: PlannedRun) -> Cost:
    """Counts parameters and two moments, read and written, and gradients, read."""
    steps = run.config.algo.epochs * run.config.algo.minibatches
    return Cost(steps, 0.0, 7 * (per_chip(run.state.adapters) + per_chip(run.state.critic)))


def _weights(base: Any, mesh: Mesh) -> float:
    """Returns bytes of weights that a chip reads per pass, with those that ``fsdp`` gathers."""
    return per_chip(base) * mesh.shape["fsdp"]


def _adapters(run: PlannedRun) -> tuple[int, tuple[str, ...]]:
    return sum(run.team.adapters.values()) * run.config.lora.rank, run.config.lora.targets
