"""The attention of whole rows that each platform computes fastest: the one table of its forms."""

from __future__ import annotations

from marft_jax.models.ops.attention import CausalAttention, causal_attention


def attention_on(
    platform: str, heads: int, groups: int, width: int, dtype: str, plain: bool = True
) -> CausalAttention:
    """The fastest attention of whole rows there.

    On a CPU, einsums over a few queries at a time (``pieces``); on a TPU, a kernel of our own
    (``intervals``); on a GPU, cuDNN's kernel where it works for these heads (``cudnn``), or else
    the einsums that XLA fuses. Kernels are imported where they are used, for they take half a
    second.

    Args:
        heads, groups: query heads, and key-value heads.
        width: channels of a head.
        dtype: of queries, keys and values.
        plain: scores have no rule (``attention.Scores``), of which the kernels know none.
    """
    if not plain:
        from marft_jax.models.ops.pieces import attention_by_rule

        return attention_by_rule
    if platform == "cpu":
        from marft_jax.models.ops.pieces import causal_attention_in_pieces

        return causal_attention_in_pieces
    if platform == "tpu":
        from marft_jax.models.ops.intervals import interval_attention

        return interval_attention
    from marft_jax.models.ops.cudnn import cudnn_attention, works

    return cudnn_attention if works(heads, groups, width, dtype) else causal_attention
