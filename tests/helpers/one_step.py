"""One training step on the small model, for the tests of the learner."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import bounds
import jax
import numpy as np
import small

from marft_jax.learning import batch as batch_lib
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.learner import Learner
from marft_jax.learning.settings import SETTINGS, Appo, LearnerSettings, resolve
from marft_jax.learning.state import TrainState
from marft_jax.parallel import mesh as mesh_lib
from marft_jax.policy.optimiser import PolicyState
from marft_jax.settings.config import Algo, Config, Critic, Lora
from marft_jax.types import MAIN

LAYERS = 1  # compiles twice as fast as two
ALGO = Appo(epochs=2, minibatches=1, lr=1e-3, microbatch_tokens=512)
ONCE = dataclasses.replace(ALGO, epochs=1)
LORA = Lora(rank=small.RANK, alpha=small.ALPHA, targets=small.QV)


def settings(algo: Algo = ALGO, **critic: Any) -> Config:
    critic = Critic(**{"hidden": (16,), "lr": 0.05, **critic})
    return small.config(algo=algo, lora=LORA, critic=critic)


def settled(config: Config, name: str) -> LearnerSettings:
    """The settings of a learner, those of ``config.algo`` as far as the algorithm has them."""
    kind = SETTINGS[name]
    if not isinstance(config.algo, kind):
        default, own = type(config.algo)(), {field.name for field in dataclasses.fields(kind)}
        given = {
            key: value
            for key, value in vars(config.algo).items()
            if key in own - {"name"}
            and (key in ("epochs", "minibatches") or value != getattr(default, key))
        }
        config = dataclasses.replace(config, algo=kind(**given))
    return resolve(config, {MAIN: (config.model.base, small.CONFIG)})


@functools.cache
def learner(config: Config, name: str = "appo", where=None, agents: int = 2) -> Learner:
    where = where or small.one_device()
    team, algorithm = small.team(agents), find_algorithm(name)
    base = small.base_on(where, LAYERS)
    return Learner(settled(config, name), {MAIN: base}, team, algorithm, where)


def build(
    config: Config, episodes, name: str = "appo", where=None, *, owners=(0, 1, 2), share=False
) -> batch_lib.Batch:
    shards = mesh_lib.row_shards(where or small.one_device())
    level = find_algorithm(name).level
    algo, rewards = settled(config, name).algo, small.paid(episodes)
    prompts = settled(config, name).reads_prompts(level)
    return batch_lib.build(
        episodes, rewards, owners, algo, level, shards=shards, share=share, prompts=prompts
    )


def fresh(config: Config, name: str = "appo", where=None, agents: int = 2) -> TrainState:
    """The learner's first state, with random adapters that are not zero."""
    where = where or small.one_device()
    state = learner(config, name, where, agents).init()
    replicated = mesh_lib.replicated(where)
    own = jax.device_put(small.adapters(agents, layers=LAYERS), replicated)
    return state.with_adapters({MAIN: own})


def learn(
    config, episodes, *, name="appo", where=None, step=0, state=None, agents=2, change=None, **how,
):  # fmt: skip
    """(state, metrics) of one training step, on the host."""
    where = where or small.one_device()
    batch = build(config, episodes, name, where, **how)
    batch = change(batch) if change else batch
    state = state or fresh(config, name, where, agents)
    state, _, metrics = learner(config, name, where, agents).learn(state, batch, step)
    return jax.device_get(state), jax.device_get(metrics)


def on_device(state: TrainState) -> TrainState:
    return jax.device_put(state, mesh_lib.replicated(small.one_device()))


def same(a, b) -> bool:
    """Bit for bit."""
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def policy_of(state: TrainState) -> PolicyState:
    """The part of the team's one base."""
    return state.policies[MAIN]


def member(state: TrainState, n: int):
    """Adapter n, and its optimiser state."""
    return jax.tree.map(lambda x: np.asarray(x[n]), policy_of(state)[:2])


def alike(got, expected, config: Config, steps: int = 1) -> None:
    """(state, metrics) of two trainings are the same, but for the rounding of each step."""
    (state, metrics), (other, others) = got, expected
    bounds.close(metrics, others, bounds.backward(layers=LAYERS), bounds.LOGITS)
    roundings = bounds.update(layers=LAYERS)
    for base, policy in state.policies.items():
        pairs = policy[:2], other.policies[base][:2]
        bounds.close_members(*pairs, config.algo.lr, roundings, steps)
        for i in range(len(state.critic[base])):
            pairs = ((s.critic[base][i], s.critic_opt[base][i]) for s in (state, other))
            bounds.close_members(*pairs, config.critic.lr, roundings, steps)
