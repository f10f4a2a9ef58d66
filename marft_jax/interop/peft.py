"""Adapters as folders of peft and vLLM: adapter_config.json and adapter_model.safetensors.

peft keeps each factor as the weight of a linear layer, ``[out, in]``; ours map in -> out. So
``lora_A = Aᵀ [rank, in]`` and ``lora_B = Bᵀ [out, rank]``, and both add ``x A B * alpha / rank``.
Pairs of experts stand in one tensor (``target_parameters``, since peft 0.18): lora_A is
``[experts · rank, in]``, lora_B ``[out, rank · experts]``.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from safetensors import safe_open
from safetensors.numpy import save_file

from marft_jax.errors import BadInput
from marft_jax.formats.foreign import read_settings, readable
from marft_jax.models.config_json import architecture
from marft_jax.models.families import FAMILIES, PARTS
from marft_jax.models.lora import UNEMBED, matrix_of
from marft_jax.models.tokenizers.tokenizer import read_json
from marft_jax.models.weights.sources import directory_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EACH = "each_expert"
"""Folder in that of an adapter: the adapter with tensors of each expert."""

Factors = Mapping[str, Mapping[str, np.ndarray]]
"""``{"q": {"a": [L, in, R], "b": [L, R, out]}, ...}``: ``lora.Adapters`` without the agent axis."""
LayersWith = Callable[[str], Sequence[int]]
"""Name of a stack of matrices to the numbers of its layers (``DecoderConfig.layers_with``)."""

_PREFIX = "base_model.model."
_TENSOR = re.compile(  # what precedes the layers of the text differs by class and version
    r"(?:(?:base_model|model|language_model|_orig_mod)\.)*(?:layers\.(\d{1,5})\.)?([\w.]+)"
    r"\.lora_([AB])(?:\.[\w-]+)?\.weight"
)
_NAMES = {target: names for part in PARTS for target, names in part.MATRICES.items()}
_HEAD = "lm_head"  # of no layer
_MODULES = {target: names.hf for target, names in _NAMES.items()} | {UNEMBED: _HEAD}
_PARAMETERS = {target: names.parameter for target, names in _NAMES.items() if names.parameter}
_TARGETS = {module: target for target, module in _MODULES.items()}
_SPELLINGS = [dict(family.traits.get("spelling", ())) for family in FAMILIES.values()]
_TARGETS |= {
    other: _TARGETS[usual] for x in _SPELLINGS for usual, other in x.items() if usual in _TARGETS
}
_FLOATS = ("F32", "F16", "BF16", "F64")


def _all_or_none(parameters: list[str] | None) -> list[str] | None:
    """Checks that all matrices of experts have adapters: peft names a module by the other ones."""
    known = [sorted(x.get(name, name) for name in _PARAMETERS.values()) for x in _SPELLINGS]
    if parameters and sorted(parameters) not in known:
        raise ValueError(f"expected none or {', '.join(_PARAMETERS.values())}")
    return parameters


def _of_the_base(start: bool | str) -> bool | str:
    """Checks that training began from the base as it is: others change its weights, too."""
    if start not in (True, False, "gaussian", "eva", "orthogonal", "mica"):
        raise ValueError("it goes with a base that it has changed; merge it into that base")
    return start


_REFUSED = (
    "fan_in_fan_out", "use_dora", "lora_bias", "use_qalora", "modules_to_save", "rank_pattern",
    "alpha_pattern", "layer_replication", "trainable_token_indices", "alora_invocation_tokens",
    "use_bdlora", "arrow_config", "kasa_config", "monteclora_config",
)  # fmt: skip
"""Settings of ``adapter_config.json`` with which the tensors would mean something else."""


class _Settings(BaseModel):
    """Settings of ``adapter_config.json`` that are read."""

    model_config = ConfigDict(strict=True)
    r: int = Field(gt=0)
    lora_alpha: FiniteFloat
    use_rslora: bool = False
    peft_type: Literal["LORA"] = "LORA"
    bias: Literal["none"] = "none"
    init_lora_weights: Annotated[bool | str, AfterValidator(_of_the_base)] = True
    target_parameters: Annotated[list[str] | None, AfterValidator(_all_or_none)] = None


class Adapter(NamedTuple):
    """Adapter that was read from a peft folder.

    Attributes:
        matrices: ``(target, layer)`` to the factors ``(A [in, rank], B [rank, out])``, float32;
            of experts with the experts in front.
        scale: the correction is ``x A B * scale``; alpha / rank, or alpha / sqrt(rank) (rslora).
    """

    matrices: Mapping[tuple[str, int], tuple[np.ndarray, np.ndarray]]
    rank: int
    scale: float


def layers_in(source: str) -> str:
    """Names the module that has the layers of a base in what transformers loads."""
    return "model.language_model" if sees_images(source) else "model"


def sees_images(source: str) -> bool:
    """True where the text is a part of the published model, beside parts for images."""
    folder = directory_of(source)
    name = architecture(read_json(folder / "config.json")) if folder else None
    return bool(name) and str(name).endswith("ForConditionalGeneration")


def unnamed(files: str, targets: Collection[str]) -> list[str]:
    """Adapted matrices that peft cannot name, as the checkpoint of the base has other ones.

    Args:
        files: how the checkpoint keeps its matrices (``DecoderConfig.files``).
    """
    lacks = {
        "fused": {"q", "k", "v", "gate", "up"},
        "fused_mlp": {"gate", "up", "down"},
        "stacked": {"experts"},
    }
    return sorted(lacks.get(files, set()) & set(targets))


def publish(folder: Path, factors: Factors, *settings: Any) -> None:
    """Writes one adapter for any reader, with ``write``: as peft loads it, and where routed experts
    are adapted also in the folder ``EACH`` of it, as some servers want it."""
    write(folder, factors, *settings)
    if any(matrix_of(target) in _PARAMETERS for target in factors):
        write(folder / EACH, factors, *settings, each_expert=True)


def write(
    folder: Path,
    factors: Factors,
    alpha: float,
    base: str,
    inside: str,
    layers_with: LayersWith,
    spelling: Mapping[str, str],
    each_expert: bool = False,
) -> None:
    """Writes one adapter.

    Args:
        base: where a loader finds the base model.
        inside: name of the module that has the layers (``layers_in``).
        spelling: names of modules where the family has its own (``DecoderConfig.spelling``).
        each_expert: each expert has tensors of its own, under the names of its modules in
            checkpoints, as some servers want them; peft cannot load these.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = {target: spelling.get(module, module) for target, module in _MODULES.items()}
    adapted = [*dict.fromkeys(map(matrix_of, factors))]
    plain = [target for target in adapted if target not in _PARAMETERS]
    many = [target for target in adapted if target in _PARAMETERS]
    pieces = {n: [x.rpartition(".")[2] for x in _NAMES[n].pieces] for n in many if each_expert}
    parameters = [spelling.get(_PARAMETERS[target], _PARAMETERS[target]) for target in many]
    ends = [name.rpartition(".")[2] for target, name in names.items() if layers_with(target)]
    modules: Any = [_end(names[target], ends) for target in plain]
    if pieces:
        modules, parameters = [*modules, *itertools.chain(*pieces.values())], []
    if inside != "model":  # parts for images have matrices of the same names
        head = f"|{_HEAD}" if UNEMBED in plain else ""
        modules = rf"{re.escape(inside)}\..*\.({'|'.join(modules)}){head}"

    def place(target: str, layer: int) -> str:
        layers = "" if target == UNEMBED else f"{inside}.layers.{layer}."
        return f"{_PREFIX}{layers}{names[matrix_of(target)]}"

    tensors = {
        f"{module}.lora_{letter.upper()}.weight": np.ascontiguousarray(tensor, np.float32)
        for target, pair in factors.items()
        for letter in ("a", "b")
        for layer, factor in zip(layers_with(target), pair[letter], strict=True)
        for module, tensor in _modules(
            place(target, layer), factor, letter, pieces.get(matrix_of(target), ())
        )
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": next(iter(factors.values()))["a"].shape[-1],
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "target_modules": modules,
        "inference_mode": True,
        **({"target_parameters": sorted(parameters)} if parameters else {}),
    }
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _end(name: str, ends: Sequence[str]) -> str:
    """The last part of a module's name, or more of the name where others end in that part."""
    last = name.rpartition(".")[2]
    return last if ends.count(last) == 1 else name


