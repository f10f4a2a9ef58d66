"""Renders a chat template, in a process of its own with limits on processor time and memory.

A template is a program of whoever published the model, and one call in C (``3**30000000 % 7``,
``'x' * 2000000000``) cannot be ended from inside.
"""

from __future__ import annotations

import functools
import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

_BYTES = 1 << 30  # beside the interpreter's own
_OUT_OF_MEMORY = 3  # exit code


@functools.cache
def check_template(template: str, special: tuple[tuple[str, str], ...], seconds: float) -> None:
    """Renders short conversations, as ``HFTokenizer`` does, and waits for the end.

    Args:
        special: names and texts of the special tokens.

    Raises:
        TimeoutError: it takes more than ``seconds``, or more than 1 GiB.
        CalledProcessError: the process failed.
    """
    job = json.dumps({"template": template, "special": dict(special), "seconds": seconds})
    command = [sys.executable, "-m", __name__]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, input=job, text=True, capture_output=True, cwd=root, check=False)
    if done.returncode in (_OUT_OF_MEMORY, -signal.SIGVTALRM):
        raise TimeoutError(f"it takes more than {seconds:g} seconds, or {_BYTES >> 30} GiB")
    done.check_returncode()


def _render(template: str, special: dict[str, Any], seconds: float) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    system, user = {"role": "system", "content": "b"}, {"role": "user", "content": "a"}
    talks: list[list[dict[str, Any]]] = [
        [system, user],
        [user, {"role": "assistant", "content": "b"}],
    ]
    function = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
    answer = {"role": "tool", "content": "b", "name": "f", "tool_call_id": "call00000"}
    talks.append([user, {"role": "assistant", "content": "", "tool_calls": [call]}, answer])
    settings: list[dict[str, Any]] = [{}, {"enable_thinking": True}, {"enable_thinking": False}]
    settings.append({"tools": [{"type": "function", "function": function}]})
    if (pages := Path("/proc/self/statm")).exists():
        most = int(pages.read_text().split()[0]) * resource.getpagesize() + _BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)  # ends the process
    for more in settings:
        for talk in talks:
            try:
                given = {**special, **more, "add_generation_prompt": talk[0] is system}
                render_jinja_template([talk], chat_template=template, **given)
            except MemoryError:
                sys.exit(_OUT_OF_MEMORY)
            except Exception:  # a template may refuse a system message, for one
                continue


if __name__ == "__main__":
    _render(**json.load(sys.stdin))
