"""The protocol between who plays episodes and who samples actions.

The player submits requests and calls ``step`` until all are answered:

    sampler.load(adapters, version_of(adapters))
    tickets = [sampler.submit(request) for request in requests]
    while sampler.busy:
        for ticket, completion in sampler.step():
            ...
    sampler.verify_adapters()
    sampler.release()
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from marft_jax.errors import BadInput
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
            of parts that follow one another: a text, a schema, ``[]`` for any text without ``</``,
            or a list of parts that may be missing. "" for any text.
        stop_ids: tokens that end it, besides the end-of-turn tokens.
        ends: false where end-of-turn tokens do not end it.
    """

    prompt: np.ndarray
    owner: int
    sampling: Sampling
    key: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...] = ()
    base: str = MAIN
    form: str = ""
    stop_ids: tuple[int, ...] = ()
    ends: bool = True


class Completion(NamedTuple):
    """A sampled action.

    Attributes:
        ids: sampled token ids, ``int32 [tokens]``, up to and with the end-of-turn token, or the
            token in which a stop text ended, or a stop id.
        logprobs: log-prob of each token at the sampling temperature, among the tokens that choices
            or a form allow, before filters, ``float32 [tokens]``.
        reason: why it ended. end: an end-of-turn token. stop: a stop text or id. length: its limit.
            cancelled: the sampler gave it up, and its episode fails.
        filtered_mass: probability that choices, top-k, top-p and min-p left to draw from, the mean
            over the tokens; None from a sampler that does not report it.
        version: the version of the adapters that sampled it, as given to ``Sampler.load``.
        why: of a cancelled one: why the sampler gave it up.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    reason: Literal["end", "stop", "length", "cancelled"]
    filtered_mass: float | None = None
    version: str = ""
    why: str = ""


class Capabilities(NamedTuple):
    """What a sampler can do.

    Attributes:
        contexts: longest prompt and action together, in tokens, of each base that has a limit.
        at_once: number of requests that it samples together; more of them wait.
        programs: the most programs that it may compile for them; 0 where it compiles none.
        repeats: equal requests to equal adapters get equal completions, whatever runs beside them.
        masks_choices: it draws only among ``Request.choices``, and what ``Request.form`` accepts.
        policy_logprobs: log-probs are of the policy. False: they are of what filters left to draw
            from, and requests with these are refused.
        any_temperature: log-probs are at the sampling temperature. False: they are at 1, and
            requests with another one are refused.
        loads_while_busy: ``load`` may come while requests are unanswered; these keep their version.
        streams: ``Sampler.partial`` holds the tokens of unfinished requests.
    """

    contexts: Mapping[str, int]
    at_once: int
    programs: int = 0
    repeats: bool = True
    masks_choices: bool = True
    policy_logprobs: bool = True
    any_temperature: bool = True
    loads_while_busy: bool = False
    streams: bool = True

    def check(self, request: Request) -> None:
        """Raises ``BadInput`` for a request that the sampler cannot serve."""
        if refusal := self.refusal(request):
            raise BadInput(f"--rollout.sampler: {refusal}; use engine")

    def refusal(self, request: Request) -> str:
        """Says what a request wants that the sampler cannot do; "" where it can answer it."""
        s = request.sampling
        if (request.choices or request.form) and not self.masks_choices:
            what = "a form for the text" if request.form else "only some actions"
            return f"the request allows {what}, and this sampler cannot restrict what it draws"
        if not self.policy_logprobs and (s.top_k or s.top_p < 1 or s.min_p > 0):
            return (
                "the request has a filter (top_k, top_p, min_p), and this sampler's log-probs are "
                "of what filters leave"
            )
        if not self.any_temperature and s.temperature not in (0, 1):
            return (
                f"the request has temperature {s.temperature:g}, and this sampler's log-probs are "
                "at temperature 1"
            )
        return ""


class Sampler(Protocol):
    """Answers requests. ``Engine`` is ours, for one base; ``SamplerOfBases`` puts several samplers
    together; scripts of tests are others. A class that extends this one needs no ``partial``,
    ``start``, ``verify_adapters`` and ``stats``."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def busy(self) -> bool:
        """True while a request is unanswered."""
        ...

    @property
    def partial(self) -> Mapping[int, np.ndarray]:
        """Ids so far of each unfinished request after the last ``step``, by ticket."""
        return {}

    def load(self, adapters: AdaptersOfBases, version: str) -> None:
        """Samples later requests with these adapters. No request may be unanswered, unless the
        sampler ``loads_while_busy``.

        Args:
            adapters: those of each base of the team.
            version: digest of their content, see ``version_of``.
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

    def step(self) -> Sequence[tuple[int, Completion]]:
        """Samples for a while; returns what is finished, with the tickets. It returns at once where
        no request is unanswered."""
        ...

    def verify_adapters(self) -> None:
        """Shows that the adapters that it was given sampled what it returned since the last call.
        It is called after each play, before anybody learns; a sampler on our own devices has
        nothing to show.

        Raises:
            RunFailed: it cannot show that.
        """

    def release(self) -> None:
        """Drops unanswered requests, and frees memory until the next ``load``."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Returns statistics since the last ``load``, by the names of their metrics."""
        return {}


def version_of(adapters: AdaptersOfBases) -> str:
    """Digest of the content of adapters: their names, shapes and bytes. Equal adapters have equal
    versions, so that a version never comes again with others.

    It waits for the arrays and copies them to the host.
    """
    digest = hashlib.sha256()
    for base, matrices in sorted(adapters.items()):
        for name, parts in sorted(matrices.items()):
            for part, array in sorted(parts.items()):
                x = np.asarray(array)
                digest.update(f"{base}\n{name}\n{part}\n{x.dtype} {x.shape}\n".encode())
                digest.update(np.ascontiguousarray(x).data)
    return digest.hexdigest()[:16]
