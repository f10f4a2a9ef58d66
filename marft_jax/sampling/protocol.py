"""The protocol between who plays episodes and who samples actions.

The player submits requests and calls ``step`` until all are answered:

    sampler.load(adapters, version)
    tickets = [sampler.submit(request) for request in requests]
    while sampler.busy:
        for ticket, completion in sampler.step():
            ...
    sampler.release()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np

from marft_jax.types import MAIN, Sampling

if TYPE_CHECKING:
    import jax

AdaptersOfBases: TypeAlias = "Mapping[str, dict[str, dict[str, jax.Array]]]"
"""LoRA matrices of each base, by its name; see ``models.lora.Adapters``."""


class Request(NamedTuple):
    """An action to sample.

    Attributes:
        prompt: token ids, ``int32 [tokens]``, at least one.
        owner: index of the adapter that samples it, among those of its base; -1 for the base
            without an adapter.
        sampling: temperature, filters, and the longest action.
        key: numbers of the random stream, see ``random_keys.ActionKey``.
        choices: the only actions that may be drawn, each as its ids with the end-of-turn token;
            empty for any action.
        base: name of the base that samples it.
        form: form that the text follows, as JSON: a schema; or a list of alternatives, each a list
            of texts and schemas that follow one another. "" for any text.
    """

    prompt: np.ndarray
    owner: int
    sampling: Sampling
    key: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...] = ()
    base: str = MAIN
    form: str = ""


class Completion(NamedTuple):
    """A sampled action.

    Attributes:
        ids: sampled token ids, ``int32 [tokens]``.
        logprobs: behaviour log-prob of each token, ``float32 [tokens]``.
        finished: the action ended with an end-of-turn token or a stop text; False where its token
            limit cut it off.
        filtered_mass: probability that choices, top-k, top-p and min-p left to draw from, the mean
            over the tokens; 1 from a sampler that does not report it.
        version: the version of the adapters that sampled it, as given to ``Sampler.load``.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    finished: bool
    filtered_mass: float = 1.0
    version: int = 0


class Capabilities(NamedTuple):
    """What a sampler can do.

    Attributes:
        contexts: longest prompt and action together, in tokens, of each base that has a limit.
        at_once: number of requests that it samples together; more of them wait.
        programs: the most programs that it may compile for them; 0 where it compiles none.
        repeats: equal requests to equal adapters get equal completions, whatever runs beside them.
        masks_choices: it draws only among ``Request.choices``, and what ``Request.form`` accepts.
        reports_filtered_mass: it reports ``Completion.filtered_mass``.
        streams: ``Sampler.partial`` holds the tokens of unfinished requests.
    """

    contexts: Mapping[str, int]
    at_once: int
    programs: int = 0
    repeats: bool = True
    masks_choices: bool = True
    reports_filtered_mass: bool = True
    streams: bool = True


class Sampler(Protocol):
    """Answers requests. ``Engine`` is ours, for one base; ``SamplerOfBases`` puts several samplers
    together; recordings and scripts of tests are others."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def busy(self) -> bool:
        """True while a request is unanswered."""
        ...

    @property
    def partial(self) -> Mapping[int, np.ndarray]:
        """Ids so far of each unfinished request after the last ``step``, by ticket."""
        ...

    def load(self, adapters: AdaptersOfBases, version: int) -> None:
        """Samples with these adapters from now on; no request may be unanswered.

        Args:
            adapters: those of each base of the team.
            version: number of updates that made them. After a rollback a number comes again with
                other adapters.
        """
        ...

    def submit(self, request: Request) -> int:
        """Queues a request; returns the ticket that comes back with its completion."""
        ...

    def cancel(self, ticket: int) -> None:
        """Drops a request; its ticket does not come back."""
        ...

    def start(self) -> None:
        """Starts the work of the next ``step`` and does not wait for it, where a sampler can."""
        ...

    def step(self) -> Sequence[tuple[int, Completion]]:
        """Samples for a while; returns what is finished, with the tickets. It returns at once where
        no request is unanswered."""
        ...

    def release(self) -> None:
        """Drops unanswered requests, and frees memory until the next ``load``."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Returns statistics since the last ``load``, by the names of their metrics."""
        ...
