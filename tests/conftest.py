"""Every test sees 8 virtual CPU devices, strict broadcasting and no network."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = REPOSITORY.parent / "shared"
EXTRAS = REPOSITORY / "tests" / "extras"

# In the environment, so that the processes that tests start have it too. Compiled programs are
# kept in the checkout: those of another machine may hold instructions that this one lacks.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ["HF_HUB_OFFLINE"] = "1"
# Programs are compiled with few optimisations, without which the suite takes twice as long.
PLAIN = os.environ.get("MARFT_OPTIMISED") != "1"
if PLAIN:
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # programs are lowered faster without

import jax  # noqa: E402
import pytest  # noqa: E402

from marft_jax.engine import engine  # noqa: E402
from marft_jax.learning import learner  # noqa: E402
from marft_jax.learning.settings import LearnerSettings  # noqa: E402
from marft_jax.parallel import compilation  # noqa: E402
from marft_jax.policy import programs  # noqa: E402
from marft_jax.team.prompts import Team  # noqa: E402

if PLAIN and jax.__version_info__ < (0, 11):  # later ones end at a flag that they no longer have
    flags = ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    others = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag not in flags]
    os.environ["XLA_FLAGS"] = " ".join(flags + others)  # of two settings of a flag the last holds
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

UNREAD = set(
    "lr lr_schedule lr_warmup weight_decay max_grad_norm agent_interval max_kl correction episodes "
    "group_size epochs minibatches microbatch_tokens normalize gamma gae_lambda".split()
)
"""Settings of an algorithm that only the host reads."""


def share_programs() -> None:
    """Runs with equal settings in one process are traced once; tracing is most of a small run.

    A run by itself traces its programs anew, since functions of a user may have changed meanwhile.
    A test that changes what is traced asks for ``own_programs``.
    """

    def traced(x: Any) -> Any:
        """The argument without what no program reads; a program that does read it fails."""
        if not isinstance(x, LearnerSettings):
            return x
        unread = UNREAD & {own.name for own in dataclasses.fields(x.algo)}
        algo = dataclasses.replace(x.algo, **dict.fromkeys(unread))
        return x._replace(algo=algo, lora=dataclasses.replace(x.lora, init=None), lr={}, steps=0)

    def members(team: Team) -> Any:
        facts = team.bases, team.owners, team.numbers, team.learning_bases
        return facts, len(team.profiles)

    def shared(make: Callable[..., Any]) -> Callable[..., Any]:
        made: list[tuple[Any, Any]] = []

        @functools.wraps(make)
        def get(*args: Any, **kwargs: Any) -> Any:
            args = tuple(map(traced, args))
            key = [members(x) if isinstance(x, Team) else x for x in args], kwargs
            for others, found in made:
                if others == key:
                    return found
            made.append((key, make(*args, **kwargs)))
            del made[:-16]
            return made[-1][1]

        return get

    engine.programs = shared(engine.programs)
    for name in ("objective_of", "critic_of", "compiled"):
        setattr(learner, name, shared(getattr(learner, name)))


if PLAIN:
    share_programs()
gc.set_threshold(100_000, 50, 50)  # tracing makes many objects; a tenth of the time was gc's


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where no test of extras is wanted, none is imported: most of the collection is theirs."""
    return True if collection_path == EXTRAS and "not extra" in config.option.markexpr else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of extras. Files with slow tests come first: a worker that gets one last
    works on alone."""
    for item in items:
        if EXTRAS in item.path.parents:
            item.add_marker("extra")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="module", autouse=True)
def room_for_programs():
    """A suite compiles more programs than one process can map."""
    yield
    if compilation.is_crowded(share=0.3):
        compilation.drop_programs()


@pytest.fixture(autouse=True)
def modules_of_a_test_end_with_it(tmp_path_factory: pytest.TempPathFactory):
    """The next test may write another module of the same name."""
    yield
    written = str(tmp_path_factory.getbasetemp())
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(written):
            del sys.modules[name]


@pytest.fixture
def float16() -> None:
    """XLA computes no float16 for CPUs before AVX, which have no instruction for it."""
    if "max_isa=SSE4_2" in os.environ.get("XLA_FLAGS", ""):
        pytest.skip("needs a CPU that converts float16")


@pytest.fixture
def own_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is traced in the test is its own."""
    names = [(learner, name) for name in ("objective_of", "critic_of", "compiled")]
    for module, name in [(engine, "programs"), *names]:
        made = getattr(module, name)
        monkeypatch.setattr(module, name, getattr(made, "__wrapped__", made))
    for name in ("forward", "top", "of_gradients", "optim_step", "of_critic"):
        made = getattr(programs, name).__wrapped__  # without its cache
        monkeypatch.setattr(programs, name, functools.lru_cache(maxsize=None)(made))


@pytest.fixture(scope="module")
def one_device():
    """The tests of a module see one device alone."""
    first = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *backend: first)
        yield


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets that lies beside a checkout, where it does."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip(f"no data sets in {folder}")
    return folder


@pytest.fixture(scope="session")
def golden() -> Path:
    """Numbers of the first PyTorch implementation: the file that MARFT_GOLDEN names."""
    file = Path(os.environ.get("MARFT_GOLDEN", SHARED / "golden" / "marft_golden.json"))
    if not file.is_file():
        pytest.skip(f"no golden numbers in {file}; set MARFT_GOLDEN")
    return file
