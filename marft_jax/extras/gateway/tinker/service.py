"""What is opened for the clients of a base."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from marft_jax.config import Config, Rollout
from marft_jax.errors import BadInput
from marft_jax.extras.gateway.tinker.adapters import LADDER, Adapters
from marft_jax.extras.gateway.tinker.models import Models
from marft_jax.extras.gateway.tinker.order import Worker
from marft_jax.extras.gateway.tinker.samples import Samples
from marft_jax.extras.gateway.tinker.sessions import Sessions
from marft_jax.extras.gateway.tinker.store import Store
from marft_jax.models.lora import ALL_LINEAR, UNEMBED
from marft_jax.parallel.mesh import local_mesh
from marft_jax.run.models import load_onto, open_devices
from marft_jax.run.samplers import Shape, engine_on
from marft_jax.sampling.batcher import Batcher
from marft_jax.team.bases import context_of
from marft_jax.types import MAIN


class Service(NamedTuple):
    """All that answers calls. Its methods, and those of its parts, may be called in any thread."""

    adapters: Adapters
    store: Store
    sessions: Sessions
    models: Models
    samples: Samples

    def promise(self, id: str, owner: str) -> asyncio.Future[bytes]:
        """The result of a promise; raises ``ApiError``, 410, where it is not kept any more."""
        model, _, number = id.rpartition("/")
        if model not in self.models.all:
            return self.samples.promise(id, owner)
        own = self.models.find(model, owner)
        kept = self.models.promise(own, int(number) if number.isdecimal() else -1)
        return asyncio.wrap_future(kept)


@contextlib.contextmanager
def open_service(
    config: Config,
    folder: Path,
    *,
    names: Sequence[str] = (),
    durable: bool = True,
    models: int = 4096,
    samplers: int = 8,
    rank: int = 32,
    weights_bytes: int = 64 << 30,
) -> Iterator[Service]:
    """Opens a base with what trains and samples it. At the end, unanswered samples are dropped;
    training calls that are not done are on the disk.

    Args:
        folder: for models and saved weights.
        names: of the base, beside its own.
        durable: every step is on the disk before it is acknowledged.
        models, samplers, rank, weights_bytes: the most models, saved weights that are sampled with
            at the same time, rank, and bytes of saved weights.

    Raises:
        BadInput: settings or a model that do not fit.
    """
    if not 1 <= rank <= LADDER[-1]:
        raise BadInput(f"--rank: expected 1 to {LADDER[-1]}, got {rank}")
    if not isinstance(config.rollout, Rollout):
        raise BadInput("--rollout.sampler: expected engine; saved weights are sampled by it")
    store = Store(folder, durable, weights_bytes)
    devices = open_devices(config.mesh)
    base = load_onto(devices, config.model)
    context = context_of(MAIN, config.model, base.config.max_position)
    engine = engine_on(
        base,
        local_mesh(devices.playing),
        Shape(config.rollout.slots, config.rollout.chunk, context, context),
        adapters=samplers,
        rank=rank,
        targets=(ALL_LINEAR, "experts", UNEMBED),
    )
    known = [*dict.fromkeys([*names, config.model.base])]
    adapters = Adapters(base, devices.learning, names=known, rank=rank, context=context)
    worker, sessions = Worker(), Sessions(store)
    with Batcher(engine) as batcher:
        all_models = Models(adapters, store, sessions, worker, models)
        samples = Samples(adapters, store, sessions, worker, batcher, samplers)
        with worker:  # now begins what was promised before
            yield Service(adapters, store, sessions, all_models, samples)
