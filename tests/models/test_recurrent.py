"""Layers with a recurrent state, LFM2's short convolution and Qwen3.5's gated delta net; and layers
of Gemma 4, some of which read the keys and values of another."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bounds
import chex
import jax
import jax.numpy as jnp
import numpy as np
import on_data
import pytest
import small
from logits import logits_of, random_adapters
from safetensors.numpy import load_file, save_file

from marft_jax import policy as verbs
from marft_jax.extras.export import huggingface
from marft_jax.interop import peft
from marft_jax.interop.initial import initial_adapters
from marft_jax.learning import batch as batch_lib
from marft_jax.models import config_json, decoder, lora
from marft_jax.models.ops import delta, state
from marft_jax.models.weights.load import abstract_decoder, load_base
from marft_jax.sampling.protocol import Request
from marft_jax.settings.config import Lora, Model
from marft_jax.types import MAIN, Sampling

BASE: dict[str, Any] = dict(
    vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
)  # fmt: skip
LFM2 = BASE | dict(
    architectures=["Lfm2ForCausalLM"], model_type="lfm2", block_auto_adjust_ff_dim=False,
    layer_types=["conv", "full_attention", "conv"], tie_word_embeddings=False,
)  # fmt: skip
QWEN = BASE | dict(
    head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=8, num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
QWEN3_5 = QWEN | dict(architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text")
EXPERTS = QWEN | dict(
    architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe_text", num_experts=8,
    num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48,
)  # fmt: skip
GEMMA4 = BASE | dict(
    architectures=["Gemma4ForCausalLM"], model_type="gemma4_text", num_hidden_layers=3,
    layer_types=["sliding_attention", *["full_attention"] * 2], num_kv_shared_layers=1, head_dim=8,
    global_head_dim=16, attention_k_eq_v=True, num_global_key_value_heads=1, sliding_window=8,
    use_double_wide_mlp=True, hidden_size_per_layer_input=8, vocab_size_per_layer_input=264,
    final_logit_softcapping=3.0, tie_word_embeddings=False,
)  # fmt: skip
BESIDE = GEMMA4 | dict(
    num_hidden_layers=2, layer_types=None, num_kv_shared_layers=0, hidden_size_per_layer_input=0,
    enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=32,
)  # fmt: skip
SETTINGS = {"lfm2": LFM2, "qwen3_5": QWEN3_5, "experts": EXPERTS, "gemma4": GEMMA4}
SETTINGS["gemma4_experts"] = BESIDE
CONFIGS = {name: config_json.read_config(own, "config.json") for name, own in SETTINGS.items()}
CONFIGS["mixed"] = dataclasses.replace(
    CONFIGS["experts"], layers=2 * (CONFIGS["lfm2"].layers[0], *CONFIGS["experts"].layers)
)
"""Every recurrent mixer in one model, whose layers repeat after three."""
_OTHERS = dict(num_hidden_layers=8, num_kv_shared_layers=4)
CONFIGS["gemma4_readers"] = config_json.read_config(
    GEMMA4 | _OTHERS | {"layer_types": 4 * ["sliding_attention", "full_attention"]}, "config.json"
)
"""Two periods of layers with keys of their own, then two that read these."""
TARGETS = {
    "gemma4_readers": ("q", "k", "gate", "down", "input_up"),
    "lfm2": ("q", "gate", "conv_in_proj", "conv_out_proj"),
    "qwen3_5": ("q", "gate", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    "mixed": ("v", "conv_in_proj", "in_proj_qkv", "in_proj_a", "out_proj", "shared_up"),
    "experts": ("v", "in_proj_qkv", "out_proj", "shared_gate", "shared_down", "experts"),
    "gemma4_experts": ("q", "gate", "experts"),
    "gemma4": ("q", "k", "v", "o", "gate", "down", "input_gate", "input_up"),
}


def base(name: str, mesh: tuple[int, int, int] = (1, 1, 1), stacked: bool = False):
    config = CONFIGS[name]
    return small.base_on(small.mesh_of(*mesh), config.n_layers, stacked, config)


def published(name: str, folder: Path) -> small.BaseModel:
    """The model, whose config.json and tokenizer lie in this folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SETTINGS[name]))
    huggingface.save_tokenizer(small.ByteTokenizer(), folder, None)
    return base(name)._replace(source=str(folder))


