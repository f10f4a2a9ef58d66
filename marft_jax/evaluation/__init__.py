"""Benchmarks by name, and scores of what was answered, with their confidence intervals."""

from marft_jax.evaluation.benchmarks import BENCHMARKS, Plan, plans
from marft_jax.evaluation.scores import Score, score

__all__ = ["BENCHMARKS", "Plan", "Score", "plans", "score"]
