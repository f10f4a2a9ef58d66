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

    It can do what all of its samplers can do. Each ``step`` is a step of every sampler. It starts
    all of them before it waits for one, so that bases on devices of their own work at the same
    time. Ticket t of the n-th of N samplers is t · N + n here.

    Args:
        samplers: the sampler of each base.
    """

    def __init__(self, samplers: Mapping[str, Sampler]) -> None:
        self.samplers = dict(samplers)
        self._each = list(self.samplers.values())
        self._place = {base: n for n, base in enumerate(self.samplers)}

    @property
    def capabilities(self) -> Capabilities:
        each = [sampler.capabilities for sampler in self._each]
        return Capabilities(
            contexts={base: n for able in each for base, n in able.contexts.items()},
            at_once=sum(able.at_once for able in each),
            programs=sum(able.programs for able in each),
            repeats=all(able.repeats for able in each),
            masks_choices=all(able.masks_choices for able in each),
            policy_logprobs=all(able.policy_logprobs for able in each),
            any_temperature=all(able.any_temperature for able in each),
            loads_while_busy=all(able.loads_while_busy for able in each),
            streams=all(able.streams for able in each),
        )

    @property
    def busy(self) -> bool:
        return any(sampler.busy for sampler in self._each)

    @property
    def partial(self) -> Mapping[int, np.ndarray]:
        return {
            self._ticket(t, n): ids
            for n, sampler in enumerate(self._each)
            for t, ids in sampler.partial.items()
        }

    def load(self, adapters: AdaptersOfBases, version: str) -> None:
        for sampler in self._each:
            sampler.load(adapters, version)

    def submit(self, request: Request) -> int:
        n = self._place[request.base]
        return self._ticket(self._each[n].submit(request), n)

    def cancel(self, ticket: int) -> None:
        t, n = divmod(ticket, len(self._each))
        self._each[n].cancel(t)

    def start(self) -> None:
        for sampler in self._each:
            sampler.start()

    def step(self) -> list[tuple[int, Completion]]:
        self.start()
        return [
            (self._ticket(t, n), completion)
            for n, sampler in enumerate(self._each)
            for t, completion in sampler.step()
        ]

    def verify_adapters(self) -> None:
        for sampler in self._each:
            sampler.verify_adapters()

    def release(self) -> None:
        for sampler in self._each:
            sampler.release()

    def stats(self) -> Mapping[str, float]:
        """Returns the sums over the bases."""
        sums = Counter[str]()
        for sampler in self._each:
            sums.update(sampler.stats())
        return sums

    def _ticket(self, t: int, n: int) -> int:
        """Ticket of a request here, which has the ticket ``t`` at the n-th sampler."""
        return t * len(self._each) + n
