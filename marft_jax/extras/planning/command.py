"""Plans a run on hardware that is not present: its memory, its work, and if it fits.

    python -m marft_jax.plan --config mine.yaml --topology v5e:4x4
    python -m marft_jax.plan --model.base configs/models/qwen2.5-7b --topology h100:8 --json
    python -m marft_jax.plan --topology cpu:8
    python -m marft_jax.plan --config mine.yaml --topology h100:2x8 --emit slurm --out job.sh

Compiles every program of a run, with shapes instead of weights, for TPUs, GPUs or virtual CPU
devices (cpu:2x4 is two hosts of four). Reads only config.json of the model. With --emit it also
writes the job of a plan that fits. All other flags are those of training.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console

from marft_jax import cli
from marft_jax.cli import unused_settings
from marft_jax.errors import BadInput
from marft_jax.extras.planning import emit
from marft_jax.learning.checking import check_team
from marft_jax.settings.config import Config, RolloutSettings
from marft_jax.settings.setting import check_local

if TYPE_CHECKING:
    from marft_jax.extras.planning.verdict import Plan


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Exits with 0: the plan fits; 1: it does not fit; 2: bad configuration or input."""
    parser = cli.Parser("marft_jax.plan", __doc__)
    parser.add_argument("--topology", required=True, metavar="NAME", help="v5e:4x4, h100:8, cpu:8")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--emit", choices=[*emit.KINDS], help="kind of job to write, with --out")
    parser.add_argument("--out", metavar="FILE", help="file of the job")
    parser.add_argument("--image", metavar="NAME", help="container image of a jobset")
    served = "h100:2x1: two servers of vLLM, one GPU each, sample; the topology only learns"
    parser.add_argument("--servers", metavar="NAME", help=served)
    with cli.boundary():
        flags, rest = parser.parse_known_args(argv)
        console = Console(highlight=False, soft_wrap=True, stderr=flags.json, markup=False)
        config = cli.parse(rest, prog="marft_jax.plan")
        servers = emit.servers_of(flags.servers) if flags.servers else None
        if bool(flags.emit) != bool(flags.out) or flags.image and not flags.emit:
            raise BadInput("--emit: expected --emit KIND --out FILE, and --image for a jobset only")
        check_local("--out", flags.out)
        unused_settings.log(unused_settings.warning(config))
        check_team(config)
        # after the settings are checked: JAX takes seconds to import
        from marft_jax.extras.planning.planner import described, plans
        from marft_jax.extras.planning.topology import find_topology

        topology = find_topology(flags.topology, must_compile=not flags.emit)
        hosts = emit.hosts_of(topology)
        job = emit.Job(flags.emit, config, *cli.split(rest), hosts, servers, flags.image)
        if flags.emit:
            emit.check(job)
        config = _elsewhere(config) if servers else config
        if topology.compiles:
            planned = plans(config, topology, console.print)
            _show(planned, flags.json, console)
            runs = {base: each.run for base, each in planned.items()}
            fits = all(each.fits for each in planned.values())
        else:
            runs, fits = described(config, topology), True
            console.print(
                f"{flags.topology}: no GPU compiler here, so it was not checked that the run fits; "
                'pip install -e ".[gpu-plans]" checks it'
            )
        if flags.emit and fits:
            run = next(run for run in runs.values() if run.team.adapters)
            job = job._replace(config=run.config)
            console.print(emit.write(job, run.mesh.shape, run.team, flags.out))
    sys.exit(0 if fits else 1)


def _show(planned: Mapping[str, Plan], as_json: bool, console: Console) -> None:
    from marft_jax.extras.planning import verdict

    if as_json:
        numbers = {base: verdict.numbers(each) for base, each in planned.items()}
        print(json.dumps({"bases": numbers} if len(planned) > 1 else numbers.popitem()[1]))
        return
    for base, each in planned.items():
        console.print(*([f"\nbase {base}:"] if len(planned) > 1 else []))
        console.print(verdict.memory_table(each), verdict.programs_table(each))
        console.print(verdict.verdict(each))


def _elsewhere(config: Config) -> Config:
    """Returns the settings of a run whose agents are sampled by servers."""
    shared: dict[str, Any] = {
        field.name: getattr(config.rollout, field.name)
        for field in dataclasses.fields(RolloutSettings)
    }
    shared["sampler"] = "http"
    return dataclasses.replace(config, rollout=RolloutSettings(**shared))
