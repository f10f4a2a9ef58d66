"""Opponents from the past: a pool of the run's own versions, which frozen agents play as.

An agent with ``past: NAME`` in the team file has an adapter that does not learn: in each step it is
a version that NAME had earlier. The pool keeps K of them, so that each of those taken so far is as
likely to be there (reservoir sampling, Vitter 1985): against a random one, play is fictitious
self-play (Heinrich et al. 2015). ``strong`` prefers those that earn most, by the square of their
share of points, as AlphaStar's league does (Vinyals et al. 2019).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from marft_jax.learning.state import EMA, TrainState
from marft_jax.learning.state_parts import StatePart
from marft_jax.models.lora import Adapters
from marft_jax.random_keys import Stream, generator
from marft_jax.settings.config import Config, RolloutSettings
from marft_jax.team.prompts import Team
from marft_jax.types import MAIN, Episode

_DECAY = 0.8  # of a version's share of points, from one of its steps to the next
_POINTS = {"win": 1.0, "draw": 0.5, "loss": 0.0}


class Past(NamedTuple):
    """Which agents on a base play as whom: its adapters ``seats`` as earlier ones of ``of``."""

    base: str
    names: tuple[str, ...]
    seats: tuple[int, ...]
    of: tuple[int, ...]


class Pool(NamedTuple):
    """Past versions of adapters: the part ``pool`` of the training state."""

    versions: Adapters  # leading axes K, and the agents that play as them
    chosen: jax.Array  # the version that plays the next step
    points_K: EMA  # share of points that each has won


def past_selves(config: Config, team: Team, base: str = MAIN) -> StatePart:
    """Makes the pool of a base on which agents play as another one's past."""
    pairs = [
        (profile.name, owner, team.owners[team.names.index(profile.past)])
        for profile, owner, on in zip(team.profiles, team.owners, team.bases, strict=True)
        if profile.past is not None and on == base
    ]
    past, settings = Past(base, *zip(*pairs, strict=True)), config.rollout
    return StatePart(
        functools.partial(begin, past, settings.past_kept),
        functools.partial(after_step, past, settings),
    )


def begin(past: Past, kept: int, state: TrainState) -> tuple[Pool, TrainState]:
    """Fills the pool with the version that a run begins with, and seats it."""
    of, seats = jnp.array(past.of), jnp.array(past.seats)
    present = state.adapters[past.base]
    first = jax.tree.map(lambda x: x[of], present)
    versions = jax.tree.map(lambda x: jnp.stack([x] * kept), first)
    adapters = jax.tree.map(lambda x, version: x.at[seats].set(version), present, first)
    pool = Pool(versions, jnp.int32(0), EMA(jnp.zeros(kept), jnp.zeros(kept)))
    return pool, state.with_adapters({**state.adapters, past.base: adapters})


def after_step(
    past: Past,
    settings: RolloutSettings,
    pool: Pool,
    state: TrainState,
    played: Sequence[Episode],
    seed: tuple[int, int],
) -> tuple[Pool, TrainState]:
    """Takes the present version into the pool where that is due, and seats the next opponent.

    Args:
        state: after a step, in which ``played`` were played against the version that is chosen.
        seed: of the run, and of the attempt at the step.
    """
    draw, points = generator(seed[0], Stream.POOL, seed[1]), pool.points_K
    before, at = np.arange(settings.past_kept) == int(pool.chosen), -1
    if (share := _share(past, played)) is not None:
        points = points.update(np.where(before, share, 0.0), before, _DECAY)
    taken, due = divmod(int(state.step), settings.past_every)  # versions besides the first
    if not due:
        at = taken if taken < settings.past_kept else int(draw.integers(taken + 1))
        at = at if at < settings.past_kept else -1
        fresh = np.arange(settings.past_kept) == at
        points = EMA(*(np.where(fresh, 0, x).astype(np.float32) for x in points))
    there = np.arange(settings.past_kept) <= taken
    weight = np.where(np.asarray(points.weight_X) > 0, points.mean, 0.5) ** 2 + 1e-3
    odds = there * (weight if settings.past_choice == "strong" else 1.0)
    chosen = np.int32(draw.choice(settings.past_kept, p=odds / odds.sum()))
    adapters, versions = _seat(past, state.adapters[past.base], pool.versions, at, chosen)
    place = functools.partial(jax.device_put, device=state.step.sharding)
    pool = Pool(versions, place(chosen), jax.tree.map(place, points))
    return pool, state.with_adapters({**state.adapters, past.base: adapters})


@functools.partial(jax.jit, static_argnums=0)
def _seat(
    past: Past, adapters: Adapters, versions: Adapters, at: jax.Array, chosen: jax.Array
) -> tuple[Adapters, Adapters]:
    """Writes the present version at a place of the pool, unless that is -1, and seats one."""

    def keep(kept: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(at < 0, kept, kept.at[at].set(x[jnp.array(past.of)]))

    versions = jax.tree.map(keep, versions, adapters)
    seats = jnp.array(past.seats)
    return jax.tree.map(lambda x, v: x.at[seats].set(v[chosen]), adapters, versions), versions


def _share(past: Past, played: Sequence[Episode]) -> float | None:
    """Mean points of the past selves in games that say who won."""
    infos = [episode.results[-1].info.get("outcomes", {}) for episode in played]
    outcomes = [info[name] for info in infos for name in past.names if name in info]
    points = [_POINTS[outcome["outcome"]] for outcome in outcomes]
    return float(np.mean(points)) if points else None
