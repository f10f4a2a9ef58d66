"""The engine: the same tokens and log-probs as a forward pass, whoever shares the batch."""

from __future__ import annotations

import weakref

import bounds
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from marft_jax.engine.compiled import Shape
from marft_jax.engine.kv_cache import SlotSampling
from marft_jax.engine.sample import _draw, _invert, _kept, sample
from marft_jax.models.ops import kv
from marft_jax.parallel import compilation
from marft_jax.sampling import stops
from marft_jax.sampling.protocol import Request
from marft_jax.types import MAIN, Sampling

EOS = tuple(range(0, 264, 8))  # one token in eight ends a turn; 0 also fills prompts: pad == eos


@pytest.fixture(scope="module")
def engine():
    """Four slots, and an end-of-turn token that is never sampled."""
    return small.engine()


def asks(n: int = 10, *, seed: int = 0, most: int = 28, longest: int = 12, **sampling) -> list:
    """Requests of all three agents, with prompts of 1 to ``most`` random tokens."""
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(n):
        prompt = rng.integers(0, 256, rng.integers(1, most + 1)).astype(np.int32)
        limit = int(rng.integers(1, longest + 1))
        requests.append(Request(prompt, i % 3, Sampling(limit, **sampling), (0, i, 0)))
    return requests


def texts(completions) -> list[list[int]]:
    return [completion.ids.tolist() for completion in completions]


# Cached decode equals the full forward pass.


@pytest.mark.parametrize("sampling", [
    dict(temperature=0.5),
    dict(temperature=1.0),
    dict(temperature=1.7),
    dict(temperature=0.0),
    dict(temperature=1.3, top_k=7, top_p=0.8, min_p=0.02),
], ids=["cool", "plain", "hot", "greedy", "filtered"])  # fmt: skip
@pytest.mark.slow
def test_reported_logprobs_are_those_of_a_full_forward_pass(engine, sampling):
    requests = asks(seed=1, most=44 if sampling["temperature"] == 1 else 28, **sampling)
    done = small.answers(engine, requests)
    for completion, expected in zip(done, small.of_full_forward(requests, done), strict=True):
        picked = expected[np.arange(len(completion.ids)), completion.ids]
        atol = bounds.logprobs() / (sampling["temperature"] or 1)
        np.testing.assert_allclose(completion.logprobs, picked, atol=atol)
        if sampling["temperature"] == 0:
            np.testing.assert_array_equal(completion.ids, expected.argmax(-1))
        if "top_k" in sampling:
            rank = (expected > picked[:, None]).sum(-1)
            assert (rank < 7).all()


@pytest.mark.slow
def test_owner_minus_one_is_the_bare_base(engine):
    requests = [r._replace(owner=-1) for r in asks(6, seed=2, temperature=0.0)]
    done = small.answers(engine, requests)
    silent = jax.tree.map(jnp.zeros_like, small.adapters(3))
    logprobs = small.full_forward(
        silent, [r.prompt for r in requests], [c.ids for c in done], [0] * 6, [1.0] * 6
    )
    for completion, expected in zip(done, logprobs, strict=True):
        np.testing.assert_array_equal(completion.ids, expected.argmax(-1))


# A row's output does not depend on the rows beside it.


@pytest.mark.slow
def test_mixed_agents_write_what_each_writes_alone(engine):
    requests = asks(9, seed=3)
    together = small.answers(engine, requests)
    for agent in range(3):
        alone = small.answers(engine, [r for r in requests if r.owner == agent])
        assert texts(alone) == texts(together[agent::3])
        for a, b in zip(alone, together[agent::3], strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=bounds.logprobs())


def test_other_neighbours_change_nothing(engine):
    mine = asks(1, seed=4, longest=16)[0]
    mine = mine._replace(sampling=mine.sampling._replace(max_new_tokens=12), key=(9, 9, 9))
    results = []
    for seed in (5, 6):
        others = asks(7, seed=seed, temperature=0.3 * seed)
        results.append(small.answers(engine, [*others[:2], mine, *others[2:]])[2])
    np.testing.assert_array_equal(results[0].ids, results[1].ids)
    np.testing.assert_allclose(results[0].logprobs, results[1].logprobs, atol=bounds.logprobs())


def test_agents_differ(engine):
    prompt, sampling = np.arange(20, dtype=np.int32), Sampling(8, temperature=0.0)
    requests = [Request(prompt, owner, sampling, (0, 0, 0)) for owner in (-1, 0, 1, 2)]
    assert len({tuple(ids) for ids in texts(small.answers(engine, requests))}) == 4


