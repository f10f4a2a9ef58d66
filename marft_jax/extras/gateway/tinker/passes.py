"""Datums of the API as data of the learner, the table of losses, and what a pass answers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from marft_jax import policy as verbs
from marft_jax.errors import BadInput
from marft_jax.extras.gateway.tinker import wire
from marft_jax.extras.gateway.tinker.wire import Given, Pass
from marft_jax.policy import Datum, losses
from marft_jax.policy.gradients import GradientSums
from marft_jax.policy.objective import Loss
from marft_jax.policy.policy import Policy

PIECE = 8192  # tokens of a call that are done before another client's turn
_Inputs = Mapping[str, jax.Array]


def _clipping(loss: Callable[..., jax.Array]) -> Loss:
    return lambda logprobs, x: loss(
        logprobs, x["old"], x["advantages"], x["clip_low_threshold"], x["clip_high_threshold"]
    )


_ppo = _clipping(losses.clipped_policy_loss)


def _dro(logprobs: jax.Array, x: _Inputs) -> jax.Array:
    return 0.5 * x["beta"] * (logprobs - x["old"]) ** 2 - logprobs * x["advantages"]


def _gspo(logprobs: jax.Array, x: _Inputs) -> jax.Array:
    """Each token has the ratio of its sequence, and the gradient of its own log-prob."""
    now = jax.lax.stop_gradient(logprobs)
    return _ppo(logprobs, {**x, "old": now - x["log_ratio"]})


class _Kind(NamedTuple):
    """A loss, its required inputs, and inputs with a value where they are left out. Inputs that are
    numbers may also be settings of the call."""

    loss: Loss
    needs: tuple[str, ...] = ("logprobs", "advantages")
    usual: Mapping[str, float] = {}


_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: dict[str, _Kind] = {
    "cross_entropy": _Kind(verbs.LOSSES["cross_entropy"], (), {"weights": 1.0}),
    "importance_sampling": _Kind(verbs.LOSSES["importance_sampling"]),
    "ppo": _Kind(_ppo, usual=_CLIP),
    "cispo": _Kind(_clipping(losses.cispo), usual=_CLIP),
    "dro": _Kind(_dro, usual={"beta": np.nan}),
    "gspo": _Kind(_gspo, ("logprobs", "advantages", "sequence_ratio_mask"), _CLIP),
}
_SETTINGS = {*_CLIP, "beta"}


class Example(NamedTuple):
    """A datum for the learner, with the shape in which its log-probs are answered."""

    datum: Datum
    shape: tuple[int, ...]
    mask: np.ndarray | None = None  # of ``gspo``


def _kind_of(call: Pass) -> _Kind:
    """Finds a loss and checks its settings; raises ``BadInput``."""
    if call.loss not in LOSSES:
        why = "its objective is not published; use loss_fn=importance_sampling"
        why = why if call.loss == "stable_reinforce" else "it is unknown"
        raise BadInput(f"loss_fn {call.loss!r:.60}: {why} (offered: {', '.join(LOSSES)})")
    kind = LOSSES[call.loss]
    known = _SETTINGS & {*kind.usual}
    for name, value in call.settings.items():
        if name not in known or isinstance(value, str) or not np.isfinite(value):
            what = f"numbers for {', '.join(sorted(known)) or 'no setting'}"
            raise BadInput(
                f"loss_fn_config of {call.loss}: expected {what}, got {name}={value!r:.60}"
            )
    if call.loss == "dro" and "beta" not in call.settings:
        raise BadInput("loss_fn_config of dro: expected beta, whose default is not published")
    return kind


def read(call: Pass, vocabulary: int, context: int) -> list[Example]:
    """Makes the learner's data of a call; raises ``BadInput`` with the datum that is wrong."""
    kind, examples = _kind_of(call), list[Example]()
    if not call.data:
        raise BadInput("data: expected a datum at least, got none")
    for i, datum in enumerate(call.data):
        try:
            wire.check_ids("model_input", datum.ids, vocabulary, context)
            examples.append(_example(kind, call.settings, datum, vocabulary))
        except BadInput as error:
            raise BadInput(f"data[{i}]: {error}") from None
    return examples


