"""Mathematics over rows of data: GSM8K, MATH, AIME and the like, graded by what the answer means.

Only the text of the answering agents' own turns is read, never a prompt.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from marft_jax.envs.base import EnvSource, Split, bad_input, question_source
from marft_jax.envs.datasets import load
from marft_jax.envs.grading import GradingPool

if TYPE_CHECKING:
    from marft_jax.config import Config


def source(config: Config, split: Split) -> EnvSource:
    """Questions from ``env.data`` (or, for evaluation, ``env.eval_data``).

    Raises:
        BadInput: data is missing or wrong (see ``data.chooser``), or math-verify is not installed.
    """
    env = config.env
    if importlib.util.find_spec("math_verify") is None:
        raise bad_input("--env.name math needs the package math-verify: pip install math-verify")
    pick, size = load.chooser(env, split, load.maths(env))
    pool = GradingPool(env.workers, env.grade_seconds, env.extract)
    return question_source(pick, pool.grade, env.horizon, size, pool.close)
