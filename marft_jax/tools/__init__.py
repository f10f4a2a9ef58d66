"""Tools that an agent may call in its turn, and the form in which chat templates write calls."""

from marft_jax.tools.calls import ToolCall, check_form, find_calls, for_template, with_ids
from marft_jax.tools.tool import Tool, answer_calls, load_tools

__all__ = [
    "Tool",
    "ToolCall",
    "answer_calls",
    "check_form",
    "find_calls",
    "for_template",
    "load_tools",
    "with_ids",
]
