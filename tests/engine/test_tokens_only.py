"""Ids without a token: rows of the vocabulary beyond the tokenizer's, and holes within it."""

from __future__ import annotations

import dataclasses

import bounds
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from test_engine import asks

from marft_jax.models.vocabulary import Vocabulary
from marft_jax.policy.logprobs import _score, _score_once

GAPS = {
    "rows beyond the tokenizer": ((200, 264),),
    "one row": ((263, 264),),
    "holes": ((3, 4), (100, 180)),
    "both": ((0, 2), (64, 128), (250, 264)),
    "all but the bytes of digits": ((0, 48), (58, 264)),
}
SAMPLING = [
    dict(temperature=1.0),
    dict(temperature=2.0),
    dict(temperature=0.0),
    dict(temperature=3.0, top_k=40),
    dict(temperature=2.0, top_p=0.9, min_p=0.001),
]


def without(gaps) -> np.ndarray:
    return np.concatenate([np.arange(*gap) for gap in gaps])


@pytest.mark.parametrize("which", GAPS)
@pytest.mark.slow
def test_ids_without_a_token_are_never_drawn_and_tokens_share_their_probability(which):
    gaps = GAPS[which]
    engine = small.engine(config=small.config_of(gaps=gaps))
    for seed, sampling in enumerate(SAMPLING):
        requests = asks(8, seed=seed, **sampling)
        done = small.answers(engine, requests)
        for completion, scored in zip(done, small.of_full_forward(requests, done), strict=True):
            assert not {*completion.ids.tolist()} & {*without(gaps).tolist()}
            scored = np.array(scored)
            scored[:, without(gaps)] = -np.inf  # of the rows of all ids, at the same temperature
            expected = scored - np.log(np.exp(scored).sum(-1, keepdims=True))
            picked = expected[np.arange(len(completion.ids)), completion.ids]
            np.testing.assert_allclose(completion.logprobs, picked, atol=bounds.logprobs())
            if sampling["temperature"] == 0:
                np.testing.assert_array_equal(completion.ids, expected.argmax(-1))


@pytest.mark.parametrize("which", GAPS)
@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("heat", [0.05, 1.0, 2.5])
@pytest.mark.slow
def test_the_learner_scores_as_if_only_tokens_had_rows(which, cap, heat):
    gaps, rng = GAPS[which], np.random.default_rng(0)
    matrix = jnp.asarray(rng.normal(size=(264, 8)), jnp.float32)
    hidden = jnp.asarray(rng.normal(size=(2, 3, 8)), jnp.float32)
    kept = np.setdiff1d(np.arange(264), without(gaps))
    at = rng.integers(0, len(kept), (2, 3))
    temperature = jnp.full((2, 3), heat)
    whole = Vocabulary(matrix, 1.5, cap, gaps)
    cut = Vocabulary(matrix[kept], 1.5, cap)
    for score in (_score, _score_once):

        def scores(hidden, vocabulary, targets, score=score):
            return score(hidden, vocabulary, jnp.asarray(targets), temperature)

        own, expected = scores(hidden, whole, kept[at]), scores(hidden, cut, at)
        size = bounds.LOGITS / heat
        bounds.close(own[:2], expected[:2], bounds.sums(8, 264), size)
        slope, right = (
            jax.grad(lambda h, v=v, t=t: scores(h, v, t)[0].sum())(hidden)
            for v, t in ((whole, kept[at]), (cut, at))
        )
        bounds.close(slope, right, size * bounds.sums(8, 264))


def test_a_base_without_gaps_computes_what_it_did():
    config = small.config_of()
    assert not config.gaps and dataclasses.replace(config, gaps=()) == config
    vocabulary = Vocabulary(jnp.ones((4, 2)))
    text = jax.jit(vocabulary.finish).lower(jnp.ones((1, 4))).as_text()
    assert "select" not in text
