"""Fine-tunes teams of language-model agents with reinforcement learning, in JAX.

    config = marft_jax.configure("mine.yaml", run={"dir": "runs/mine", "steps": 20})
    marft_jax.train_team(config, on_step=lambda step: print(step.metrics["reward/mean"]))
    marft_jax.evaluate_team("runs/mine")
    marft_jax.LoadedTeam("runs/mine").ask("4+7+8=?").turns
    marft_jax.read_run("runs/mine").columns()["reward/mean"]

What is wrong in settings or files raises ``BadInput``. The commands call the same functions; each
is imported with what it needs when it is first used.
"""

import importlib as _importlib
import os as _os
import signal as _signal
import sys as _sys
from types import FrameType as _Frame
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from marft_jax.cli import configure as configure
    from marft_jax.cli import configure_run as configure_run
    from marft_jax.errors import BadInput as BadInput
    from marft_jax.errors import RunFailed as RunFailed
    from marft_jax.extras.gateway.tinker.client import Client as Client
    from marft_jax.extras.report.reading import read_run as read_run
    from marft_jax.run.evaluating import evaluate_team as evaluate_team
    from marft_jax.run.imitation import Wanted as Wanted
    from marft_jax.run.imitation import imitate_team as imitate_team
    from marft_jax.run.loaded_team import LoadedTeam as LoadedTeam
    from marft_jax.run.loop import train_team as train_team
    from marft_jax.settings.config import Config as Config
    from marft_jax.types import TrainedStep as TrainedStep


def _interrupted(number: int, frame: _Frame | None) -> None:
    """Ends a command with one line on Ctrl-C while its modules are imported; later as usual."""
    if hasattr(_sys.modules.get("__main__"), "main"):
        _signal.default_int_handler(number, frame)
    _os.write(2, b"marft_jax: stopped\n")
    _os._exit(128 + number)  # an exception would be raised, and lost, in the middle of C code


# argv is this while `python -m marft_jax.<command>` is being found: nobody imports a library then
if _sys.argv[:1] == ["-m"] and _signal.getsignal(_signal.SIGINT) == _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _interrupted)

__version__ = "0.1.0"

if not TYPE_CHECKING:
    _HOMES = dict(
        Client="extras.gateway.tinker.client",
        LoadedTeam="run.loaded_team", configure="cli", configure_run="cli",
        Config="settings.config",
        BadInput="errors", RunFailed="errors", evaluate_team="run.evaluating",
        Wanted="run.imitation", imitate_team="run.imitation", read_run="extras.report.reading",
        train_team="run.loop", TrainedStep="types",
    )  # fmt: skip

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'marft_jax' has no attribute {name!r}")
        return getattr(_importlib.import_module(f"marft_jax.{_HOMES[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})
