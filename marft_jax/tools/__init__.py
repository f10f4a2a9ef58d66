"""Tools that an agent may call in its turn, and the form in which models write calls."""

from marft_jax.tools.calls import check_form as check_form
from marft_jax.tools.calls import find_calls as find_calls
from marft_jax.tools.calls import for_model as for_model
from marft_jax.tools.calls import form_of_call as form_of_call
from marft_jax.tools.calls import form_with_calls as form_with_calls
from marft_jax.tools.calls import with_ids as with_ids
from marft_jax.tools.forms import Form as Form
from marft_jax.tools.forms import ToolCall as ToolCall
from marft_jax.tools.tool import Options as Options
from marft_jax.tools.tool import Source as Source
from marft_jax.tools.tool import Tool as Tool
from marft_jax.tools.tool import ToolError as ToolError
from marft_jax.tools.tool import function_source as function_source
from marft_jax.tools.tool import parse_options as parse_options
from marft_jax.tools.toolbox import EpisodeTools as EpisodeTools
from marft_jax.tools.toolbox import Toolbox as Toolbox
from marft_jax.tools.toolbox import check_entry as check_entry
from marft_jax.tools.toolbox import load_toolboxes as load_toolboxes
from marft_jax.tools.toolbox import messages_of as messages_of
from marft_jax.tools.toolbox import name_of as name_of
