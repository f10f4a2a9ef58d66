"""A plan in words and tables: what is where, how long it takes, and what to change."""

from __future__ import annotations

from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from marft_jax.planning.compile import Compiled, Run, per_chip
from marft_jax.planning.cost import Cost
from marft_jax.planning.topology import Topology

_LEARNING = ("values", "gradients", "optimiser")


class Plan(NamedTuple):
    """What was found.

    Attributes:
        memory: bytes per chip, by what they hold.
        peaks: bytes per chip in use while each program runs, with all that lies beside it.
        depths: the numbers of layers that were compiled; one, or two that were extended.
    """

    run: Run
    topology: Topology
    programs: dict[str, Compiled]
    costs: dict[str, Cost]
    memory: dict[str, float]
    peaks: dict[str, float]
    depths: tuple[int, ...]

    @property
    def peak(self) -> float:
        return max(self.peaks.values())

    @property
    def fits(self) -> bool:
        """Whether it stays below a chip's memory; virtual devices have no limit."""
        chip = self.topology.chip
        return chip is None or self.peak <= chip.memory

    @property
    def gradients(self) -> float:
        """Bytes of the gradients of adapters and critic."""
        return self.memory["adapters"] + self.memory["critic"]

    @property
    def across(self) -> float:
        """Bytes per chip that hosts reduce together in each step of the optimiser."""
        return self.programs["optimiser"].traffic.moved(across=True).payload


def memory_of(run: Run, programs: dict[str, Compiled]) -> tuple[dict[str, float], dict[str, float]]:
    """(bytes per chip by what they hold, the peak while each program runs)."""
    state = run.state
    optimiser = per_chip(state.adapters_opt) + per_chip(state.critic_opt)
    memory: dict[str, float] = {
        "weights": per_chip(run.base),
        "adapters": per_chip(state.adapters),
        "critic": per_chip(state.critic),
        "optimiser": optimiser,
        "cache": per_chip(run.slots),
        "activations": max((program.scratch for program in programs.values()), default=0),
    }
    code = sum(program.code for program in programs.values())
    beside = {  # what a program does not take, and yet is there; learning, the engine is at rest
        "gradients": optimiser,
        "optimiser": memory["weights"],
        "prefill": optimiser + memory["critic"],
        "values": optimiser,
        "decode": optimiser + memory["critic"],
    }
    peaks = {
        name: program.peak + beside[name] + code - program.code
        for name, program in programs.items()
    }
    return memory, peaks


def advice(plan: Plan) -> str:
    """The setting to change first, where a plan does not fit."""
    run, chip, config = plan.run, plan.topology.chip, plan.run.config
    if chip is None or plan.fits:
        return ""
    share = run.mesh.shape["fsdp"] * run.mesh.shape["tensor"]
    per_host = plan.topology.per_host
    worst = max(plan.peaks, key=lambda name: plan.peaks[name])
    if plan.memory["weights"] > chip.memory / 2:
        if config.model.dtype == "float32":
            return "--model.dtype bfloat16 halves the weights"
        if share < per_host:
            return f"--mesh.tensor {per_host} spreads the weights over all chips of a host"
        return "a copy of the weights leaves no room in a host; take chips with more memory"
    excess = plan.peak - chip.memory
    if worst not in _LEARNING and plan.memory["cache"] > excess:
        left = (1 - excess / plan.memory["cache"]) * run.shape.slots
        if left >= 1:
            return f"--rollout.slots {int(left)} makes the cache smaller"
    _, rows, width = run.batch.rows.tokens_UBT.shape
    shards = run.mesh.shape["data"] * run.mesh.shape["fsdp"]
    if worst in _LEARNING and rows > shards:
        return f"--algo.microbatch_tokens {max(shards, rows // 2) * width} makes passes smaller"
    if share < per_host:
        return f"--mesh.tensor {per_host} spreads weights, cache and activations over a host"
    return f"--model.context {config.model.context // 2} makes rows shorter"


