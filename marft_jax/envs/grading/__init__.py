"""Grades mathematical answers: finds the answer in a text and compares it with the reference.

Nothing here imports JAX or sympy; sympy lives in the worker processes.
"""

from marft_jax.envs.grading.extract import extract
from marft_jax.envs.grading.pool import GradingPool

__all__ = ["GradingPool", "extract"]
