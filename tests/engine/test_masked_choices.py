"""Sampling among given actions: what comes is one of them, its log-probs those among them."""

from __future__ import annotations

import bounds
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from marft_jax.engine.kv_cache import SlotSampling
from marft_jax.engine.sample import sample
from marft_jax.sampling.constraints import one_of
from marft_jax.sampling.protocol import Request
from marft_jax.types import Sampling

END = 257
CHOICES = ((80, 97, 115, END), (80, 97, END), (66, END))


@pytest.mark.slow
def test_only_choices_are_drawn_and_log_probs_are_those_among_them():
    """Invariants 1 and 2: of the full forward pass under the mask, and rows beside are as alone."""
    engine = small.engine(eos_ids=(END,))
    rng = np.random.default_rng(0)
    free = [
        Request(rng.integers(0, 256, n).astype(np.int32), n % 3, Sampling(6), (0, n, 0))
        for n in (3, 9)
    ]
    bound = [
        r._replace(choices=CHOICES, key=(1, i, k), sampling=Sampling(6, temperature))
        for k, temperature in enumerate((1.0, 1.5, 0.0))
        for i, r in enumerate(free)
    ]
    alone = small.answers(engine, free)
    found = small.answers(engine, [bound[0], free[0], *bound[1:], free[1]])
    for own, beside in zip(alone, (found[1], found[-1]), strict=True):
        np.testing.assert_array_equal(own.ids, beside.ids)
        np.testing.assert_allclose(own.logprobs, beside.logprobs, atol=bounds.logprobs())
    masked = [found[0], *found[2:-1]]
    assert {tuple(c.ids.tolist()) for c in masked} <= set(CHOICES)
    assert all(c.reason == "end" and c.filtered_mass < 0.5 for c in masked)
    for completion, scored in zip(masked, small.of_full_forward(bound, masked), strict=True):
        expected = small.masked(scored, completion.ids, one_of(CHOICES, small.CONFIG.vocab_size))
        np.testing.assert_allclose(completion.logprobs, expected, atol=bounds.logprobs())
        assert completion.ids[0] != 66 or completion.logprobs[1] == 0  # only the end may follow


@pytest.mark.slow
def test_draws_follow_the_policy_among_what_is_allowed():
    """Also where that is as good as impossible; filters act among it."""
    n = 4000
    logits = jnp.log(jnp.asarray([0.9, 0.06, 0.03, 0.01]))
    keys_B2 = jax.vmap(lambda i: jax.random.key_data(jax.random.key(i)))(jnp.arange(n))
    allowed = jnp.asarray([False, True, True, False])

    def draws(logits, **own):
        given = dict(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, limit=9) | own
        kinds = (jnp.float32, jnp.float32, jnp.int32, jnp.float32, jnp.int32)
        settings = SlotSampling(
            *(jnp.full(n, given[f], k) for f, k in zip(given, kinds, strict=True))
        )
        rows = jnp.broadcast_to(logits, (n, 4))
        counts_B = jnp.zeros(n, jnp.int32)
        return sample(rows, keys_B2, counts_B, settings, jnp.broadcast_to(allowed, (n, 4)))

    ids, logprobs, kept = draws(logits)
    drawn = np.bincount(ids, minlength=4) / n
    np.testing.assert_allclose(drawn, [0, 2 / 3, 1 / 3, 0], atol=0.03)  # four deviations
    bounds.close(kept, 0.09)
    bounds.close(np.exp(logprobs), np.asarray([0, 2 / 3, 1 / 3])[ids])
    ids, _, _ = draws(logits - 300 * allowed)
    assert set(np.asarray(ids).tolist()) == {1, 2}
    ids, _, kept = draws(logits, top_k=1)
    assert set(np.asarray(ids).tolist()) == {1}
    bounds.close(kept, 0.06)
