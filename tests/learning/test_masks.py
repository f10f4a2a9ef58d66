"""An update learns under the mask that sampled: choices of a game, and the form of a text."""

from __future__ import annotations

import dataclasses
import functools
import json

import bounds
import jax
import jax.numpy as jnp
import numpy as np
import on_data
import pytest
import small
from one_step import LAYERS, ONCE, fresh, learner, on_device, same
from one_step import settings as config_of

from marft_jax.learning.learner import Learner
from marft_jax.learning.team_data import data_of
from marft_jax.models import decoder, lora
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer
from marft_jax.policy.data import Datum
from marft_jax.policy.forbidden import Forbidden, forbidden_by, joined
from marft_jax.policy.optimiser import PolicyState
from marft_jax.policy.policy import Policy
from marft_jax.policy.rows import Rows
from marft_jax.sampling.constraints import constraint_of, forms_of
from marft_jax.sampling.protocol import Request
from marft_jax.types import Sampling

SIZE, END = small.CONFIG.vocab_size, ByteTokenizer().end_id
CHOICES = tuple((*text, END) for text in (b"Pass", b"Pa", b"Bet", b"a"))
FORM = json.dumps({"type": "array", "items": {"enum": ["x", 7, 71]}, "minItems": 1, "maxItems": 2})
UNDER = {"choices": {"choices": CHOICES}, "form": {"form": FORM}}
PROMPT, HEAT = [5, 80, 7, 90], 0.8
ROUNDINGS, GAP = bounds.update(layers=LAYERS), bounds.logprobs(layers=LAYERS) / HEAT


def constraint(turn):
    return constraint_of(turn.choices, turn.form, SIZE, forms_of(ByteTokenizer(), SIZE))


def actions(under):
    """All actions that may be drawn, each with the masks of its tokens."""
    turn, found, left = small.turn(0, PROMPT, [])._replace(**under), [], [((), ())]
    while left:
        ids, masks = left.pop()
        own, allowed = constraint(turn), None
        for n in range(len(ids) + 1):  # a constraint reads an action from its beginning
            allowed = own(ids[:n])
        if allowed is None:
            found.append((ids, masks))
        else:
            left += [((*ids, int(i)), (*masks, allowed)) for i in np.flatnonzero(allowed)]
    return sorted(found, key=lambda x: x[0])


@functools.cache
def policy():
    base = small.base(LAYERS)
    state = PolicyState(small.adapters(1, layers=LAYERS), (), ())
    return Policy(base, small.one_device(), state, np.array([small.RANK]), np.array([small.ALPHA]))


def logprobs_of(adapters, own):
    """Log-probs of whole actions by the definition: a softmax over what is allowed, and Σ."""
    base, longest = small.base(LAYERS), max(len(ids) for ids, _ in own)
    tokens = np.zeros((len(own), len(PROMPT) + longest), np.int32)
    allowed, real = np.ones((len(own), longest, SIZE), bool), np.zeros((len(own), longest))
    for i, (ids, masks) in enumerate(own):
        tokens[i, : len(PROMPT) + len(ids)] = [*PROMPT, *ids]
        allowed[i, : len(ids)], real[i, : len(ids)] = masks, 1
    fused = lora.fuse(adapters, small.ALPHA / small.RANK, jnp.float32)
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    until, owners = jnp.full_like(at, tokens.shape[1] - 1), jnp.zeros_like(at)
    mask = lora.owner_mask(owners, fused)
    hidden, _ = decoder.forward(base.graphdef, base.params, tokens, at, until, fused, mask)
    logits = decoder.project(base.graphdef, base.params, hidden)[:, len(PROMPT) - 1 : -1] / HEAT
    scored = jax.nn.log_softmax(jnp.where(allowed, logits, -1e9))
    targets = tokens[:, len(PROMPT) :, None]
    return (jnp.take_along_axis(scored, targets, -1)[..., 0] * real).sum(-1)


def turns_of(own, under):
    made = [small.turn(0, PROMPT, ids, temperature=HEAT) for ids, _ in own]
    return [turn._replace(**under) for turn in made]


def data_under(turns):
    episodes = [small.episode(i, [turn], [0.0]) for i, turn in enumerate(turns)]
    return data_of(episodes, {0: 0}, "sum", constraint).data