@functools.cache
def adapters(name: str, n: int = 3) -> lora.Adapters:
    """Adapters of every matrix of the mixers, whose B is not zero."""
    return random_adapters(CONFIGS[name], TARGETS[name], n, 3, 0.3)


@functools.cache
def forward(name: str):
    """(embeddings, tree, tokens, ends, owners) to logits; ``ends`` of each token's sequence."""
    model = base(name)

    @jax.jit
    def run(table, tree, tokens, until, owners):
        at = jnp.arange(tokens.shape[1])
        earlier = (at[None, :, None] > at[None, None]) & (until[:, None] >= at[None, :, None])
        positions = earlier.sum(-1)
        fused = lora.fuse(tree, lora.scale_of(tree, small.ALPHA), jnp.float32)
        params = jax.tree.map(lambda x: x, model.params)
        params["embed"]["embedding"] = params["embed"]["embedding"].replace(table)
        mask = lora.owner_mask(owners, fused)
        hidden, _ = decoder.forward(model.graphdef, params, tokens, positions, until, fused, mask)
        return decoder.project(model.graphdef, params, hidden)

    return run, model.params["embed"]["embedding"][...]


def logits(name: str, tokens, ends, owners) -> np.ndarray:
    run, table = forward(name)
    return np.asarray(run(table, adapters(name), *map(jnp.asarray, (tokens, ends, owners))))


def delta_inputs(t: int, seed: int = 0) -> delta.Writes:
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, 2, 3, t, 8))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    decay, beta = -rng.exponential(size=(2, 3, t)), rng.uniform(size=(2, 3, t))
    inputs = q, k, rng.normal(size=(2, 3, t, 12)), decay, beta
    return delta.Writes(*(jnp.asarray(x, jnp.float32) for x in inputs))


def one_by_one(tokens: delta.Writes, state, begins_BT):
    """The recurrent form, token by token; a sequence begins with a state of zeros."""

    def step(state, each):
        token, begins = each
        state = jnp.where(begins[:, None, None, None], 0, state)
        out, state = delta.recurrent(token, state)
        return state, out

    in_front = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), tokens)
    state, out = jax.lax.scan(step, state, (in_front, jnp.asarray(begins_BT).T))
    return jnp.moveaxis(out, 0, 2), state


ROUNDINGS = bounds.sums(*[64] * 150)
"""Of 150 steps of the recurrence; the form in chunks solves a triangle of 64 rows in between."""


def test_chunks_are_the_recurrence_from_a_given_state():
    tokens, t = delta_inputs(150), 150
    start = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 8, 12)), jnp.float32)
    found = jax.jit(delta.chunked)(tokens, start)[:2]
    expected = one_by_one(tokens, start, np.zeros((2, t), bool))
    bounds.close(found, expected, ROUNDINGS)


def row_of(*sequences: Sequence[tuple[int, int]]) -> tuple[np.ndarray, list[np.ndarray]]:
    """(last reader of each token of a row, places of each sequence), of spans of places."""
    places = [np.concatenate([np.arange(*span) for span in spans]) for spans in sequences]
    until = np.arange(max(own[-1] for own in places) + 1)
    for own in places:
        until[own] = own[-1]
    return until, places


