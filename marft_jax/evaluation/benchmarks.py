"""Benchmarks by name, with the environment that plays each and the place of its tasks.

math500            all tasks, once, at --eval.temperature
aime2024:16        sixteen answers to each task
aime2024:16@0.6    at this temperature
my_tasks.jsonl:4   a file of your own, played in the environment that the settings name
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from marft_jax.envs.base import BUILT_IN, settings_type
from marft_jax.envs.datasets.rows import SUFFIXES
from marft_jax.errors import BadInput
from marft_jax.evaluation.scores import passes
from marft_jax.settings.config import Config


class Benchmark(NamedTuple):
    """Attributes:
    env: name of the environment that plays the benchmark.
    hub: id of the data set on the hub.
    file: path in a folder of data, tried before ``<name>.jsonl`` and the like.
    """

    env: str
    hub: str
    file: str | None = None


BENCHMARKS = {
    "gsm8k": Benchmark("math", "openai/gsm8k/main:test", "gsm8k/test.jsonl"),
    "math": Benchmark("math", "nlile/hendrycks-MATH-benchmark:test", "math/test.jsonl"),
    "math500": Benchmark("math", "HuggingFaceH4/MATH-500:test", "math/math500.jsonl"),
    "aime2024": Benchmark("math", "HuggingFaceH4/aime_2024", "aime/aime2024.jsonl"),
    "aime2025": Benchmark("math", "math-ai/aime25:test"),
    "aimo": Benchmark("math", "AI-MO/aimo-validation-aime", "aime/aimo_validation.jsonl"),
    "cmath": Benchmark("math", "weitianwen/cmath:test", "cmath/test.jsonl"),
    "gaokao": Benchmark("math", "dmayhem93/agieval-gaokao-mathqa:test", "gaokao_mathqa/test.jsonl"),
    "olympiadbench": Benchmark("math", "Hothan/OlympiadBench/OE_TO_maths_en_COMP"),
    "minerva": Benchmark("math", "math-ai/minervamath:test"),
    "humaneval": Benchmark("code", "openai/openai_humaneval:test", "humaneval/test.jsonl"),
    "mbpp": Benchmark("code", "google-research-datasets/mbpp/full:test"),
    "livecodebench": Benchmark("code", "agentica-org/DeepCoder-Preview-Dataset/lcbv5:test"),
}
_SETTINGS: dict[str, dict[str, Any]] = {
    "math": {"reward": (), "question_field": None, "answer_field": None},
    "code": {"reward": "all", "tests": 0},
}
"""Environment to its settings for benchmarks: what a run sets for its own rows is not for these."""
_SPEC = re.compile(r"(.+?)(?::(\d+))?(?:@(\d+(?:\.\d+)?))?", re.DOTALL)


class BenchmarkPlan(NamedTuple):
    """A benchmark to play.

    Attributes:
        name: name in reports.
        samples: answers to each task.
        config: the settings, with this benchmark's environment and temperature.
        tasks: most tasks to play.
    """

    name: str
    samples: int
    config: Config
    tasks: int

    def count(self, size: int | None) -> int:
        """Returns the number of tasks to play from a source of this size; None is endless."""
        return self.tasks if size is None else min(self.tasks, size)

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics of its score, see ``Score.metrics``."""
        kinds = ["accuracy", "reward", *(f"pass@{k}" for k in passes(self.samples) if k > 1)]
        return [f"eval/{self.name}/{kind}" for kind in kinds]


def plans(
    specs: Sequence[str], config: Config, folder: str | None, samples: int, limit: int | None
) -> list[BenchmarkPlan]:
    """Reads specs of benchmarks; without a spec, plans the environment of the settings.

    Args:
        specs: specs as at the top of this file.
        config: the settings that a spec does not change.
        folder: folder with the files of benchmarks; None takes them from the hub.
        samples: answers to each task, unless a spec says.
        limit: most tasks of each benchmark; None plays all.

    Raises:
        BadInput: no such benchmark or file, or several greedy answers to one task.
    """
    default = BenchmarkPlan(config.env.name, samples, config, limit or config.eval.episodes)
    planned = [_plan(spec, config, folder, samples, limit) for spec in specs] or [default]
    names = [plan.name for plan in planned]
    if len(set(names)) < len(names):
        raise BadInput(f"benchmarks: expected each once, got {' '.join(names)}")
    for plan in planned:
        if plan.samples < 1:
            raise BadInput(f"--samples: expected at least 1, got {plan.samples}")
        if plan.samples > 1 and plan.config.eval.temperature == 0:
            why = "several greedy answers are all the same; add --eval.temperature 1"
            raise BadInput(f"{plan.name}: {why}")
    return planned


def _plan(
    spec: str, config: Config, folder: str | None, samples: int, limit: int | None
) -> BenchmarkPlan:
    name, own_samples, temperature = _SPEC.fullmatch(spec).groups()  # type: ignore[union-attr]
    env, tasks = config.env, limit or 1 << 30
    if name in BENCHMARKS:
        known = BENCHMARKS[name]
        source = _file(name, known, folder) if folder else known.hub
        more = {"eval_data": (source,), "filters": ()} | _SETTINGS[known.env]
        env = dataclasses.replace(_settings(known.env, config), **more)
    elif name.lower().endswith(SUFFIXES):
        if env.name not in ("math", "code"):
            raise BadInput(f"benchmark {name}: expected --env.name math or code for a file")
        env = dataclasses.replace(env, **{"eval_data": (name,)})
        name = Path(name).stem
    elif name in BUILT_IN:
        env, tasks = _settings(name, config), limit or config.eval.episodes
    else:
        raise BadInput(
            f"benchmarks: expected {', '.join(BENCHMARKS)}, an environment or a file "
            f"{', '.join(SUFFIXES)}, got {name!r}"
        )
    warm = {"temperature": float(temperature)} if temperature else {}
    changed = dataclasses.replace(config, env=env, eval=dataclasses.replace(config.eval, **warm))
    return BenchmarkPlan(name, int(own_samples or samples), changed, tasks)


def _settings(name: str, config: Config) -> Any:
    """Returns the run's settings of a built-in environment, or the defaults if it plays another."""
    return config.env if config.env.name == name else settings_type(name)()


def _file(name: str, known: Benchmark, folder: str) -> str:
    """Finds the file of a benchmark in a folder."""
    places = [known.file] if known.file else []
    places += [f"{name}{suffix}" for suffix in (".jsonl", ".json", ".parquet")]
    for place in places:
        if (path := Path(folder) / place).is_file():
            return str(path)
    raise BadInput(f"benchmark {name}: expected one of {', '.join(places)} in {folder}")
