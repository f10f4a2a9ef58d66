"""Episodes, many at once: the tasks of a step, live episodes, and what is learned from them.

Other rooms play through ``Rollout``; ``collect.collect`` plays the tasks of a training step.
"""

from marft_jax.rollout.collect import Collected
from marft_jax.rollout.curriculum import Curriculum
from marft_jax.rollout.pipeline import Pipeline
from marft_jax.rollout.rollout import Rollout

__all__ = ["Collected", "Curriculum", "Pipeline", "Rollout"]