ROWS = {
    "one": [[(0, 150)]],
    "beside each other": [[(0, 20)], [(20, 70)], [(70, 71)], [(71, 150)]],
    "at borders": [[(0, 64)], [(64, 128)], [(128, 150)]],
    "one prefix": [[(0, 100)], [(0, 64), (128, 150)], [(0, 64), (192, 300)]],
    "prefixes of prefixes": [[(0, 140)], [(0, 128), (192, 320)], [(0, 128), (192, 256), (320, 340)],
        [(0, 64), (384, 400)], [(448, 520)], [(448, 512), (576, 577)]],
}  # fmt: skip
"""Sequences by the spans of a row where they stand. They go on from prefixes at borders of 64."""


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.slow
def test_sequences_of_a_row_are_the_recurrence_in_values_and_gradients(name):
    until, places = row_of(*ROWS[name])
    tokens, t = delta_inputs(len(until)), len(until)
    weights = jnp.cos(jnp.arange(2 * 3 * t * 12.0)).reshape(2, 3, t, 12)
    until_BT = jnp.asarray(np.stack([until, np.arange(t)]))  # tokens of the second row are alone
    new = [np.setdiff1d(own, np.concatenate([[-1], *places[:i]])) for i, own in enumerate(places)]

    def branched(tokens):
        return delta.branched(tokens, until_BT, state.tokens_before(until_BT))

    def apart(tokens):
        whole, (_, h, _, c) = jnp.zeros_like(tokens.v), tokens.v.shape
        for own, mine in zip(places, new, strict=True):
            alone = jax.tree.map(lambda x, own=own: x[:1, :, own], tokens)
            zeros = jnp.zeros((1, h, tokens.k.shape[-1], c))
            out, _ = one_by_one(alone, zeros, np.zeros((1, len(own)), bool))
            whole = whole.at[:1, :, mine].set(out[:, :, np.searchsorted(own, mine)])
        single = tokens.beta[..., None] * (tokens.q * tokens.k).sum(-1, keepdims=True) * tokens.v
        return whole.at[1].set(single[1])

    def weighed(run):
        read = np.isin(np.arange(t), np.concatenate(places))[None, None, :, None]
        return jax.jit(
            jax.value_and_grad(lambda x: ((out := run(x)) * weights * read).sum() + 0 * out.sum())
        )(tokens)

    bounds.close(weighed(branched), weighed(apart), ROUNDINGS)


def test_chunks_stay_exact_where_all_keys_are_alike():
    """The inverse of a triangle of ones: what cancels must not be larger than the result."""
    tokens = delta_inputs(128)
    alike = jnp.broadcast_to(jnp.eye(8)[0], tokens.k.shape)
    tokens = tokens._replace(k=alike, beta=0.999 + 0 * tokens.beta, log_decay=0 * tokens.beta)
    state = jnp.ones((2, 3, 8, 12))
    found = jax.jit(delta.chunked)(tokens, state)[:2]
    expected = one_by_one(tokens, state, np.zeros((2, 128), bool))
    bounds.close(found, expected, ROUNDINGS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "spans", "owner_of_each"), [
    ("mixed", [[(0, 5)], [(5, 75)], [(75, 77)], [(77, 90)]], [0, 1, 2, 0]),
    ("mixed", [[(0, 75)], [(0, 64), (128, 140)], [(140, 150)]], [0, 0, 1]),
])  # fmt: skip
def test_sequences_of_a_row_are_computed_as_if_each_were_alone(name, spans, owner_of_each):
    """Their values, and by gradient: no token has one from another sequence of its row."""
    ends, places = row_of(*spans)
    ends = np.concatenate([ends, np.arange(len(ends), 150)])  # rows of one length: one program
    t, owners = len(ends), np.full((1, len(ends)), -1)
    tokens = np.random.default_rng(3).permutation(264)[None, :t]  # each its own embedding
    for own, owner in zip(places, owner_of_each, strict=True):
        owners[0, own] = owner
    together = logits(name, tokens, ends[None], owners)
    for own, owner in zip(places, owner_of_each, strict=True):
        alone, n = np.zeros_like(tokens), len(own)
        alone[0, :n] = tokens[0, own]
        until = np.where(np.arange(t) < n, n - 1, np.arange(t))
        expected = logits(name, alone, until[None], np.full((1, t), owner))[0, :n]
        bounds.close(together[0, own], expected, bounds.forward(CONFIGS[name], tokens=150))
    run, table = forward(name)
    rest = adapters(name), *map(jnp.asarray, (tokens, ends[None], owners))

    def of_second(table):
        new = np.setdiff1d(places[1], places[0])
        return jnp.square(run(table, *rest)[0, new] @ jnp.ones(264)).sum()

    gradient = np.abs(np.asarray(jax.grad(of_second)(table))).max(-1)
    mine = tokens[0, places[1]]
    assert (gradient[mine] > 0).all()
    assert gradient[np.setdiff1d(np.arange(264), mine)].max() == 0