def gradient(data, advantages):
    """Of Σ advantage · log-prob, as the verbs accumulate it."""
    data = [
        datum._replace(inputs={"advantages": np.array([a], np.float32)})
        for datum, a in zip(data, advantages, strict=True)
    ]
    sums, _ = on_data.forward_backward(policy(), data, "reinforce")
    return flat(sums.gradient)


def flat(tree):
    return -np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)])


@pytest.fixture(scope="module", params=sorted(UNDER))
def enumerated(request):
    """(what masks, all actions with their masks, their probabilities, a reward for each)."""
    under = UNDER[request.param]
    own = actions(under)
    logprobs = jax.jit(lambda adapters: logprobs_of(adapters, own))(policy().state.adapters)
    q = np.exp(np.asarray(logprobs, np.float64))
    assert len(own) == {"choices": 4, "form": 12}[request.param]
    assert q.sum() == pytest.approx(1, abs=bounds.of(ROUNDINGS))
    return under, own, q, np.random.default_rng(len(own)).normal(size=len(own))


@pytest.mark.slow
def test_the_expected_update_is_the_gradient_of_the_expected_reward(enumerated):
    under, own, q, rewards = enumerated

    def expected(adapters):
        return (jnp.exp(logprobs_of(adapters, own)) * jnp.asarray(rewards, jnp.float32)).sum()

    exact = -flat(jax.jit(jax.grad(expected))(policy().state.adapters))
    ours = gradient(data_under(turns_of(own, under)), q * rewards)
    plain = gradient(data_under(turns_of(own, {})), q * rewards)
    cosines = [x @ exact / np.linalg.norm(x) / np.linalg.norm(exact) for x in (ours, plain)]
    assert cosines[0] >= 1 - bounds.of(ROUNDINGS) ** 2 and cosines[1] < 0.99
    bounds.close(np.linalg.norm(ours), np.linalg.norm(exact), ROUNDINGS)


@pytest.mark.slow
def test_actions_that_all_earn_the_same_teach_nothing(enumerated):
    """The expected update of a reward of 1 for everything that may be drawn."""
    under, own, q, _ = enumerated
    ours, plain = (gradient(data_under(turns_of(own, x)), q) for x in (under, {}))
    assert np.linalg.norm(ours) < bounds.of(ROUNDINGS) * np.linalg.norm(plain)


def test_a_token_that_is_forced_has_log_prob_zero_and_no_gradient():
    only = np.arange(SIZE) == 65
    datum = Datum.of(0, [1, 2], [1], [65], allowed=[only], advantages=[1.0])
    [logprobs] = on_data.forward(policy(), [datum])
    assert logprobs.tolist() == [0.0] and not gradient([datum], [1.0]).any()


def test_a_datum_without_a_mask_is_bit_for_bit_as_alone_beside_one_with():
    """Invariant 25; and what cannot have been drawn is refused."""
    mask = np.arange(SIZE) < 100
    plain = [Datum.of(0, PROMPT, [1, 3], [i, 9], advantages=[1.0, 2.0]) for i in (65, 200)]
    bound = Datum.of(0, PROMPT, [1, 3], [65, 200], allowed=[mask, None], advantages=[1.0, 2.0])
    alone, beside = (on_data.forward(policy(), x) for x in (plain, [plain[0], bound, plain[1]]))
    for one, other in zip(alone, (beside[0], beside[2]), strict=True):
        np.testing.assert_array_equal(one, other)
    assert beside[1][0] > beside[0][0] and bound.forbidden.set_A.tolist() == [1, 0]
    with pytest.raises(ValueError, match="each learned token among those"):
        Datum.of(0, PROMPT, [3], [200], allowed=[mask])


def test_sets_of_tokens_are_kept_once_and_come_back():
    rng = np.random.default_rng(0)
    for size in (1, 31, 32, 70):
        masks = [rng.random(size) < 0.5 for _ in range(3)]
        drawn = [None if n == 3 else masks[n] for n in rng.integers(0, 4, 20)]
        parts = [forbidden_by(drawn[:7]), forbidden_by([None] * 4), forbidden_by(drawn[7:])]
        assert parts[1] is None
        whole = joined(zip(parts, (7, 4, 13), strict=True))
        assert len(whole.bits_QW) <= 4
        row = Forbidden(*(jnp.asarray(x)[None] for x in whole))
        for width in (size - 1, size, size + 9):  # of a teacher, too
            never = np.asarray(row.at(row.set_A, width)[0])
            for mask, own in zip([*drawn[:7], *[None] * 4, *drawn[7:]], never, strict=True):
                expected = np.zeros(width, bool)
                if mask is not None:
                    expected[:size] = ~mask[:width]
                np.testing.assert_array_equal(own, expected)


