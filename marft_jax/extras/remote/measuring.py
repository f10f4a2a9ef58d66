"""What a server is found to be when a run begins: its base, its log-probs, and their precision.

All of it is measured by sampling: what a server says of itself, or scores, proves nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from marft_jax.errors import BadInput
from marft_jax.extras.remote import proof
from marft_jax.extras.remote.dialects import STACKED, Ask
from marft_jax.extras.remote.folders import Folders
from marft_jax.extras.remote.server import NoAnswer, Server
from marft_jax.sampling import Completion
from marft_jax.sampling.settings import Matrices, SampledBase
from marft_jax.types import Sampling

_ACTIONS, _TOKENS, _BEGIN = 16, 32, 32
_FITS = 0.1  # difference of log-probs from which they are of something else
_MATTERS = 0.3  # difference that the adapter of the measurement makes
_ROUNDING = 5e-4  # precision with an adapter, at least; a matrix that is left out does more
_HOT = 2.0  # temperature
_PLAIN = Sampling(_TOKENS)


class _Text(NamedTuple):
    """Prompts, and what a server sampled for them."""

    prompts: Sequence[np.ndarray]
    sampled: Sequence[Completion]

    def both(
        self, base: SampledBase, adapters: Matrices | None = None, heat: float = 1.0
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Log-probs of the server, and ours: with the first of the adapters, or without any."""
        pairs = [*zip(self.prompts, self.sampled, strict=True)]
        actions = [(prompt, x.ids, 0 if adapters else -1, heat) for prompt, x in pairs]
        ours = base.tools.score([adapters or base.tools.draw()], actions)
        return [x.logprobs for x in self.sampled], ours


async def measure(
    server: Server, bases: Mapping[str, SampledBase], folders: Folders
) -> tuple[bool, bool]:
    """Measures a server, and sets its ``base`` and ``precision``.

    Returns:
        Log-probs are at the sampling temperature, else at 1; they are of the policy, else of what
        filters leave.

    Raises:
        BadInput: it serves no base of the team, its log-probs are of something unknown, or an
            adapter that it loaded does not do what it should.
    """
    rng, widest = np.random.default_rng(0), max(bases.values(), key=lambda base: base.vocabulary)
    begun = [rng.integers(3, 256, _BEGIN).astype(np.int32) for _ in range(_ACTIONS)]  # bytes
    plain = await _sample(server, widest, begun)
    last = max(int(completion.ids.max()) for completion in plain.sampled)
    fit = {name: base for name, base in bases.items() if last < base.vocabulary}
    gaps = {"": np.inf} | {name: proof.gap(*plain.both(base)) for name, base in fit.items()}
    server.base = min(gaps, key=lambda name: gaps[name])
    if not gaps[server.base] < _FITS:
        sources = " or ".join(base.source for base in bases.values())
        got = f"log-probs that are {gaps[server.base]:.2g} from ours: it has another base, or"
        why = f"{got} rounds too much (with experts, rounding changes routes: use --dtype float32)"
        raise _refused(server, f"expected a server of {sources}, got {why}")
    base = bases[server.base]
    prompts = [np.concatenate([x, c.ids]) for x, c in zip(begun, plain.sampled, strict=True)]
    plain = await _sample(server, base, prompts)
    server.precision = proof.precision(*plain.both(base))
    server.precision = max(await _adapter(server, base, plain, folders), server.precision)
    hot = await _sample(server, base, prompts, Sampling(_TOKENS, _HOT))
    at_hot, at_1 = (proof.gap(*hot.both(base, heat=heat)) for heat in (_HOT, 1.0))
    if not min(at_hot, at_1) < _FITS:
        wanted = "expected log-probs at the sampling temperature or at 1, got others"
        raise _refused(server, f"{wanted}; start it with --logprobs-mode processed_logprobs")
    few = await _sample(server, base, prompts, Sampling(_TOKENS, top_k=2))
    return at_hot < at_1, proof.gap(*few.both(base)) < _FITS


async def _adapter(server: Server, base: SampledBase, plain: _Text, folders: Folders) -> float:
    """Has the server sample with a random adapter of trained size: one that changes what the base
    sampled. Returns the precision with it."""
    for deviation in 0.01 * 2.0 ** np.arange(11):
        if proof.gap(*plain.both(base, trained := _trained(base, deviation))) >= _MATTERS:
            break
    adapter = {name: {part: x[0] for part, x in pair.items()} for name, pair in trained.items()}
    with_experts = any(pair["a"].ndim > 3 for pair in adapter.values())
    spellings = server.dialect.spellings if with_experts else (STACKED,)
    name, folder = folders.write("measured", base, adapter, spellings)
    try:
        whys = dict[str, None]()
        for server.spelling in spellings:
            if not (why := await server.load(name, folder)):
                break
            whys[why] = None
        else:
            raise _refused(server, f"it does not load an adapter: {'; '.join(whys)}")
        text = await _sample(server, base, plain.prompts, adapter=name)
    finally:
        await server.unload(name)
        folders.delete(name)
    adapted, none = text.both(base, trained), proof.gap(*text.both(base))
    if not proof.misfit(*adapted, max(server.precision, _ROUNDING)) <= 1:
        gap, what = proof.gap(*adapted), "nothing" if none < _FITS else "not all it should"
        off = f"its log-probs are {gap:.2g} from those of the adapter, {none:.2g} from the base's"
        why = f"an adapter that it loaded does {what}: {off}"
        raise _refused(server, f"{why}; look which matrices it adapts (--lora.targets)")
    return proof.precision(*adapted)


def _trained(base: SampledBase, deviation: float) -> Matrices:
    """Adapters whose B has entries of this deviation."""
    drawn, rng = base.tools.draw(), np.random.default_rng(0)
    b = {n: rng.normal(scale=deviation, size=pair["b"].shape) for n, pair in drawn.items()}
    return {n: {"a": pair["a"], "b": b[n].astype(np.float32)} for n, pair in drawn.items()}


async def _sample(
    server: Server,
    base: SampledBase,
    prompts: Sequence[np.ndarray],
    sampling: Sampling = _PLAIN,
    adapter: str = "",
) -> _Text:
    """Samples an action for each prompt, which no token ends."""
    model = adapter or server.model, bool(adapter)
    asks = (Ask(*model, x.tolist(), sampling, n, ()) for n, x in enumerate(prompts))
    try:
        return _Text(prompts, await asyncio.gather(*(server.ask(ask, base) for ask in asks)))
    except NoAnswer as error:
        raise _refused(server, f"expected ids with log-probs, got none: {error}") from error


def _refused(server: Server, why: str) -> BadInput:
    return BadInput(f"--rollout.urls {server.url}: {why}")
