"""Fine-tunes teams of language-model agents with reinforcement learning, in JAX."""

import os as _os
import signal as _signal
import sys as _sys
from types import FrameType as _Frame


def _interrupted(number: int, frame: _Frame | None) -> None:
    """Ctrl-C while a command's modules are imported ends it with one line; later, as usual."""
    if hasattr(_sys.modules.get("__main__"), "main"):
        _signal.default_int_handler(number, frame)
    _os.write(2, b"marft_jax: stopped\n")
    _os._exit(128 + number)  # an exception would be raised, and lost, in the middle of C code


# argv is this while `python -m marft_jax.<command>` is being found: nobody imports a library then
if _sys.argv[:1] == ["-m"] and _signal.getsignal(_signal.SIGINT) == _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _interrupted)

__version__ = "0.1.0"