@pytest.mark.slow
def test_slots_and_chunk_change_nothing_but_speed():
    requests = asks(7, seed=7)
    wide = small.engine(slots=8, chunk=3)
    assert texts(small.answers(wide, requests)) == texts(small.answers(small.engine(), requests))


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "stacked"), [((1, 2, 2), True), ((1, 1, 4), False)], ids=str)
def test_rows_and_matrices_split_over_devices_write_the_same(engine, mesh, stacked):
    """Also where there are more places than key-value heads."""
    requests = asks(6, seed=8)
    done = small.answers(small.engine(small.mesh_of(*mesh), stacked=stacked), requests)
    expected = small.answers(engine, requests)
    assert texts(done) == texts(expected)
    for a, b in zip(done, expected, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=bounds.logprobs())


# Slots, limits, ends.


def test_every_request_is_answered_with_more_requests_than_slots(engine):
    requests = asks(23, seed=9)
    tickets = [engine.submit(request) for request in requests]
    answered = []
    while engine.busy:
        answered += [ticket for ticket, _ in engine.step()]
    assert sorted(answered) == sorted(tickets)


@pytest.mark.slow
def test_a_prefill_stays_within_its_bound_on_tokens(engine, monkeypatch):
    requests = asks(9, seed=13)
    expected = small.answers(engine, requests)
    monkeypatch.setattr(compilation, "prefill_tokens", lambda mesh: 96)  # three rows of 32
    bound, shapes = small.engine(), []
    prefill = bound._prefill
    bound._prefill = lambda **kw: (shapes.append(kw["prompts"].tokens_BT.shape), prefill(**kw))[1]
    assert texts(small.answers(bound, requests)) == texts(expected)
    assert max(shapes) == (3, 32)


@pytest.mark.parametrize(
    "requests, rows", [(1, [1]), (2, [2]), (4, [2, 2]), (5, [8]), (3, [2, 1]), (8, [8])]
)
@pytest.mark.slow
def test_prompts_are_grouped_so_that_they_are_prefilled_soonest(requests, rows):
    eight, sizes = small.engine(slots=8), []
    prefill = eight._prefill
    eight._prefill = lambda **kw: (sizes.append(len(kw["prompts"].tokens_BT)), prefill(**kw))[1]
    asked = [r._replace(prompt=np.resize(r.prompt, 20)) for r in asks(requests, seed=14)]
    alone = small.engine()
    expected = [small.answers(alone, [request])[0] for request in asked]
    assert texts(small.answers(eight, asked)) == texts(expected)
    assert sizes == rows


@pytest.mark.slow
@pytest.mark.usefixtures("own_programs")
def test_what_accelerators_run_writes_the_same_cache(monkeypatch):
    """Where a CPU goes its own way, here as the others do."""
    requests = asks(12, seed=18)
    expected = small.engine(slots=14)
    answers = small.answers(expected, requests)
    ways = []

    def elsewhere(*operands, default, **forms):
        ways.extend(forms.values())
        return default(*operands)

    monkeypatch.setattr(jax.lax, "platform_dependent", elsewhere)
    jax.clear_caches()
    other = small.engine(slots=14)
    assert texts(small.answers(other, requests)) == texts(answers)
    assert {way.func.__name__ for way in ways} >= {"_together"}
    for one, two in zip(
        jax.tree.leaves(expected._slots), jax.tree.leaves(other._slots), strict=True
    ):
        bounds.close(one, two, bounds.forward())
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.usefixtures("own_programs")
@pytest.mark.parametrize("where", [small.one_device, lambda: small.mesh_of(2, 2, 2)])
def test_keys_with_channels_last_in_memory_are_the_same_keys(monkeypatch, where):
    """As on TPUs; here by the layout alone."""
    requests = asks(12, seed=17)
    expected = small.answers(small.engine(where(), slots=16), requests)
    monkeypatch.setitem(kv.KEYS_IN_MEMORY, "cpu", kv.KEYS_IN_MEMORY["tpu"])
    turned = small.engine(where(), slots=16)
    assert texts(small.answers(turned, requests)) == texts(expected)
    [keys, values] = turned._slots.cache[0]
    assert keys.format.layout.major_to_minor == (0, 1, 3, 2)
    assert values.format.layout.major_to_minor == (0, 1, 2, 3)


