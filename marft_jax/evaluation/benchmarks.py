"""Benchmarks by name: which environment plays them, and where their tasks are.

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

from marft_jax.config import Config
from marft_jax.envs.base import BUILT_IN, settings_type
from marft_jax.envs.datasets.rows import SUFFIXES
from marft_jax.errors import BadInput
from marft_jax.evaluation.scores import passes


class Benchmark(NamedTuple):
    """Attributes:
    env: the environment that plays it.
    hub: its id on the hub.
    file: where it may lie in a folder of data, besides ``<name>.jsonl`` and the like.
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
_SETTINGS = {"math": {}, "code": {"reward": "all", "tests": 0}}
"""Further settings of the section ``env``."""
_SPEC = re.compile(r"(.+?)(?::(\d+))?(?:@(\d+(?:\.\d+)?))?", re.DOTALL)


class BenchmarkPlan(NamedTuple):
    """A benchmark to play.

    Attributes:
        name: under which its figures are reported.
        samples: answers to each task.
        config: the settings, with this benchmark's environment and temperature.
        tasks: how many tasks at most.
    """

    name: str
    samples: int
    config: Config
    tasks: int

    def count(self, size: int | None) -> int:
        """Tasks that are played of a source that has so many."""
        return self.tasks if size is None else min(self.tasks, size)

    @property
    def metric_names(self) -> list[str]:
        """Metrics that its score reports, see ``Score.metrics``."""
        kinds = ["accuracy", *(f"pass@{k}" for k in passes(self.samples) if k > 1)]
        return [f"eval/{self.name}/{kind}" for kind in kinds]


def plans(
    specs: Sequence[str], config: Config, folder: str | None, samples: int, limit: int | None
) -> list[BenchmarkPlan]:
    """Reads what to play; without any spec, the environment of the settings.

    Args:
        specs: as at the top of this file.
        config: what a spec leaves open.
        folder: where the files of benchmarks are; without it they come from the hub.
        samples: answers to each task, where a spec does not say.
        limit: play the first so many tasks of each.

    Raises:
        BadInput: no such benchmark or file, or several greedy answers to one task.
    """
    own = BenchmarkPlan(config.env.name, samples, config, limit or config.eval.episodes)
    found = [_plan(spec, config, folder, samples, limit) for spec in specs] or [own]
    names = [plan.name for plan in found]
    if len(set(names)) < len(names):
        raise BadInput(f"--benchmark: expected each once, got {' '.join(names)}")
    for plan in found:
        if plan.samples < 1:
            raise BadInput(f"--samples: expected at least 1, got {plan.samples}")
        if plan.samples > 1 and plan.config.eval.temperature == 0:
            why = "several greedy answers are all the same; add --eval.temperature 1"
            raise BadInput(f"{plan.name}: {why}")
    return found


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
    elif name.endswith(SUFFIXES):
        if env.name not in ("math", "code"):
            raise BadInput(f"--benchmark {name}: expected --env.name math or code for a file")
        env = dataclasses.replace(env, **{"eval_data": (name,)})
        name = Path(name).stem
    elif name in BUILT_IN:
        env, tasks = _settings(name, config), limit or config.eval.episodes
    else:
        raise BadInput(
            f"--benchmark: expected {', '.join(BENCHMARKS)}, an environment or a file "
            f"{', '.join(SUFFIXES)}, got {name!r}"
        )
    warm = {"temperature": float(temperature)} if temperature else {}
    changed = dataclasses.replace(config, env=env, eval=dataclasses.replace(config.eval, **warm))
    return BenchmarkPlan(name, int(own_samples or samples), changed, tasks)


def _settings(name: str, config: Config) -> Any:
    """Settings of a built-in environment: the run's where it plays there, or else defaults."""
    return config.env if config.env.name == name else settings_type(name)()


def _file(name: str, known: Benchmark, folder: str) -> str:
    """Finds the file of a benchmark in the folder."""
    places = [known.file] if known.file else []
    places += [f"{name}{suffix}" for suffix in (".jsonl", ".json", ".parquet")]
    for place in places:
        if (path := Path(folder).expanduser() / place).is_file():
            return str(path)
    raise BadInput(f"--benchmark {name}: expected one of {', '.join(places)} in --data {folder}")
