"""The result of a plan: memory, time and advice, as text, tables and numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from marft_jax.extras.planning.compile import Compiled, PlannedRun, per_chip
from marft_jax.extras.planning.cost import LEARNING, PLAYING, Cost
from marft_jax.extras.planning.topology import Topology

_SIDES = {"play": PLAYING, "learn": LEARNING}


class Plan(NamedTuple):
    """What a configuration needs on a topology.

    Attributes:
        memory: bytes per chip, by what they hold.
        peaks: bytes per chip while each program runs, with everything else that is allocated then.
    """

    run: PlannedRun
    topology: Topology
    programs: dict[str, Compiled]
    costs: dict[str, Cost]
    memory: dict[str, float]
    peaks: dict[str, float]

    @property
    def peak(self) -> float:
        return max(self.peaks.values())

    @property
    def worst(self) -> str:
        """Name of the program that needs most memory."""
        return max(self.peaks, key=lambda name: self.peaks[name])

    @property
    def fits(self) -> bool:
        """True if the peak is within a chip's memory; virtual devices have no limit."""
        chip = self.topology.chip
        return chip is None or self.peak <= chip.memory


def memory_of(
    run: PlannedRun, programs: dict[str, Compiled]
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns bytes per chip by what they hold, and the peak while each program runs."""
    state = run.state
    held = {
        "weights": run.base,
        "adapters": (state.adapters, state.past),
        "critic": state.critic,
        "optimiser": ([p.adapters_opt for p in state.policies.values()], state.critic_opt),
        "cache": run.slots if run.plays else (),
    }
    held |= {"teachers": run.teachers} if run.teachers else {}
    memory: dict[str, float] = {name: per_chip(tree) for name, tree in held.items()}
    memory["activations"] = max((program.scratch for program in programs.values()), default=0)
    code = sum(program.code for program in programs.values())
    past, optimiser = float(per_chip(state.past)), memory["optimiser"]
    teachers = memory.get("teachers", 0.0)
    # with a lag the engine plays while the learner works; without, it releases its cache first
    ahead = past + memory["cache"] if run.config.rollout.lag else 0.0
    asleep = optimiser + memory["critic"] + past + teachers
    if run.config.mesh.rollout:  # no device does both
        ahead, asleep = 0.0, memory["adapters"]
    ahead += teachers
    adapters, critic = (2 * per_chip(x) for x in (state.adapters, state.critic))  # and gradients
    beside = {  # allocated, but no argument of the program
        "gradients": optimiser + critic + ahead,
        "critic": optimiser + adapters + ahead,
        "optimiser": memory["weights"] + ahead,
        "values": optimiser + ahead,
        "teacher": memory["adapters"] + memory["critic"] + optimiser + ahead - past - teachers,
        "prefill": asleep,
        "decode": asleep,
    }
    peaks = {
        name: program.peak + beside[name] + code - program.code
        for name, program in programs.items()
    }
    return memory, peaks


def beside(plan: Plan, plans: Mapping[str, Plan]) -> Plan:
    """Adds to the peaks of a base's programs what the other bases hold meanwhile."""
    held = [other.memory for other in plans.values() if other is not plan]
    kinds = ("weights", "adapters", "teachers", "critic", "optimiser")
    always = sum(x.get(kind, 0.0) for x in held for kind in kinds)
    caches = sum(x["cache"] for x in held)
    mesh, ahead = plan.run.config.mesh, plan.run.config.rollout.lag > 0
    if mesh.bases:  # each base plays on chips of its own
        caches = 0.0
    playing = 0.0 if mesh.bases and mesh.rollout else always
    peaks = {
        name: peak + (playing + caches if name in PLAYING else always + caches * ahead)
        for name, peak in plan.peaks.items()
    }
    return plan._replace(peaks=peaks)


def advice(plan: Plan) -> str:
    """Names the setting to change first if a plan does not fit; else ""."""
    run, chip, config = plan.run, plan.topology.chip, plan.run.config
    if chip is None or plan.fits:
        return ""
    share, per_host = run.mesh.shape["fsdp"] * run.mesh.shape["tensor"], plan.topology.per_host
    if plan.memory["weights"] > chip.memory / 2:
        if config.model.dtype == "float32":
            return "--model.dtype bfloat16 halves the weights"
        if share < per_host:
            return f"--mesh.tensor {per_host} spreads the weights over all chips of a host"
        return "the weights alone fill a host; use chips with more memory"
    if plan.worst not in LEARNING:
        left = (1 - (plan.peak - chip.memory) / plan.memory["cache"]) * run.shape.slots
        if left >= 1:
            return f"--rollout.slots {int(left)} makes the cache smaller"
    _, rows, width = run.batch.rows.rows.tokens.ids_BT.shape
    shards = run.mesh.shape["data"] * run.mesh.shape["fsdp"]
    if plan.worst in LEARNING and rows > shards:
        return f"--algo.microbatch_tokens {max(shards, rows // 2) * width} makes passes smaller"
    if share < per_host:
        return f"--mesh.tensor {per_host} spreads weights, cache and activations over a host"
    return f"--model.context {config.model.context // 2} makes rows shorter"


def verdict(plan: Plan) -> str:
    """Says if the plan fits, and what a step plays."""
    chip, work, peak = plan.topology.chip, plan.run.work, _gb(plan.peak)
    if chip is None:
        lines = [f"peak {peak} per device; virtual devices have no limit"]
    elif plan.fits:
        lines = [f"fits: peak {peak} of {_gb(chip.memory)} per chip"]
    else:
        needs = f"peak {peak} of {_gb(chip.memory)} per chip, in {plan.worst}"
        lines = [f"does not fit: {needs}; {advice(plan)}"]
    if plan.run.config.mesh.rollout:
        peaks = {s: max(plan.peaks.get(n, 0.0) for n in names) for s, names in _SIDES.items()}
        lines.append("; ".join(f"devices that {side}: {_gb(x)}" for side, x in peaks.items()))
    sampled = ", sampled elsewhere" * (plan.run.config.rollout.sampler != "engine")
    lines.append(f"a step has {work.turns} turns of up to {work.context} tokens{sampled}")
    return "\n".join(lines)


_STYLE: dict[str, Any] = dict(box=box.SIMPLE, padding=0)  # narrow: fits into 80 columns
_MEASURES: dict[str, Callable[[Plan, str], float]] = {
    "calls": lambda plan, name: plan.costs[name].calls,
    "s to compile": lambda plan, name: plan.programs[name].seconds,
    "GB at the peak": lambda plan, name: plan.peaks[name] / 1e9,
    "TFLOP": lambda plan, name: plan.costs[name].flops / 1e12,
    "GB of memory": lambda plan, name: plan.costs[name].bytes / 1e9,
}


def memory_table(plan: Plan) -> Table:
    """Makes a table of a chip's memory, by what it holds."""
    chip = plan.topology.chip
    sizes = plan.memory | {"peak": plan.peak} | ({"limit": chip.memory} if chip else {})
    shown = Table(*sizes, title="GB per chip", **_STYLE)
    shown.add_row(*(_short(size / 1e9) for size in sizes.values()))
    return shown


def programs_table(plan: Plan) -> Table:
    """Makes a table of programs: calls in a step, and what a call costs."""
    shown = Table("per call", *plan.programs, title="programs of a step", **_STYLE)
    for label, measure in _MEASURES.items():
        shown.add_row(label, *(_short(measure(plan, name)) for name in plan.programs))
    return shown


def numbers(plan: Plan) -> dict[str, Any]:
    """Returns everything as plain values for ``--json``, in bytes and seconds."""
    run, chip = plan.run, plan.topology.chip
    return {
        "model": run.config.model.base,
        "layers": run.model.n_layers,
        "agents": len(run.team.profiles),
        "adapters": sum(run.team.adapters.values()),
        "topology": plan.topology.name,
        "devices": run.mesh.size,
        "hosts": plan.topology.hosts,
        "mesh": dict(run.mesh.shape),
        "rollout_mesh": dict(run.here.shape) | {"data": run.here.shape["data"] * run.hosts},
        "turns": run.work.turns,
        "memory": plan.memory,
        "peak": plan.peak,
        "limit": chip.memory if chip else None,
        "fits": plan.fits,
        "advice": advice(plan),
        "programs": {
            name: program._asdict() | {"peak": plan.peaks[name]} | plan.costs[name]._asdict()
            for name, program in plan.programs.items()
        },
    }


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 1000 else f"{number:.3g}"


def _gb(size: float) -> str:
    return f"{_short(size / 1e9)} GB"