@pytest.mark.parametrize("platform, as_integers", [("cpu", True), ("tpu", False), ("cuda", False)])
def test_halves_are_written_as_integers_on_cpus_only(platform, as_integers):
    """Elsewhere that would copy the whole cache in every step of decoding."""
    held = jax.ShapeDtypeStruct((4, 2, 8, 64), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((4, 2, 8), jnp.bfloat16)

    def put(held, new):
        return kv.write(held, jnp.s_[jnp.arange(4), :, :, 5], new)

    program = jax.jit(put).trace(held, new).lower(lowering_platforms=(platform,)).as_text()
    assert ("4x2x8x64xui16" in program) == as_integers


@pytest.mark.slow
def test_a_released_engine_holds_no_cache_and_forgets_what_was_in_it():
    playing, asked = small.engine(), asks(6, seed=16)
    expected = small.answers(playing, asked)
    own = [weakref.ref(leaf) for leaf in jax.tree.leaves((playing._slots, playing._fused))]
    playing.release()
    assert not any(leaf() for leaf in own)
    playing.load({MAIN: small.adapters(3)}, 0)
    assert texts(small.answers(playing, asked)) == texts(expected)


def test_actions_stop_at_their_own_limit(engine):
    requests = asks(12, seed=10, longest=16)
    done = small.answers(engine, requests)
    assert [len(c.ids) for c in done] == [r.sampling.max_new_tokens for r in requests]
    assert {c.reason for c in done} == {"length"}
    assert all(len(c.logprobs) == len(c.ids) for c in done)


def test_an_action_may_fill_the_context_to_the_last_token(engine):
    prompt = np.arange(small.CONTEXT - 16, dtype=np.int32)
    full = Request(prompt, 0, Sampling(16, temperature=0.0), (0, 0, 0))
    [done] = small.answers(engine, [full])
    [expected] = small.full_forward(small.adapters(3), [prompt], [done.ids], [0], [1.0])
    np.testing.assert_array_equal(done.ids, expected.argmax(-1))
    assert len(done.ids) == 16


def test_a_stop_text_ends_an_action_and_leaves_its_ids_as_sampled(engine):
    """Its slot goes to the next: eight actions, in four slots; each stops at its first letter."""
    prompts = [np.arange(i, i + 9, dtype=np.int32) for i in range(8)]

    def ask(stop):
        how = Sampling(12, temperature=2.0, stop=stop)
        return small.answers(engine, [Request(p, 0, how, (0, i, 0)) for i, p in enumerate(prompts)])

    letters = tuple(map(chr, range(ord("!"), ord("q"))))
    whole, cut = ask(()), ask(letters)
    for one, other in zip(whole, cut, strict=True):
        first = [chr(i) in letters for i in [*one.ids.tolist(), ord("!")]].index(True) + 1
        assert other.ids.tolist() == one.ids.tolist()[:first]
        assert np.array_equal(other.logprobs, one.logprobs[:first])
        assert other.reason == ("stop" if first <= len(one.ids) else "length")
    assert sum(other.reason == "stop" for other in cut) > 4 and not engine.busy
    decode = small.base().tokenizer.decode
    assert stops.text_of([*b"  a </x> b"], ("</x>", "b"), decode) == "a"


@pytest.mark.slow
def test_the_end_token_ends_an_action_and_pad_may_equal_it(engine):
    requests = [r._replace(sampling=Sampling(16)) for r in asks(24, seed=11)]
    endless = texts(small.answers(engine, requests))
    done = small.answers(small.engine(eos_ids=EOS), requests)
    assert {c.reason for c in done} == {"end", "length"}
    for completion, tokens in zip(done, endless, strict=True):
        ends = [i for i, token in enumerate(tokens) if token in EOS]
        assert completion.reason == ("end" if ends else "length")
        assert completion.ids.tolist() == tokens[: ends[0] + 1 if ends else 16]


def test_a_request_that_leaves_no_room_is_refused(engine):
    with pytest.raises(AssertionError):
        engine.submit(Request(np.zeros(small.CONTEXT - 3, np.int32), 0, Sampling(4), (0, 0, 0)))


def test_new_adapters_are_used_once_loaded():
    engine, requests = small.engine(), asks(4, seed=12, temperature=0.0)
    before = texts(small.answers(engine, requests))
    engine.load({MAIN: small.adapters(3, seed=1)}, 0)
    assert texts(small.answers(engine, requests)) != before
    engine.load({MAIN: small.adapters(3)}, 0)
    assert texts(small.answers(engine, requests)) == before


# Noise.


def test_the_same_keys_repeat_the_noise_and_any_other_key_changes_it(engine):
    prompt, sampling = np.arange(20, dtype=np.int32), Sampling(16, temperature=2.0)
    folds = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 2, 0)]
    requests = [Request(prompt, 0, sampling, fold) for fold in folds]
    first = texts(small.answers(engine, requests))
    assert texts(small.answers(engine, requests)) == first
    assert len({tuple(ids) for ids in first}) == len(folds)
    other_seed = texts(small.answers(small.engine(seed=1), requests))
    assert all(a != b for a, b in zip(first, other_seed, strict=True))