# The engine and the learner.


def played():
    """Episodes that the engine sampled: agent 0 under choices, agent 1 a form, and both freely."""
    engine = small.engine(
        n=2, layers=LAYERS, eos_ids=(END,), longest=16, forms=forms_of(ByteTokenizer(), SIZE)
    )
    kinds = [{}, *UNDER.values()]
    asked = [
        Request(np.array([*PROMPT, i], np.int32), i % 2, Sampling(16, HEAT), (0, i), **kinds[i % 3])
        for i in range(12)
    ]
    for i, (r, c) in enumerate(zip(asked, small.answers(engine, asked), strict=True)):
        own = small.turn(r.owner, r.prompt, c.ids, logprobs=c.logprobs, temperature=HEAT)
        turn = own._replace(choices=r.choices, form=r.form)
        yield small.episode(i // 6, [turn], [float(i % 4)])


@pytest.mark.slow
def test_the_learner_scores_what_the_engine_drew_as_the_engine_did():
    """Invariant 1 under masks; the entropy is that among what is allowed, and has its gradient."""
    algo = dataclasses.replace(ONCE, group_size=6, entropy_coef=0.01, kl_coef=0.1)
    config, episodes = config_of(algo), [*played()]
    assert len({e.turns[0].action.tobytes() for e in episodes}) > 6
    ours: Learner = learner(config, "grpo")
    state = fresh(config, "grpo")
    batch = ours.pack(episodes, small.paid(episodes))
    scored = ours.logprobs(state.adapters, batch)
    for own, episode in zip(scored, episodes, strict=True):
        np.testing.assert_allclose(own, episode.turns[0].logprobs, atol=GAP)
    _, _, metrics = ours.learn(state, batch, 0)
    assert np.max(metrics["logprob_gap"]) < GAP
    free = [e._replace(turns=[e.turns[0]._replace(choices=(), form="")]) for e in episodes]
    plain = ours.pack(free, small.paid(free))
    assert small.rows_of(plain).actions.forbidden is None
    _, _, other = ours.learn(fresh(config, "grpo"), plain, 0)
    assert (np.asarray(metrics["entropy"]) < 0.8 * np.asarray(other["entropy"])).all()
    found = ours.logprobs(fresh(config, "grpo").adapters, plain)
    for i in range(0, 12, 3):  # rows without a mask
        np.testing.assert_allclose(found[i], scored[i], atol=GAP)


@pytest.mark.slow
def test_a_group_that_earns_the_same_under_a_mask_moves_nothing():
    config, episodes = config_of(dataclasses.replace(ONCE, group_size=6)), [*played()]
    ours, before = learner(config, "grpo"), jax.device_get(fresh(config, "grpo"))
    same_pay = [np.ones(1, np.float32)] * len(episodes)
    after, _, _ = ours.learn(on_device(before), ours.pack(episodes, same_pay), 0)
    assert same(before.policies, jax.device_get(after).policies)


@pytest.mark.slow
def test_the_place_of_masks_is_small():
    """Sets are kept once for each row, as bits, whatever the number of tokens."""
    many = [*played()] * 8, [np.zeros(1, np.float32)] * 96
    rows: Rows = small.rows_of(learner(config_of(ONCE), "grpo").pack(*many))
    forbidden = rows.actions.forbidden
    assert forbidden.bits_QW.nbytes < rows.actions.mask_BA.size * SIZE / 8 / 4


def test_what_does_not_follow_its_form_was_not_sampled_under_it():
    """From there on: no log-prob of a token that is forbidden."""
    turn = small.turn(0, PROMPT, (*b"Pxss", END))._replace(choices=CHOICES)
    [datum] = data_under([turn])
    assert (datum.forbidden.set_A > 0).tolist() == [True, False, False, False, False]
