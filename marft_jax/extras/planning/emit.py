"""Writes the job of a plan: a JobSet for Kubernetes, a task of SkyPilot, or a script of Slurm.

The files in ``jobs`` are templates. A job restarts after exit code 75 and then continues its run.
Its processes find each other as ``jax.distributed`` does where it knows the cluster (TPUs, Slurm);
elsewhere the job names the first process.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jinja2

from marft_jax.cli.sections import Words
from marft_jax.errors import BadInput
from marft_jax.extras.planning.chips import GPUS
from marft_jax.settings.config import Config, Rollout, RolloutSettings
from marft_jax.team.team_files import load_team

if TYPE_CHECKING:
    from marft_jax.extras.planning.topology import Topology
    from marft_jax.team.prompts import Team

KINDS = {"jobset": "kubectl apply -f", "skypilot": "sky jobs launch", "slurm": "sbatch"}
"""The kinds of jobs, and the command that starts each."""

_GKE_TPUS = {
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
# SkyPilot's names, and by how much they count for each chip: those of v5p count cores
_SKY_TPUS = {"v5e": ("tpu-v5litepod", 1), "v5p": ("tpu-v5p", 2), "v6e": ("tpu-v6e", 1)}
_SKY_GPUS = {"a100": "A100-80GB"}
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of adapters, where vLLM makes room
_VLLM, _PORT = "0.32.0", 8476


class Hosts(NamedTuple):
    """Hosts of one kind.

    Attributes:
        kind: chip, as a topology names it.
        shape: shape of a slice of TPUs.
        count: number of hosts.
        chips: chips of each host.
    """

    kind: str
    shape: str
    count: int
    chips: int

    @property
    def is_tpu(self) -> bool:
        return self.kind in _GKE_TPUS

    @property
    def resource(self) -> str:
        """Name of its chips in Kubernetes."""
        return "google.com/tpu" if self.is_tpu else "nvidia.com/gpu"

    @property
    def labels(self) -> dict[str, str]:
        """Labels of its nodes in Kubernetes: GKE's for TPUs, those of NVIDIA's discovery."""
        if not self.is_tpu:
            return {"nvidia.com/gpu.product": GPUS[self.kind].kind.replace(" ", "-")}
        names = ("cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology")
        return dict(zip(names, (_GKE_TPUS[self.kind], self.shape), strict=True))

    @property
    def sky(self) -> str:
        """SkyPilot's name of the chips of a host, or of all chips of a slice."""
        if not self.is_tpu:
            return f"{_SKY_GPUS.get(self.kind, self.kind.upper())}:{self.chips}"
        name, each = _SKY_TPUS[self.kind]
        return f"{name}-{each * self.count * self.chips}"


class Job(NamedTuple):
    """A run that becomes a job.

    Attributes:
        kind: one of ``KINDS``.
        files: settings files of the command line.
        flags: flags of the command line, without those of the plan.
        servers: hosts that each run a server of vLLM, which samples; None without.
        image: container image with this package, for a JobSet.
    """

    kind: str
    config: Config
    files: list[str]
    flags: Words
    hosts: Hosts
    servers: Hosts | None = None
    image: str | None = None

    @property
    def bucket(self) -> str:
        """Bucket of the run directory; "" where this is a path."""
        bucket = re.match(r"(?:gs|s3)://[\w.-]+(?=/)", self.config.run.dir)
        return bucket[0] if bucket else ""

    @property
    def run_dir(self) -> str:
        """Run directory as the job sees it: in a JobSet a path lies on the shared volume."""
        given = self.config.run.dir
        at_shared = self.kind == "jobset" and not self.bucket
        return os.path.normpath(os.path.join("/shared", given)) if at_shared else given

    @property
    def name(self) -> str:
        """Name of the job: that of the run, with a digest where Kubernetes does not allow that."""
        run = self.config.run.dir
        allowed = re.sub("[^a-z0-9]+", "-", Path(run).name.lower())[:30].strip("-")
        digest = hashlib.sha256(run.encode("utf-8", "surrogatepass")).hexdigest()[:6]
        return "-".join(filter(None, ("marft", allowed, digest * (allowed != Path(run).name))))