def test_noise_differs_from_token_to_token(engine):
    flat = jax.tree.map(jnp.zeros_like, small.base().params)
    engine = small.engine()
    engine._base = flat  # every token is equally likely: what is drawn is the noise itself
    request = Request(np.arange(5, dtype=np.int32), 0, Sampling(16), (0, 0, 0))
    [done] = small.answers(engine, [request])
    assert len(set(done.ids.tolist())) > 8


# Sampling.

LOGITS = np.log(np.array([0.30, 0.25, 0.20, 0.12, 0.08, 0.04, 0.01]))
ROWS = 4096


@jax.jit
def draw(logits_V, settings: SlotSampling, seed):
    """``ROWS`` independent draws from one row of logits."""
    keys = jax.random.key_data(jax.random.split(jax.random.key(seed), ROWS))
    rows = SlotSampling(*(jnp.full((ROWS,), x) for x in settings))
    logits_BV = jnp.broadcast_to(logits_V[None], (ROWS, logits_V.shape[0]))
    return sample(logits_BV, keys, jnp.zeros(ROWS, jnp.int32), rows)


def settings_of(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0) -> SlotSampling:
    floats = [np.float32(x) for x in (temperature, top_p)]
    return SlotSampling(*floats, np.int32(top_k), np.float32(min_p), np.int32(1))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (dict(), 7),
        (dict(temperature=0.5), 7),
        (dict(temperature=2.0), 7),
        (dict(top_k=3), 3),
        (dict(top_p=0.7), 3),  # 0.30 + 0.25 < 0.7 <= 0.30 + 0.25 + 0.20
        (dict(min_p=0.3), 4),  # at least 0.09
        (dict(top_k=6, top_p=0.9, min_p=0.2), 5),
        (dict(temperature=2.0, top_p=0.7), 4),
        (dict(top_k=3, top_p=0.7), 2),  # 0.30 + 0.25 are 0.73 of 0.75
    ],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(settings, kept):
    ids, logprobs, mass = (np.asarray(x) for x in draw(LOGITS, settings_of(**settings), 3))
    scaled = np.exp(LOGITS / settings.get("temperature", 1.0))
    whole = scaled / scaled.sum()
    bounds.close(logprobs, np.log(whole)[ids], size=4.0)  # so small are the least of them
    bounds.close(mass, whole[:kept].sum())
    expected = np.where(np.arange(7) < kept, whole, 0) / whole[:kept].sum() * ROWS
    counts = np.bincount(ids, minlength=7)
    assert (counts[kept:] == 0).all()
    chi_square = ((counts - expected)[:kept] ** 2 / expected[:kept]).sum()
    assert chi_square < 30  # 6 degrees of freedom: exceeded by chance in 1 of 25,000 seeds


def test_a_completion_tells_how_much_the_filters_kept(engine):
    prompt, key = np.arange(5, dtype=np.int32), (0, 0, 0)
    whole, cut = (Sampling(8), Sampling(8, top_p=0.5))
    requests = [Request(prompt, 0, sampling, key) for sampling in (whole, cut)]
    free, filtered = small.answers(engine, requests)
    assert free.filtered_mass == 1.0 and 0.5 <= filtered.filtered_mass < 0.99


def test_top_k_of_one_is_greedy_and_temperature_zero_too():
    for settings in (settings_of(top_k=1), settings_of(temperature=0), settings_of(top_p=1e-6)):
        ids, _, _ = draw(np.roll(LOGITS, 2), settings, 0)
        assert (np.asarray(ids) == 2).all()


def test_greedy_reports_unscaled_logprobs():
    _, logprobs, _ = draw(LOGITS, settings_of(temperature=0), 0)
    bounds.close(logprobs, np.log(0.3))


