"""Curriculum: training begins with easier tasks; the level rises as the team learns."""

from __future__ import annotations

import jax
import numpy as np

from marft_jax.envs.base import EnvSource
from marft_jax.errors import BadInput
from marft_jax.settings.config import EnvSettings

_DECAY = 0.5  # of the moving mean, per step


class Curriculum:
    """Chooses the level of the tasks that a training step plays.

    Its state is two numbers in ``TrainState.progress``: the level, and the moving mean of the
    rewards at that level. When the mean reaches ``env.curriculum``, the next level begins. Without
    that setting every step plays the environment's own tasks.

    Raises:
        BadInput: ``env.curriculum`` is set, and the environment has no easier tasks.
    """

    def __init__(self, source: EnvSource, env: EnvSettings):
        self._threshold, self._sources = env.curriculum, [source]
        if self._threshold is None:
            return
        if not source.easier:
            raise BadInput(
                f"--env.curriculum: {env.name} has no easier tasks; arithmetic with "
                "--env.difficulty above 2 has, and a class of yours with `levels` and a parameter "
                "`level`"
            )
        easier = [source._replace(create=create) for create in source.easier]
        self._sources = [*easier, source]

    def level(self, progress: jax.Array) -> int:
        """Returns the level to play, from 0."""
        return min(int(progress[0]), len(self._sources) - 1)

    def source(self, level: int) -> EnvSource:
        """Returns the environment of a level."""
        return self._sources[level]

    def after(self, progress: jax.Array, level: int, reward: float) -> jax.Array:
        """Returns the progress after a step at this level with this mean reward. A step that was
        played at another level, before the level rose, changes nothing."""
        if self._threshold is None or level != self.level(progress):
            return progress
        number, mean = (float(x) for x in np.asarray(progress))
        mean = _DECAY * mean + (1 - _DECAY) * reward
        if mean >= self._threshold:
            number, mean = number + 1, 0.0
        after = np.asarray([number, mean], np.float32)
        return jax.device_put(after, progress.sharding)  # pyright: ignore[reportUnknownMemberType]
