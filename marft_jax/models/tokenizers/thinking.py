"""Thinking that a model writes between special tokens; texts show it as ``<think>...</think>``.

gpt-oss writes messages, ``<|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>``, each with a
head and a text; its prompts end in the head of the first message. The channel ``final`` is the
answer, all other channels are thinking. Texts leave the heads out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from marft_jax.types import without_thinking

OPENS, CLOSES = "<think>", "</think>"
OPENING = OPENS, "[THINK]", "<|channel>thought"
"""What a prompt ends with that opens a thought."""
_HEAD, _TEXT, _END = "head", "text", "end"
_FAMILIES = (
    {"<think>": OPENS, "</think>": CLOSES},
    {"[THINK]": OPENS, "[/THINK]": CLOSES},  # Magistral, Ministral
    {"<|channel>": OPENS, "<channel|>": CLOSES},  # Gemma 4
    {"<|start|>": _HEAD, "<|channel|>": _HEAD, "<|message|>": _TEXT, "<|end|>": _END},  # gpt-oss
)


def marks_of(special: Mapping[int, str]) -> dict[int, str]:
    """Finds the special tokens around a model's thinking, and what each of them does."""
    families = [f for f in _FAMILIES if f.keys() <= {*special.values()}]
    return {i: f[token] for f in families for i, token in special.items() if token in f}


def for_template(message: Mapping[str, Any], marks: Mapping[int, str]) -> dict[str, Any]:
    """Message as its chat template takes it, which does not know what texts show for marks."""
    if marks and message["role"] == "assistant" and message.get("content"):
        return {**message, "content": without_thinking(message["content"])}
    return dict(message)


def show(parts: Iterable[tuple[str | None, str]]) -> str:
    """Text of a sequence of marks and texts. It is a beginning of the text of a longer sequence.

    Args:
        parts: what a mark does, or None and a text.
    """
    text, head, in_head, thinks = "", "", False, False  # head and thought that are still open
    for mark, piece in parts:
        if mark is None:
            head, text = (head + piece, text) if in_head else (head, text + piece)
        elif mark in (OPENS, CLOSES):
            text += mark
        elif mark != _TEXT:
            text += CLOSES if thinks else ""
            thinks, in_head, head = False, mark == _HEAD, ""
        elif in_head:
            thinks, in_head = not head.strip().startswith(("final", "assistant")), False
            text += OPENS if thinks else ""
    return text