def hosts_of(topology: Topology) -> Hosts:
    """Returns the hosts of a topology. JAX has two devices for each chip of TPU7x."""
    kind, _, shape = topology.name.partition(":")
    return Hosts(kind, shape, topology.hosts, topology.per_host // (2 if kind == "tpu7x" else 1))


def servers_of(name: str) -> Hosts:
    """Reads the hosts of servers, such as ``h100:2x1``: servers x GPUs of each.

    Raises:
        BadInput: it is something else.
    """
    read = re.fullmatch(rf"({'|'.join(GPUS)}):(?:([1-9]\d*)x)?([1-9]\d*)", name)
    if not read:
        expected = f"GPUs ({', '.join(GPUS)}) as h100:2x1: servers x GPUs of each"
        raise BadInput(f"--servers: expected {expected}, got {name!r:.60}")
    return Hosts(read[1], "", int(read[2] or 1), int(read[3]))


def check(job: Job) -> None:
    """Raises ``BadInput`` for a job that cannot be written, before anything is compiled."""
    kind, hosts, base, run_dir = job.kind, job.hosts, job.config.model.base, job.config.run.dir
    known = {"jobset": {*_GKE_TPUS, *GPUS}, "skypilot": {*_SKY_TPUS, *GPUS}, "slurm": {*GPUS}}[kind]
    for group in filter(None, (hosts, job.servers)):
        chips = f"a topology of {', '.join(sorted(known))}"
        _require(group.kind in known, f"--emit {kind}", chips, group.kind)
    image = "--image (scripts/Dockerfile makes one)" if kind == "jobset" else "no --image"
    _require((kind == "jobset") == bool(job.image), f"--emit {kind}", image, job.image)
    places = {
        "jobset": job.bucket or job.run_dir.startswith("/shared/"),
        "skypilot": job.bucket,  # its machines lose their disks
        "slurm": True,
    }
    shared = " or a path below /shared" if kind == "jobset" else ""
    _require(places[kind], "--run.dir", f"gs://… or s3://…{shared} with --emit {kind}", run_dir)
    has_weights = not Path(base).is_dir() or any(Path(base).glob("*.safetensors"))
    hub = "a hub id (with --emit slurm also a path with weights)"
    local = kind == "slurm" and has_weights
    _require(local or not Path(base).exists(), "--model.base", hub, base)
    for file in (*job.files, job.config.team.file or ""):
        outside = os.path.isabs(file) or os.path.normpath(file).startswith("..")
        here = "a path in this folder, which the job's hosts get"
        _require(kind == "slurm" or not outside, f"--emit {kind}", here, file)
    if not job.servers:
        return
    engine = {field.name for field in fields(Rollout)} - {x.name for x in fields(RolloutSettings)}
    given = sorted({f"rollout.{name}" for name in engine} & {*job.flags})
    _require(not given, "--servers", "no setting of our engine", ", ".join(given))
    several = len({*load_team(job.config.team.file).on}) > 1
    of_all = "several bases" if several else base
    _require(
        not several and base != "tiny", "--servers", "one base for all agents, and not tiny", of_all
    )
    rank = job.config.lora.rank
    _require(rank <= _RANKS[-1], "--servers", f"--lora.rank up to {_RANKS[-1]}", rank)


def _require(is_so: object, where: str, expected: str, got: object) -> None:
    if not is_so:
        raise BadInput(f"{where}: expected {expected}, got {str(got):.80}")


def manifest(job: Job, mesh: Mapping[str, int], team: Team) -> str:
    """Writes the job.

    Args:
        mesh: sizes of the axes of the planned mesh.
    """
    loader = jinja2.FileSystemLoader(Path(__file__).with_name("jobs"))
    environment = jinja2.Environment(
        loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    [template] = [name for name in loader.list_templates() if name.startswith(job.kind)]
    extras = ["tpu" if job.hosts.is_tpu else "cuda", "hub", *["storage"] * bool(job.bucket)]
    return environment.get_template(template).render(
        job=job, hosts=job.hosts, servers=job.servers, name=job.name, extras=",".join(extras),
        files=[_spelled(job, file) for file in job.files], flags=_flags(job, mesh),
        base=_spelled(job, job.config.model.base), image=_spelled(job, job.image or ""),
        serve=_serve(job, team) if job.servers else {}, vllm=_VLLM,
        shared=job.run_dir.startswith("/shared/") or bool(job.servers),
        fraction="" if job.hosts.is_tpu else os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", ""),
    )  # fmt: skip


def _spelled(job: Job, word: str) -> str:
    """Quotes a word for YAML, where Kubernetes replaces ``$(NAME)`` and ``$$``, or for a shell."""
    if job.kind == "jobset":
        return json.dumps(word.replace("$", "$$"), ensure_ascii=False)
    return shlex.quote(word)


def _flags(job: Job, mesh: Mapping[str, int]) -> dict[str, list[str]]:
    """Returns the flags of the training command with their spelled values."""
    hosts, name = job.hosts, job.name
    flags = job.flags | {"run.dir": [job.run_dir]}
    flags |= {f"mesh.{axis}": [str(size)] for axis, size in mesh.items()}
    if hosts.count > 1:  # hosts start minutes apart
        flags = {"mesh.wait_seconds": ["300"]} | flags | {"mesh.coordinator": ["auto"]}
    spelled = {key: [_spelled(job, word) for word in words] for key, words in flags.items()}
    first = {
        "jobset": (f'"{name}-train-0-0.{name}:{_PORT}"', '"$(JOB_COMPLETION_INDEX)"'),
        "skypilot": (f'"$(head -n1 <<< "$SKYPILOT_NODE_IPS"):{_PORT}"', '"$SKYPILOT_NODE_RANK"'),
    }
    if hosts.count > 1 and not hosts.is_tpu and job.kind in first:
        address, number = first[job.kind]
        processes = {"mesh.processes": [f'"{hosts.count}"'], "mesh.process": [number]}
        spelled |= {"mesh.coordinator": [address]} | processes
    if job.servers:
        urls, place = ['"${urls[@]}"'], '"$PWD"' if job.kind == "slurm" else "/shared"
        if job.kind == "jobset":
            count = range(job.servers.count)
            urls = [f'"http://{name}-servers-0-{i}.{name}:8000"' for i in count]
        spelled |= {"rollout.sampler": ["http"], "rollout.urls": urls}
        spelled |= {"rollout.sampler_folder": [f"{place}/adapters/{name}"]}
    return spelled


def _serve(job: Job, team: Team) -> dict[str, str]:
    """Returns the arguments of a server of vLLM with their spelled values."""
    assert job.servers
    config, adapters = job.config, sum(team.adapters.values())
    filters = any(x.top_p < 1 or x.top_k or x.min_p for x in team.sampling)
    values = {
        "dtype": config.model.dtype,
        "max-model-len": config.model.context,
        "tensor-parallel-size": job.servers.chips,
        "max-lora-rank": min(x for x in _RANKS if x >= config.lora.rank),
        "max-loras": adapters,
        "max-cpu-loras": adapters * (config.rollout.lag + 2),
        # of the policy: at its temperature, and before filters
        "logprobs-mode": "raw_logprobs" if filters else "processed_logprobs",
        "generation-config": "vllm",
        "host": "0.0.0.0",
        "port": 8000,
    }
    return {key: _spelled(job, str(value)) for key, value in values.items()}


def write(job: Job, mesh: Mapping[str, int], team: Team, out: str) -> str:
    """Writes the job into a file, and returns what to do next."""
    Path(out).write_text(manifest(job, mesh, team), encoding="utf-8")
    return f"wrote {out}; {KINDS[job.kind]} {shlex.quote(out)}"