def verdict(plan: Plan) -> str:
    """Fits or not, what hosts exchange, and how long a step takes."""
    chip, lines = plan.topology.chip, []
    if chip is None:
        lines.append(f"peak {_gb(plan.peak)} per device; virtual devices have no limit")
    elif plan.fits:
        lines.append(f"fits: peak {_gb(plan.peak)} of {_gb(chip.memory)} per chip")
    else:
        worst = max(plan.peaks, key=lambda name: plan.peaks[name])
        lines.append(
            f"does not fit: peak {_gb(plan.peak)} of {_gb(chip.memory)} per chip, in {worst}; "
            f"{advice(plan)}"
        )
    if plan.topology.hosts > 1:
        times = f"{plan.across / plan.gradients:.2f} x the gradients of adapters and critic"
        network = f" ({plan.across / chip.network:.2g} s between slices)" if chip else ""
        lines.append(f"across hosts: {_gb(plan.across)} per optimiser step{network}, {times}")
    if chip is not None:
        rollout, learning = seconds(plan)
        lines.append(
            f"a step of {plan.run.work.turns} turns of up to {plan.run.work.context} tokens takes "
            f"at least {rollout:.1f} s to play and {learning:.1f} s to learn"
        )
    if len(plan.depths) > 1:
        depths, layers = " and ".join(map(str, plan.depths)), plan.run.model.n_layers
        lines.append(f"compiled with {depths} layers and extended to {layers}: all are alike")
    return "\n".join(lines)


def seconds(plan: Plan) -> tuple[float, float]:
    """(rollout, update) of a training step at the chip's limits."""
    chip = plan.topology.chip
    assert chip is not None
    each = {name: cost.seconds(chip) for name, cost in plan.costs.items()}
    return (
        each["decode"] + each["prefill"],
        sum(each[name] for name in _LEARNING if name in each),
    )


def memory_table(plan: Plan) -> Table:
    """What a chip holds."""
    shown = Table(*plan.memory, "peak", "limit", title="GB per chip", box=box.SIMPLE)
    chip = plan.topology.chip
    sizes = [*plan.memory.values(), plan.peak, *([chip.memory] if chip else [])]
    shown.add_row(*(f"{size / 1e9:.3f}" for size in sizes), *([] if chip else ["none"]))
    return shown


def programs_table(plan: Plan) -> Table:
    """Of each program: how often it runs in a step, and what a call costs a chip."""
    shown = Table(
        "program", "calls", "compiled", "peak", "TFLOP", "memory", "in host", "across",
        *(["s", "arithmetic", "memory", "links"] if plan.topology.chip else []),
        title="GB per chip and call; seconds of all calls, and what takes them", box=box.SIMPLE,
    )  # fmt: skip
    for name, program in plan.programs.items():
        cost, moved = plan.costs[name], program.traffic.moved
        times = []
        if plan.topology.chip is not None:
            parts = cost.times(plan.topology.chip).values()
            times = [f"{t:.3g}" for t in (cost.seconds(plan.topology.chip), *parts)]
        shown.add_row(
            name, str(cost.calls), f"{program.seconds:.0f} s", f"{plan.peaks[name] / 1e9:.2f}",
            f"{cost.flops / 1e12:.3g}", f"{cost.bytes / 1e9:.3g}",
            f"{moved(across=False).payload / 1e9:.3g}", f"{moved(across=True).payload / 1e9:.3g}",
            *times,
        )  # fmt: skip
    return shown


def numbers(plan: Plan) -> dict[str, Any]:
    """Everything, for programs to read. Bytes and seconds."""
    run, chip = plan.run, plan.topology.chip
    told = {
        "model": run.config.model.base,
        "layers": run.model.n_layers,
        "compiled_layers": list(plan.depths),
        "agents": len(run.team.profiles),
        "adapters": run.team.adapters,
        "topology": plan.topology.name,
        "devices": run.mesh.size,
        "hosts": plan.topology.hosts,
        "mesh": dict(run.mesh.shape),
        "turns": run.work.turns,
        "memory": plan.memory,
        "peak": plan.peak,
        "limit": chip.memory if chip else None,
        "fits": plan.fits,
        "advice": advice(plan),
        "gradients": plan.gradients,
        "across_per_optimiser_step": plan.across,
        "programs": {name: _program(plan, name) for name in plan.programs},
    }
    if chip is not None:
        told["rollout_s"], told["update_s"] = seconds(plan)
    return told


def _program(plan: Plan, name: str) -> dict[str, Any]:
    program, cost, chip = plan.programs[name], plan.costs[name], plan.topology.chip
    told = program._asdict() | {"peak": plan.peaks[name]}
    told["traffic"] = [
        {"kind": kind, "across_hosts": across, **moved._asdict()}
        for (kind, across), moved in sorted(program.traffic.kinds.items())
    ]
    told["loops_of_unknown_length"] = program.traffic.endless
    told |= {"calls": cost.calls, "flops": cost.flops, "bytes": cost.bytes}
    return told | ({"seconds_per_step": cost.times(chip)} if chip else {})


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
