"""A part of the training state: how many episodes each agent has acted in."""

import jax.numpy as jnp

from marft_jax.learning.state_parts import StatePart


def tally(config, team):
    def init(state):
        return jnp.zeros(len(team.names)), state

    def after_step(count_P, state, played, seed):
        acted = [{turn.agent for turn in episode.turns} for episode in played]
        return count_P + jnp.array([sum(i in own for own in acted) for i in range(2)]), state

    return StatePart(init, after_step)
