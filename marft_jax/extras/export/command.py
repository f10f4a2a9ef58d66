"""Takes a trained team out of a run, for other programs.

    python -m marft_jax.export --run runs/quickstart --out team --format peft
    python -m marft_jax.export --run runs/quickstart --out team --format merged --agent solver

``peft`` writes one folder per adapter, which peft and vLLM load, ``team.yaml``, which
``--team.file`` and ``--lora.init`` load, and ``client.py``, which plays the team through a server
of the adapters (of workflows whose order is known before). ``merged`` writes, per agent, the base
with its adapter added, as a Hugging Face folder; a quantised base is unpacked for it. ``--push
owner/name`` also uploads the folder to the hub, as a private repository where there is none;
``--lora.init hub:owner/name`` starts from it. Further flags are those of training.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from marft_jax import cli
from marft_jax.settings.setting import check_local

_ANY_MACHINE = ("--mesh.data", "-1", "--mesh.fsdp", "1", "--mesh.tensor", "1")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Leaves with 0: done; 1: the folder cannot be written; 2: bad configuration or input."""
    parser = cli.run_parser("marft_jax.export", __doc__, base=False)
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder to write")
    parser.add_argument("--format", choices=("peft", "merged"), default="peft")
    parser.add_argument("--agent", metavar="NAME", help="merged: only this one")
    parser.add_argument("--push", metavar="OWNER/NAME", help="also upload it to the hub")
    with cli.boundary():
        flags, rest = parser.parse_known_args(argv)
        check_local("--out", flags.out)
        words = *rest, *_ANY_MACHINE
        config = cli.parse_run(flags.run, None, words, "marft_jax.export", plays_tasks=False)
        # after the settings are checked: JAX takes seconds to import
        from marft_jax.extras.export import hub
        from marft_jax.extras.export.exporting import export

        out = Path(flags.out)
        if flags.push is not None:
            hub.repository(flags.push, "--push")  # before anything is written
        step = export(flags.run, flags.step, config, out, flags.format, flags.agent)
        if flags.push is not None:
            print(f"pushed: {hub.push(out, flags.push, step)}")
    sys.exit(0)
