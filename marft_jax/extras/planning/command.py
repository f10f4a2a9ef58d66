"""Plans a run on hardware that is not present: memory, traffic, time of a step, and if it fits.

    python -m marft_jax.plan --config mine.yaml --topology v5e:4x4
    python -m marft_jax.plan --model.base configs/models/qwen2.5-7b --topology h100:8 --json
    python -m marft_jax.plan --topology cpu:8

Compiles every program of a run, with shapes instead of weights, for TPUs, GPUs or virtual CPU
devices (cpu:2x4 is two hosts of four). Reads only config.json of the model. All other flags are
those of training.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import NoReturn

from rich.console import Console

from marft_jax import cli, unread
from marft_jax.learning.checking import check_team


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Exits with 0: the plan fits; 1: it does not fit; 2: bad configuration or input."""
    parser = cli.Parser("marft_jax.plan", __doc__)
    parser.add_argument("--topology", required=True, metavar="NAME", help="v5e:4x4, h100:8, cpu:8")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    with cli.boundary():
        own, rest = parser.parse_known_args(argv)
        console = Console(highlight=False, soft_wrap=True, stderr=own.json, markup=False)
        config = cli.parse(rest, prog="marft_jax.plan")
        unread.log(unread.warning(config))
        check_team(config)
        # after the settings are checked: JAX takes seconds to import
        from marft_jax.extras.planning import verdict
        from marft_jax.extras.planning.planner import plans
        from marft_jax.extras.planning.topology import find_topology

        found = plans(config, find_topology(own.topology), console.print)
        if own.json:
            numbers = {base: verdict.numbers(own) for base, own in found.items()}
            print(json.dumps({"bases": numbers} if len(found) > 1 else numbers.popitem()[1]))
        else:
            for base, each in found.items():
                console.print(*([f"\nbase {base}:"] if len(found) > 1 else []))
                console.print(verdict.memory_table(each), verdict.programs_table(each))
                console.print(verdict.verdict(each))
    sys.exit(0 if all(each.fits for each in found.values()) else 1)
