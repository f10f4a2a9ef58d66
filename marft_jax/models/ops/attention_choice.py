"""The attention of whole rows that each platform computes fastest: the one table of its forms."""

from __future__ import annotations

from marft_jax.models.ops.attention import CausalAttention, causal_attention
from marft_jax.models.ops.cpu_attention import attention_by_rule, causal_attention_in_pieces
from marft_jax.models.ops.cudnn import cudnn_attention, works


def attention_on(
    platform: str, heads: int, groups: int, width: int, dtype: str, plain: bool = True
) -> CausalAttention:
    """The fastest attention of whole rows there.

    Einsums over a few queries at a time, on a CPU with a backward pass (``cpu_attention``);
    on a GPU, cuDNN's kernel where it works for these heads (``cudnn``), or else the einsums that
    XLA fuses.

    Args:
        heads, groups: query heads, and key-value heads.
        width: channels of a head.
        dtype: of queries, keys and values.
        plain: scores have no rule (``attention.Scores``), of which cuDNN's kernel knows none.
    """
    if platform == "tpu" or not plain:
        return attention_by_rule
    if platform == "cpu":
        return causal_attention_in_pieces
    return cudnn_attention if works(heads, groups, width, dtype) else causal_attention
