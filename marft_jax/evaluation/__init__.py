"""Benchmarks by name, and scores of what was answered, with their confidence intervals."""

from marft_jax.evaluation.benchmarks import BENCHMARKS, BenchmarkPlan, plans
from marft_jax.evaluation.scores import Score, score

__all__ = ["BENCHMARKS", "BenchmarkPlan", "Score", "plans", "score"]
