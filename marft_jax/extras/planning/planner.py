"""Plans every base of a run for a topology."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from marft_jax.extras.planning import cost, verdict
from marft_jax.extras.planning.compile import PlannedRun, compiled, describe
from marft_jax.extras.planning.topology import Topology
from marft_jax.extras.planning.work import on_base, step_work
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.settings import Distill
from marft_jax.models import lora
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer
from marft_jax.models.weights.sources import decoder_config
from marft_jax.settings import config as config_lib
from marft_jax.team.assemble import make_team, workflow_of
from marft_jax.team.bases import context_of, models_of
from marft_jax.team.team_files import load_team
from marft_jax.types import MAIN


def plans(
    config: config_lib.Config,
    topology: Topology,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, verdict.Plan]:
    """Compiles all programs of a run for a topology; reads no weights.

    Args:
        log: called with a line of progress.

    Returns:
        The plan of each base; its peaks have what the other bases hold on the same devices.

    Raises:
        BadInput: the model, the team or the mesh is wrong.
    """
    alone = dict[str, verdict.Plan]()
    for base, run in described(config, topology).items():
        log(_title(run, topology))
        programs = compiled(run, log)
        costs = cost.costs(run, programs)
        alone[base] = verdict.Plan(
            run, topology, programs, costs, *verdict.memory_of(run, programs)
        )
    return {base: verdict.beside(plan, alone) for base, plan in alone.items()}


def described(config: config_lib.Config, topology: Topology) -> dict[str, PlannedRun]:
    """Describes a run on a topology for each base, and compiles nothing; raises as ``plans``."""
    blueprint = load_team(config.team.file)
    teachers = blueprint.teachers if isinstance(config.algo, Distill) else ()
    taught_by = [teacher.base or "" if teacher else "" for teacher in teachers]
    models = models_of(config.model, blueprint.bases, [*blueprint.on, *filter(None, taught_by)])
    decoders = {base: decoder_config(model.base) for base, model in models.items()}
    talk = {
        base: (ByteTokenizer(), context_of(base, models[base], decoder.max_position))
        for base, decoder in decoders.items()
        if base in blueprint.on
    }
    config = config_lib.with_context(config, talk[MAIN][1]) if MAIN in talk else config
    lora.check_targets([decoders[base] for base in talk], config.lora.targets)
    team = make_team(config.team, config.lora.mode, blueprint, talk)
    work = step_work(config, team, workflow_of(config.team, blueprint))
    algorithm, runs = find_algorithm(config.algo.name), dict[str, PlannedRun]()
    for base, decoder in decoders.items():
        of_base = dataclasses.replace(config, model=models[base])
        parts = [on_base(team, work, base, on) for on in (team.bases, taught_by) if base in on]
        (members, part), taught = parts[0], parts[-1] if base in taught_by else None
        place = [*talk].index(base) if base in talk else 0, len(talk)
        runs[base] = describe(of_base, members, algorithm, decoder, part, topology, taught, place)
    return runs


def _title(run: PlannedRun, topology: Topology) -> str:
    """Says in a line what is planned on which hardware."""
    config, model = run.config, run.model
    vocabularies = 1 if model.tie_embeddings else 2
    vocabulary = vocabularies * model.vocab_size * model.d_model
    weights, active = (f(model) + vocabulary for f in (cost.block_weights, cost.active_weights))
    of_these = f", {active / 1e9:.2f} B active" if active < weights else ""
    mesh = "x".join(str(size) for size in run.mesh.shape.values())
    if run.config.mesh.rollout:
        mesh += f" learns, {'x'.join(map(str, run.config.mesh.rollout))} plays"
    return (
        f"{config.model.base} ({weights / 1e9:.2f} B weights{of_these}, {config.model.dtype}), "
        f"{len(run.team.profiles)} agents, {sum(run.team.adapters.values())} adapters of rank "
        f"{config.lora.rank} on {', '.join(config.lora.targets)}, {config.algo.name}; "
        f"{topology.name}: {len(topology.devices)} devices in {topology.hosts} hosts, mesh {mesh}"
    )