@functools.cache
def engine_on(name: str, stacked: bool = False) -> small.Engine:
    """Four slots on a model."""
    model = base(name, stacked=stacked)
    made = small.Engine(
        model.config, model.graphdef, model.params, small.one_device(),
        small.Shape(4, 4, 192, 16), eos_ids=tuple(range(0, 264, 12)), seed=0, alpha=small.ALPHA,
        decode=small.ByteTokenizer().decode,
    )  # fmt: skip
    made.load({MAIN: adapters(name)}, 0)
    return made


def sampled(name: str, stacked: bool, prompts: Sequence[np.ndarray], first: int = 0):
    """Answers, whose log-probs are checked to be those of whole rows; and the copied tokens."""
    engine = engine_on(name, stacked)
    before, count = small.copied(engine), len(prompts)
    owners = [i % 3 for i in range(count)]
    asked = [
        Request(p, n, Sampling(9), (0, first + i, 0))
        for i, (p, n) in enumerate(zip(prompts, owners, strict=True))
    ]
    done = small.answers(engine, asked)
    rows, ends = np.zeros((2, 6, 192), int)
    for row, until, prompt, answer in zip(rows, ends, prompts, done, strict=False):
        whole = np.concatenate([prompt, answer.ids])
        row[: len(whole)] = whole
        until[:] = np.maximum(len(whole) - 1, np.arange(192))
    owners_BT = np.asarray(owners + [0] * (6 - count))[:, None] + 0 * rows
    scored = np.asarray(jax.nn.log_softmax(logits(name, rows, ends, owners_BT)))
    for own, prompt, answer in zip(scored, prompts, done, strict=False):
        at = len(prompt) - 1 + np.arange(len(answer.ids))
        np.testing.assert_allclose(
            answer.logprobs, own[at, answer.ids], atol=bounds.logprobs(CONFIGS[name], tokens=192)
        )
    return done, small.copied(engine) - before


@pytest.mark.slow
@pytest.mark.parametrize("name, stacked, lengths", [
    ("mixed", False, (65, 90, 1, 2, 66, 30)),
    ("gemma4", False, (20, 33)),
    ("gemma4_readers", True, (20, 33)),
])  # fmt: skip
def test_the_engine_samples_from_what_the_update_computes(name, stacked, lengths):
    """With prompts of all lengths side by side, and slots that others have used before."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 256, n).astype(np.int32) for n in lengths]
    sampled(name, stacked, prompts)
    if name != "mixed":  # keys and values are reused from any position
        longer = np.concatenate([prompts[1], prompts[0]])
        assert sampled(name, stacked, [prompts[0], longer], 6)[1] >= 33


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stacked"), [("mixed", True), ("qwen3_5", False)])
def test_prompts_start_from_the_state_that_another_left(name, stacked):
    """From the beginning of its prompt's last chunk, and from its end; never from between."""
    engine_on(name, stacked).load({MAIN: adapters(name)}, 0)
    rng = np.random.default_rng(7)
    first = rng.integers(0, 256, 150).astype(np.int32)
    other = np.concatenate([first[:140], rng.integers(0, 256, 9)]).astype(np.int32)
    assert sampled(name, stacked, [first])[1] == 0
    assert sampled(name, stacked, [other], 1)[1] == 128
    [answer], copied = sampled(name, stacked, [first], 2)
    assert copied == 128
    assert sampled(name, stacked, [first[:100]], 3)[1] == 0
    longer = np.concatenate([first, answer.ids, first[:20]])
    assert sampled(name, stacked, [longer], 4)[1] == len(first) + len(answer.ids) - 1


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.release
def test_exports_compute_what_we_compute(name, tmp_path):
    """A merged model that is loaded again; and with torch, transformers' model and peft's."""
    model = published(name, tmp_path / "source")
    factors = jax.tree.map(lambda x: np.asarray(x[1]), adapters(name))
    tokens = np.random.default_rng(6).integers(0, 256, (2, 20))
    ends, owners = np.full_like(tokens, 19), np.ones_like(tokens)
    ours = logits(name, tokens, ends, owners)
    huggingface.write_model(tmp_path / "merged", model, factors, small.ALPHA / 3, {})
    merged = load_base(Model(base=str(tmp_path / "merged")), lambda _, x: jnp.asarray(x))
    assert merged.config == CONFIGS[name]
    of_merged = logits_of(merged.graphdef, merged.params, tokens)
    bounds.close(of_merged, ours, bounds.forward(CONFIGS[name]))
    peft.write(
        tmp_path / "agent", factors, small.ALPHA, "base", "model", model.config.layers_with,
        dict(model.config.spelling),
    )  # fmt: skip
    again = peft.read(tmp_path / "agent").matrices
    count = {target: len(pair["a"]) for target, pair in factors.items()}
    pairs = {(lora.matrix_of(t), i) for t in count for i in model.config.layers_with(t)}
    assert pairs == set(again)
    huggingface.write_model(tmp_path / "base", model, {}, 1.0, {})
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    for adapter in (None, tmp_path / "agent"):
        where = tmp_path / ("base" if adapter else "merged")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)
        if adapter:
            theirs = pytest.importorskip("peft").PeftModel.from_pretrained(theirs, adapter)
        with torch.no_grad():
            found = theirs.eval()(torch.tensor(tokens)).logits.numpy()
        bounds.close(found, ours, bounds.forward(CONFIGS[name]))