@pytest.mark.parametrize("vocabulary", [7, 96, 1000])
def test_filters_keep_what_a_sorted_vocabulary_says(vocabulary):
    rng = np.random.default_rng(1)
    logprobs = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(64, vocabulary)) * 3, jnp.float32))
    top_k = rng.integers(0, 8, 64).astype(np.int32)
    top_p = np.where(rng.random(64) < 0.3, 1, rng.uniform(0.05, 0.99, 64)).astype(np.float32)
    none = np.zeros(64, np.float32)
    kept = jax.jit(_kept)(logprobs, SlotSampling(none + 1, top_p, top_k, none, top_k + 1))
    p = np.exp(np.asarray(logprobs, np.float64))
    falling = -np.sort(-p)
    within = (np.arange(vocabulary) < top_k[:, None]) | (top_k[:, None] == 0)
    shares = falling * within / (falling * within).sum(-1, keepdims=True)  # of what top-k keeps
    before = np.cumsum(shares, axis=-1) - shares  # share of all that is likelier
    within &= (before < top_p[:, None]) | (top_p[:, None] == 1)
    np.testing.assert_array_equal(np.asarray(kept).sum(-1), within.sum(-1))
    assert (
        p[np.asarray(kept)] >= np.repeat(np.where(within, falling, 9).min(-1), kept.sum(-1)) * 0.999
    ).all()


def test_the_likeliest_token_always_passes():
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(256, 300)) * 20).astype(np.float32)
    column = rng.uniform(size=(2, 256)).astype(np.float32)
    settings = SlotSampling(
        np.ones(256, np.float32),
        np.maximum(column[0] ** 8, 1e-9),
        rng.integers(0, 400, 256).astype(np.int32),
        np.where(column[1] > 0.9, 1, column[1]).astype(np.float32),
        np.ones(256, np.int32),
    )
    kept = np.asarray(jax.jit(_kept)(jax.nn.log_softmax(logits), settings))
    assert kept[np.arange(256), logits.argmax(-1)].all()


def test_a_token_of_weight_zero_is_never_drawn_however_sums_are_rounded(monkeypatch):
    """Parallel running sums, as on accelerators, may grow in float32 where nothing is added."""

    def parallel(x, axis):
        return jax.lax.associative_scan(jnp.add, x, axis=axis)

    monkeypatch.setattr(jnp, "cumsum", parallel)
    rng = np.random.default_rng(0)
    weights = rng.uniform(size=(4096, 256)).astype(np.float32) ** 4
    weights *= rng.uniform(size=weights.shape) < 0.3
    weights[:, -1] = 0
    sums = np.asarray(jax.jit(jnp.cumsum, static_argnames="axis")(weights, axis=-1))
    before = np.maximum.accumulate(sums, axis=-1)
    grows = (weights[:, 1:] == 0) & (sums[:, 1:] > before[:, :-1])
    rows, columns = np.nonzero(grows)
    assert len(rows) > 0, "these running sums are monotone: the test shows nothing"
    uniform = before[rows, columns] / sums[rows, -1]
    for nudge in (-1, 0, 1):
        points = uniform + nudge * np.float32(2**-24)
        points = np.clip(points, 0, np.float32(1 - 2**-23)).astype(np.float32)
        index, _ = jax.jit(_invert)(weights[rows], points)
        assert (weights[rows, np.asarray(index)] > 0).all()


def test_extreme_uniform_numbers_draw_a_token_that_is_there():
    weights = np.zeros((2, 600), np.float32)
    weights[:, [3, 500]] = 0.25
    ends = np.array([0, 1 - 2**-23], np.float32)
    assert np.asarray(jax.jit(_draw)(weights, ends)).tolist() == [3, 500]


@pytest.mark.parametrize("reuse", [False, True])
def test_all_shapes_that_requests_can_have_are_counted(reuse):
    """By trying every prompt, cached prefix, group and chunk."""
    where = small.one_device()
    shape = Shape(slots=8, chunk=16, context=300, longest=16)
    found: set[tuple[int, ...]] = set()
    for length in range(1, shape.context + 1):
        found.add((shape.read(length + shape.chunk),))
        starts = range(1, length) if reuse else ()
        new = {(shape.rest(length - s), shape.prefixed(length)) for s in starts}
        for width, read in {(shape.width(length), 0), *new}:
            found |= {(rows, width, read) for rows in shape.prefill_rows(width, where)}
    assert shape.programs(where, reuse) == len(found)