def _modules(
    module: str, factor: np.ndarray, letter: str, pieces: Sequence[str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields module and tensor of a factor; with pieces, of each of these in each expert."""
    if not pieces:
        yield module, _in_file(factor, letter)
    stem = module.removesuffix(".base_layer")
    for k, piece in enumerate(pieces):
        part = np.split(factor, len(pieces), axis=-1)[k] if letter == "b" else factor
        yield from ((f"{stem}.{e}.{piece}", of_expert.T) for e, of_expert in enumerate(part))


def _in_file(factor: np.ndarray, letter: str) -> np.ndarray:
    """A factor as peft keeps it: of experts A ``[E, in, R]``, B ``[E, R, out]``."""
    if factor.ndim == 2:
        return factor.T
    if letter == "a":
        return factor.swapaxes(1, 2).reshape(-1, factor.shape[1])
    return factor.transpose(2, 1, 0).reshape(factor.shape[2], -1)


def _ours(tensor: np.ndarray, target: str, letter: str, rank: int) -> np.ndarray:
    """The inverse of ``_in_file``."""
    if target not in _PARAMETERS:
        return tensor.T
    if letter == "A":
        return tensor.reshape(-1, rank, tensor.shape[1]).swapaxes(1, 2)
    return tensor.reshape(tensor.shape[0], rank, -1).transpose(2, 1, 0)


def module_name(target: str, layer: int) -> str:
    """Names the module of a matrix, such as ``model.layers.3.self_attn.q_proj``."""
    return _HEAD if target == UNEMBED else f"model.layers.{layer}.{_MODULES[target]}"


def read(folder: Path) -> Adapter:
    """Reads a peft folder, without running code from it.

    Raises:
        BadInput: files are missing or damaged, or the adapter is not LoRA on matrices that our
            adapters can have.
    """
    config, file = folder / CONFIG, folder / WEIGHTS
    try:
        settings = _Settings.model_validate(values := read_settings(config))
    except ValidationError as error:
        wrong = error.errors()[0]
        raise BadInput(
            f"{config}: {wrong['loc'][0]} {wrong['input']!r:.80} is not supported: {wrong['msg']}"
        ) from error
    for name in _REFUSED:
        if values.get(name):
            raise BadInput(f"{config}: {name} {values[name]!r:.80} is not supported; remove it")
    rank = settings.r
    pairs: dict[tuple[str, int], dict[str, np.ndarray]] = {}
    for target, layer, letter, tensor in _tensors(folder, rank):
        factor = _ours(tensor.astype(np.float32), target, letter, rank)
        pairs.setdefault((target, layer), {})[letter] = factor
    for place, pair in pairs.items():
        if set(pair) != {"A", "B"}:
            raise BadInput(
                f"{file}: {module_name(*place)}: expected lora_A and lora_B, "
                f"got lora_{min(pair)} alone"
            )
    if not pairs:
        raise BadInput(f"{file}: expected LoRA factors, found no tensor")
    matrices = {place: (pair["A"], pair["B"]) for place, pair in pairs.items()}
    return Adapter(
        matrices, rank, settings.lora_alpha / (rank**0.5 if settings.use_rslora else rank)
    )


def _tensors(folder: Path, rank: int) -> Iterator[tuple[str, int, str, np.ndarray]]:
    """Yields (target, layer, A or B, factor); checks name, type and shape before it reads one."""
    file = folder / WEIGHTS
    if not file.is_file():
        raise BadInput(
            f"{file}: expected an adapter's weights, found none; save a pickled adapter_model.bin "
            "again with safe_serialization=True"
        )
    with readable(file, "safetensors file"), safe_open(file, framework="numpy") as tensors:
        for name in tensors.keys():
            match = _TENSOR.fullmatch(name)
            known = match and match[2] in _TARGETS and (match[1] is None) == (match[2] == _HEAD)
            if not match or not known:
                raise BadInput(
                    f"{file}: tensor {name!r} is no LoRA factor of {', '.join(_MODULES)}; "
                    "expected only those"
                )
            stored = tensors.get_slice(name)
            shape, kind = stored.get_shape(), stored.get_dtype()
            many = _TARGETS[match[2]] in _PARAMETERS
            ranks = shape["AB".index(match[3])] if len(shape) == 2 else 0
            fits = ranks and (ranks % rank == 0 if many else ranks == rank)
            if not fits or kind not in _FLOATS:
                raise BadInput(
                    f"{file}: tensor {name!r}: expected a matrix of rank {rank} in one of "
                    f"{', '.join(_FLOATS)}, got {kind} of shape {shape}"
                )
            yield _TARGETS[match[2]], int(match[1] or 0), match[3], tensors.get_tensor(name)
