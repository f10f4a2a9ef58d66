"""Benchmarks by name, and scores of answers with confidence intervals."""

from marft_jax.evaluation.benchmarks import BENCHMARKS, BenchmarkPlan, plans
from marft_jax.evaluation.scores import Score, score

__all__ = ["BENCHMARKS", "BenchmarkPlan", "Score", "plans", "score"]
