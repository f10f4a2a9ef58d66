"""Tools that an agent may call in its turn, and the form in which models write calls."""

from marft_jax.tools.calls import check_form, find_calls, for_model, form_of_call, with_ids
from marft_jax.tools.forms import Form, ToolCall
from marft_jax.tools.tool import Options, Source, Tool, ToolError, function_source, parse_options
from marft_jax.tools.toolbox import (
    EpisodeTools,
    Toolbox,
    check_entry,
    load_toolboxes,
    messages_of,
    name_of,
)

__all__ = [
    "EpisodeTools",
    "Form",
    "Options",
    "Source",
    "Tool",
    "ToolCall",
    "ToolError",
    "Toolbox",
    "check_entry",
    "check_form",
    "find_calls",
    "for_model",
    "form_of_call",
    "function_source",
    "load_toolboxes",
    "messages_of",
    "name_of",
    "parse_options",
    "with_ids",
]
