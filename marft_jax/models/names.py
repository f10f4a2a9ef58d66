"""Names of a decoder's tensors in other formats: Hugging Face checkpoints and GGUF files.

A path of ours such as ``layers/3/mixer/q/kernel`` becomes the name of the same tensor there. The
parts of a layer bring the names of their own modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.models.parts.part import Names

Spelling = Literal["hf", "gguf"]

_WHOLE = {
    "embed": Names("model.embed_tokens", "token_embd"),
    "final_norm": Names("model.norm", "output_norm"),
    "lm_head": Names("lm_head", "output"),
    "layer_inputs": Names("model.embed_tokens_per_layer", "per_layer_token_embd"),
    "layer_inputs/project": Names("model.per_layer_model_projection", "per_layer_model_proj"),
    "layer_inputs/norm": Names("model.per_layer_projection_norm", "per_layer_proj_norm"),
}
_NORMS = {
    "attn_norm": Names("input_layernorm", "attn_norm"),
    "attn_post_norm": Names("post_attention_layernorm", "post_attention_norm"),
    "mlp_norm": Names("post_attention_layernorm", "ffn_norm"),
    "mlp_post_norm": Names("post_feedforward_layernorm", "post_ffw_norm"),
}
_AROUND = {**_NORMS, "mlp_norm": Names("pre_feedforward_layernorm", "ffn_norm")}
_LAYER: dict[Spelling, str] = {"hf": "model.layers", "gguf": "blk"}


def paths_by_name(config: DecoderConfig, paths: Iterable[str]) -> dict[str, str]:
    """Our paths of these tensors, by their names in Hugging Face checkpoints."""
    return {source_name(config, path, "hf"): path for path in paths}


def source_name(config: DecoderConfig, path: str, spelling: Spelling) -> str:
    """Name in another format of the tensor at ``path``."""
    *modules, leaf = path.split("/")
    suffix = "bias" if leaf == "bias" else "weight"
    spellings = dict(config.spelling)
    if modules[0] != "layers":
        name = getattr(_WHOLE["/".join(modules)], spelling)
        return f"{spellings.get(name, name)}.{suffix}"
    layer = config.layers[int(modules[1])]
    part = getattr(layer, modules[2], None)
    if len(modules) == 3 and part is not None:  # a parameter, not a module
        return f"{_LAYER[spelling]}.{modules[1]}.{getattr(part.MODULES[leaf], spelling)}"
    if len(modules) == 3:
        norms = _AROUND if config.pre_norms and config.post_norms else _NORMS
        names = norms[modules[2]]
    else:
        assert part is not None
        names = {**part.MATRICES, **part.MODULES}[modules[3]]
        if len(modules) > 4:  # a piece of an expert
            expert, piece = modules[4], int(modules[5])
            hf, gguf = names.pieces[piece].format(expert), names.stacks[piece]
            names = names._replace(hf=hf, gguf=gguf)
    name = getattr(names, spelling)
    return f"{_LAYER[spelling]}.{modules[1]}.{spellings.get(name, name)}.{suffix}"


def unread_names(config: DecoderConfig, spelling: Spelling) -> set[str]:
    """Names in another format of tensors that no layer reads: files may have keys and values also
    for layers that read those of an earlier layer."""
    return {
        f"{_LAYER[spelling]}.{i}.{getattr(names, spelling)}.weight"
        for i, layer in enumerate(config.layers)
        if layer.mixer.source is not None
        for name, names in {**layer.mixer.MATRICES, **layer.mixer.MODULES}.items()
        if name in ("k", "v", "k_norm")
    }
