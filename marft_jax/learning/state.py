"""State of training: everything that an update changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from marft_jax import random_keys
from marft_jax.learning.moving import ROLES
from marft_jax.learning.settings import LearnerSettings, Reinforce
from marft_jax.models import lora
from marft_jax.models.decoder_config import DecoderConfig
from marft_jax.policy import critic as critic_lib
from marft_jax.policy import optimiser
from marft_jax.policy.critic import Critic
from marft_jax.policy.optimiser import PolicyState
from marft_jax.random_keys import Stream
from marft_jax.team.prompts import Team
from marft_jax.types import Version


class EMA(NamedTuple):
    """Moving average, or one per agent: ``total / weight``; 0 before the first number."""

    total_X: np.ndarray | jax.Array  # ``[]`` or ``[P]``; checkpoints of every release have these
    weight_X: np.ndarray | jax.Array  # names

    @property
    def mean(self) -> np.ndarray:
        """``[]`` or ``[P]``, on the host."""
        return np.asarray(self.total_X / np.where(self.weight_X > 0, self.weight_X, 1))

    def update(self, mean_P: np.ndarray, count_P: np.ndarray, decay: float) -> EMA:
        """Adds one more number for each agent with a count; one that is not finite has none."""
        counts_P = (count_P > 0) & np.isfinite(mean_P)
        keep_P, mean_P = np.where(counts_P, decay, 1.0), np.where(counts_P, mean_P, 0.0)
        return EMA(
            np.asarray(keep_P * self.total_X + (1 - keep_P) * mean_P, np.float32),
            np.asarray(keep_P * self.weight_X + (1 - keep_P), np.float32),
        )


class TrainState(NamedTuple):
    """State that training changes: the team's own, and a policy state for each base."""

    step: jax.Array  # training steps done
    policies: dict[str, PolicyState]  # by the name of their base
    # the critic's value heads over the features of each base, and its adapters there; and the Adam
    # states of these
    critic: dict[str, Critic]
    critic_opt: dict[str, Critic]
    # the moving average of each agent's returns, where ``algo.baseline`` wants one
    baseline: EMA
    # what the critic's outputs are multiplied with: the moving average of each step's largest
    # return, so that rewards of any size are learned alike
    values_scale: EMA
    lr_scale: jax.Array  # multiplies the learning rates; lowered by rollbacks
    progress: jax.Array  # the curriculum's level, and the moving mean of the rewards there
    parts: dict[str, Any]  # of extras and users, by name: see ``state_parts``
    # the versions of the last ``rollout.lag`` states, the oldest first, which sample the next
    # steps; before the first update they are all the initial one
    past: tuple[Version, ...] = ()

    @property
    def adapters(self) -> dict[str, lora.Adapters]:
        """Adapters of each base."""
        return {base: policy.adapters for base, policy in self.policies.items()}

    def with_adapters(self, adapters: Mapping[str, lora.Adapters]) -> TrainState:
        """Replaces the adapters of each base."""
        policies = {b: p._replace(adapters=adapters[b]) for b, p in self.policies.items()}
        return self._replace(policies=policies)

    def begun(self) -> TrainState:
        """Sets the past versions and the references to the present adapters, as a run begins."""
        return self._replace(past=tuple(self.version() for _ in self.past)).refer_to_present()

    def refer_to_present(self) -> TrainState:
        """Sets the reference of each KL, where there is one, to a copy of the present adapters."""
        policies = {
            base: policy._replace(reference=jax.tree.map(jnp.copy, policy.adapters))
            if policy.reference
            else policy
            for base, policy in self.policies.items()
        }
        return self._replace(policies=policies)

    def version(self) -> Version:
        """Copies the version, which stays when the state is donated."""
        return jax.tree.map(jnp.copy, Version(self.adapters, self.progress))


def fresh_state(
    settings: LearnerSettings,
    configs: Mapping[str, DecoderConfig],
    team: Team,
) -> TrainState:
    """Makes the state before the first step.

    Args:
        configs: of each base.
        team: says which adapters each base has; a base on which none learns has no optimiser.
    """
    agents = len(team.profiles)
    adapters_key, critic_key = (
        jax.random.wrap_key_data(jnp.asarray(random_keys.key_2(settings.seed, stream)))
        for stream in (Stream.ADAPTERS, Stream.CRITIC)
    )
    policies, critics, critic_opts = {}, {}, {}
    head, drawn = settings.critic, {"rank": settings.lora.rank, "targets": settings.lora.targets}
    for base, config in configs.items():
        stacked = lora.init(adapters_key, config, adapters=team.numbers[base], **drawn)
        reference = stacked if settings.reference == "start" else ()
        opt = optimiser.init(stacked if base in team.learning_bases else {})
        policies[base] = PolicyState(stacked, opt, reference)
        critics[base] = critic = critic_lib.init(
            critic_key, config, mode=head.mode if head else "none",
            hidden=head.hidden if head else (), labels=agents, **drawn,
        )  # fmt: skip
        critic_opts[base] = Critic(*map(optimiser.init, critic))
    means = agents * ROLES if settings.algo.part(Reinforce).baseline == "role" else agents
    none, progress = jnp.zeros(means), jnp.zeros(2)
    state = TrainState(
        step=jnp.int32(0),
        policies=policies,
        critic=critics,
        critic_opt=critic_opts,
        baseline=EMA(none, none),
        values_scale=EMA(jnp.zeros(()), jnp.zeros(())),
        lr_scale=jnp.float32(1),
        progress=progress,
        parts={},
    )
    return state._replace(past=(Version(state.adapters, progress),) * settings.lag)
