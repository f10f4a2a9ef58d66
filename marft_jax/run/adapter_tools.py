"""What a sampler elsewhere is given: how to draw, write and score the adapters of a base."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from marft_jax.errors import BadInput
from marft_jax.interop import peft
from marft_jax.models import lora
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.policy import Datum, forward, pack
from marft_jax.policy.optimiser import PolicyState
from marft_jax.policy.policy import policy_of
from marft_jax.run.models import TeamModels
from marft_jax.sampling.settings import AdapterTools, Matrices, Scored


def adapter_tools(models: TeamModels, name: str) -> AdapterTools:
    """Makes the tools of a base of the team."""
    config, base, count = models.config.lora, models.bases[name], models.team.adapters[name]
    mesh = mesh_lib.local_mesh(models.devices.learning)

    def draw() -> Matrices:
        key, numbers = jax.random.key(0), range(count)
        fresh = lora.init(
            key, base.config, adapters=numbers, rank=config.rank, targets=config.targets
        )
        return jax.device_get(fresh)

    def write(folder: Path, matrices: Matrices, each_expert: bool) -> None:
        if unnamed := peft.unnamed(base.config.files, config.targets):
            raise BadInput(
                f"--lora.targets: the checkpoint of {base.source} has other matrices than "
                f"{', '.join(unnamed)}, so that an adapter of peft cannot name them; use "
                "--rollout.sampler engine, or other targets"
            )
        peft.write(
            folder,
            matrices,
            config.alpha,
            base.source,
            peft.layers_in(base.source),
            base.config.layers_with,
            dict(base.config.spelling),
            each_expert,
        )

    def score(stacks: Sequence[Matrices], actions: Sequence[Scored]) -> list[np.ndarray]:
        none = jax.tree.map(lambda x: np.zeros_like(x[:1]), stacks[0])
        whole = jax.tree.map(lambda *x: np.concatenate(x), *stacks, none)
        n, _ = lora.shape_of(whole)
        state = PolicyState(mesh_lib.put(whole, mesh_lib.replicated(mesh)), ())
        local_base = base._replace(params=mesh_lib.localize(base.params, mesh))
        policy = policy_of(local_base, mesh, state, config.alpha)
        data = [
            Datum.of(
                adapter % n,
                ids=np.concatenate([prompt, action[:-1]]),
                positions=np.arange(len(action)) + len(prompt) - 1,
                targets=action,
                temperature=temperature or 1.0,
            )
            for prompt, action, adapter, temperature in actions
        ]
        return forward(policy, pack(policy, data))

    return AdapterTools(draw, write, score)