def _example(kind: _Kind, settings: Mapping[str, Any], given: Given, vocabulary: int) -> Example:
    (ids, inputs), n = given, len(given.ids)
    needed = {"target_tokens", *kind.needs}
    known = needed | {*kind.usual}
    if wrong := sorted((needed - inputs.keys()) | (inputs.keys() - known)):
        got = f"got {wrong[0]!r:.60}" if wrong[0] in inputs else f"{wrong[0]!r} is missing"
        raise BadInput(f"loss_fn_inputs: expected {sorted(known)}, {got}")
    targets = inputs["target_tokens"]
    if targets.ndim not in (1, 2) or len(targets) != n or not targets.size:
        what = f"[N] or [N, K] with N = {n}, the tokens of model_input"
        raise BadInput(f"target_tokens: expected {what}, got {list(targets.shape)}")
    wire.check_ids("target_tokens", targets.reshape(-1), vocabulary, targets.size)
    numbers = {k: np.full(targets.shape, settings.get(k, x)) for k, x in kind.usual.items()}
    for name in inputs.keys() - {"target_tokens"}:
        numbers[name] = values = inputs[name].astype(np.float32)
        if values.shape != targets.shape or not np.isfinite(values).all():
            got = "others" if values.shape == targets.shape else f"shape {list(values.shape)}"
            raise BadInput(f"{name}: expected finite numbers {list(targets.shape)}, got {got}")
    old, mask = (numbers.pop(name, None) for name in ("logprobs", "sequence_ratio_mask"))
    if mask is not None and not mask.any():
        raise BadInput("sequence_ratio_mask: expected a token at least that is not 0")
    each: dict[str, Any] = {name: x.reshape(-1) for name, x in numbers.items()}
    logprobs = None if old is None else old.reshape(-1)
    at = np.repeat(np.arange(n), targets.size // n)
    return Example(
        Datum.of(0, ids, at, targets.reshape(-1), logprobs=logprobs, **each), targets.shape, mask
    )


def run(
    policy: Policy, sums: GradientSums | None, call: Pass, examples: Sequence[Example]
) -> Generator[int, None, tuple[GradientSums | None, bytes]]:
    """Runs a call piece by piece; yields the tokens of each, and returns (sums, the answer).

    Pieces follow from the call's own data alone.
    """
    loss, outputs, total = LOSSES[call.loss].loss, list[np.ndarray](), 0.0
    for piece in _pieces(examples):
        data = [example.datum for example in piece]
        if call.loss == "gspo":
            now = verbs.forward(policy, verbs.pack(policy, data))
            data = [*map(_with_ratio, piece, now)]
        packed = verbs.pack(policy, data)
        if call.forward_only:
            now = verbs.forward(policy, packed)
            each = [
                np.asarray(loss(jnp.asarray(x), _numbers(datum)))
                for x, datum in zip(now, data, strict=True)
            ]
        else:
            sums, results = verbs.forward_backward(policy, packed, loss, sums)
            now, each = zip(*results.by_datum(), strict=True)
        for example, datum, logprobs, losses_of_datum in zip(piece, data, now, each, strict=True):
            weights = datum.inputs.get("weights", np.ones(len(losses_of_datum)))
            total += float(np.sum(losses_of_datum.astype(np.float64) * weights))
            outputs.append(logprobs.reshape(example.shape))
        yield sum(len(datum.ids) for datum in data)
    return sums, wire.passed(outputs, {"loss:sum": total})


def _pieces(examples: Sequence[Example]) -> Iterator[list[Example]]:
    piece, size = list[Example](), 0
    for example in examples:
        if piece and size + len(example.datum.ids) > PIECE:
            yield piece
            piece, size = [], 0
        piece.append(example)
        size += len(example.datum.ids)
    yield piece


def _with_ratio(example: Example, logprobs: np.ndarray) -> Datum:
    datum, mask = example.datum, example.mask
    assert mask is not None
    ratio = (logprobs - datum.logprobs)[mask.reshape(-1) != 0].mean(dtype=np.float64)
    ratios = np.full(len(logprobs), ratio, np.float32)
    return datum._replace(inputs={**datum.inputs, "log_ratio": ratios})


def _numbers(datum: Datum) -> dict[str, Any]:
    return {**datum.inputs, "old": datum.logprobs.astype(np.float32)}