@pytest.mark.parametrize("name", SETTINGS)
def test_adapters_of_a_run_start_another(name):
    """A checkpoint counts the layers of each stack of matrices from 0."""
    tree, config = adapters(name, 1), CONFIGS[name]
    of_run = {
        (stack, i): (np.asarray(ab["a"][0, i]), np.asarray(ab["b"][0, i]))
        for stack, ab in tree.items()
        for i in range(ab["a"].shape[1])
    }
    team = small.team(1)
    saved = {team.folder_of(MAIN, 0): peft.Adapter(of_run, 3, small.ALPHA / 3)}
    settings = Lora(rank=3, alpha=small.ALPHA, targets=TARGETS[name], init="a run")
    fresh = lora.init(jax.random.key(1), config, adapters=[0], rank=3, targets=TARGETS[name])
    loaded = initial_adapters(team, settings, {MAIN: fresh}, saved, {MAIN: config})[MAIN]
    bounds.close(loaded, tree)


def gradients(name: str, mesh: tuple[int, int, int], stacked: bool = False) -> lora.Adapters:
    """Of the adapters, in rows with two sequences of unlike owners and with padding."""
    model = base(name, mesh, stacked)
    tokens = jnp.asarray(np.random.default_rng(4).integers(0, 256, (4, 100)))
    stops = np.asarray([[30, 100], [70, 90], [1, 2], [64, 80]])
    at = np.arange(100)[None]
    until, owners = at + 0 * stops[:, :1], np.full((4, 100), -1)
    for row, (first, last) in enumerate(stops):
        until[row, :first], until[row, first:last] = first - 1, last - 1
        owners[row, :first], owners[row, first:last] = 0, 2
    positions = jnp.asarray(np.where(at < stops[:, :1], at, at - stops[:, :1]))

    @jax.jit
    def run(params, tree):
        def loss(tree):
            fused = lora.fuse(tree, lora.scale_of(tree, small.ALPHA), jnp.float32)
            mask = lora.owner_mask(jnp.asarray(owners), fused)
            rows = tokens, positions, jnp.asarray(until)
            hidden, _ = decoder.forward(model.graphdef, params, *rows, fused, mask)
            return jnp.where((owners >= 0)[..., None], jnp.square(hidden), 0).mean()

        return jax.grad(loss)(tree)

    where = small.mesh_of(*mesh)
    return jax.device_get(small.mesh.with_mesh(where, run)(model.params, adapters(name)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mixed", pytest.param("gemma4_readers", marks=pytest.mark.release)]
)
@pytest.mark.release
def test_gradients_of_each_owner_are_the_same_on_one_device_and_stacked_on_four(name):
    one, four = gradients(name, (1, 1, 1)), gradients(name, (2, 1, 2), stacked=True)
    # keys are made of length 1, and the rounding of short ones grows with them
    bounds.close(four, one, 4 * bounds.backward(CONFIGS[name], tokens=100))
    for name, pair in one.items():
        each = np.abs(pair["a"]).reshape(3, -1).max(1)
        assert each[0] > 0 and each[2] > 0 and each[1] == 0, name  # who is absent learns nothing


def test_stacked_layers_of_unlike_heads_may_be_computed_again():
    """Gemma 4's global layers have wider heads, and so a rotary table of another shape."""
    config = CONFIGS["gemma4_experts"]
    model = small.base_on(small.one_device(), 2 * config.n_layers, True, config)
    graphdef, _ = abstract_decoder(model.config, jnp.float32, remat="block")
    rows = [jnp.zeros((1, 12), jnp.int32)] * 3
    run = functools.partial(decoder.forward, graphdef, lora=None, owners=None)
    hidden, _ = jax.eval_shape(run, model.params, *rows)
    assert hidden.shape == (1, 12, config.d_model)


def test_what_episodes_share_is_cut_to_whole_chunks_and_no_more_where_rows_would_be_longer():
    [episode, *_] = small.random_episodes(1)
    algo = dataclasses.replace(small.config().algo, minibatches=1)

    def shared(prompt: int, own: int, branches: int = 64) -> int:
        rng, made = np.random.default_rng(0), list[Any]()
        common = rng.integers(0, 256, prompt)
        for _ in range(4):
            [turn, *_] = episode.turns
            ids = np.concatenate([common, rng.integers(0, 256, own)])
            made.append(episode._replace(turns=[turn._replace(prompt=ids)]))
        packed = batch_lib.build(
            made, small.paid(made), (0, 1), algo, "action", share=True,
            configs={MAIN: SimpleNamespace(branches=branches, d_model=2048)},
        )  # fmt: skip
        return packed.prefix_shared

    assert shared(140, 8, branches=1) >= 3 * 140
    assert shared(140, 8) == 2 * 128  # in two rows of 256
    assert shared(70, 8) == shared(50, 8) == 0  # nine tokens more would be a chunk of padding


@pytest.mark.slow
def test_samples_of_one_prompt_learn_together_what_each_learns_alone(name="qwen3_5"):
    """Log-probs and gradients, through the verbs that know no team."""
    model, rng = base(name), np.random.default_rng(8)
    policy = verbs.on_base(model, small.one_device(), room=1, rank=3, targets=TARGETS[name])
    fresh = verbs.fresh(policy, rank=3, alpha=6.0, targets=TARGETS[name])
    made = {matrix: {k: x[0] for k, x in pair.items()} for matrix, pair in adapters(name).items()}
    policy = verbs.add(policy, 0, fresh._replace(factors=jax.device_get(made)))
    prompt, samples = rng.integers(0, 256, 140), rng.integers(0, 256, (3, 20))
    at = 139 + np.arange(20)
    data = [
        verbs.Datum.of(0, [*prompt, *own[:-1]], at, own, logprobs=0 * own, weights=0 * own + 1.0)
        for own in samples
    ]
    shared = data[1].shared_with(data[0], model.config.branches)
    assert shared == 128
    sums, together = on_data.forward_backward(policy, data, "cross_entropy")
    total = None
    for own, found in zip(data, together, strict=True):
        total, [alone] = on_data.forward_backward(policy, [own], "cross_entropy", total)
        gap = bounds.logprobs(CONFIGS[name], tokens=160)
        np.testing.assert_allclose(found.logprobs, alone.logprobs, atol=gap)
    bounds.close(sums, total, bounds.backward(CONFIGS[name], tokens=160))


@pytest.mark.slow
def test_files_with_all_experts_in_one_tensor_are_read_alike(tmp_path):
    """As published: also beside parts for images, and for guesses of several tokens."""
    model = published("experts", tmp_path / "source")
    huggingface.write_model(tmp_path / "base", model, {}, 1.0, {})
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    for i in range(2):
        at = f"model.layers.{i}.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{at}.{e}.{n}_proj.weight") for e in range(8)])
            for n in ("gate", "up", "down")
        )
        tensors[f"{at}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{at}.down_proj"] = down
    whole = {x.replace("model.", "model.language_model.", 1): y for x, y in tensors.items()}
    others = {name: np.ones(2, np.float32) for name in ("model.visual.x", "mtp.fc.weight")}
    save_file(whole | others, tmp_path / "base" / "model.safetensors")
    loaded = load_base(Model(base=str(tmp_path / "base")), lambda _, x: jnp.asarray(x))
    chex.assert_trees_all_equal(jax.tree.leaves(loaded.params), jax.tree.leaves(model.params))
