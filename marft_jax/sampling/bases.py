"""One sampler for a team whose members run on several bases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from marft_jax.sampling.protocol import (
    AdaptersOfBases,
    Capabilities,
    Completion,
    Request,
    Sampler,
)


class SamplerOfBases:
    """Hands each request to the sampler of its base.

    It can do what all of its samplers can do. Each ``step`` is a step of every sampler, so that no
    base waits for the end of another's work.

    Args:
        samplers: the sampler of each base.
    """

    def __init__(self, samplers: Mapping[str, Sampler]) -> None:
        self.samplers = dict(samplers)
        self._tickets = dict[tuple[str, int], int]()  # by base and its sampler's own ticket
        self._asked = 0

    @property
    def capabilities(self) -> Capabilities:
        each = [sampler.capabilities for sampler in self.samplers.values()]
        return Capabilities(
            contexts={base: n for able in each for base, n in able.contexts.items()},
            at_once=sum(able.at_once for able in each),
            programs=sum(able.programs for able in each),
            repeats=all(able.repeats for able in each),
            masks_choices=all(able.masks_choices for able in each),
            reports_filtered_mass=all(able.reports_filtered_mass for able in each),
            streams=all(able.streams for able in each),
        )

    @property
    def busy(self) -> bool:
        return any(sampler.busy for sampler in self.samplers.values())

    @property
    def partial(self) -> Mapping[int, np.ndarray]:
        return {
            self._tickets[base, own]: ids
            for base, sampler in self.samplers.items()
            for own, ids in sampler.partial.items()
        }

    def load(self, adapters: AdaptersOfBases, version: int) -> None:
        for sampler in self.samplers.values():
            sampler.load(adapters, version)

    def submit(self, request: Request) -> int:
        own = self.samplers[request.base].submit(request)
        self._tickets[request.base, own] = self._asked = self._asked + 1
        return self._asked

    def cancel(self, ticket: int) -> None:
        for (base, own), given in list(self._tickets.items()):
            if given == ticket:
                self.samplers[base].cancel(own)
                del self._tickets[base, own]

    def step(self) -> list[tuple[int, Completion]]:
        return [
            (self._tickets.pop((base, own)), completion)
            for base, sampler in self.samplers.items()
            for own, completion in sampler.step()
        ]

    def release(self) -> None:
        for sampler in self.samplers.values():
            sampler.release()
        self._tickets.clear()

    def stats(self) -> Mapping[str, float]:
        """Returns the sums over the bases."""
        found = Counter[str]()
        for sampler in self.samplers.values():
            found.update(sampler.stats())
        return found
