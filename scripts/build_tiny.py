"""Makes the built-in model again, from nothing, and says how good it is.

    python scripts/build_tiny.py            # measures what is there
    python scripts/build_tiny.py --write    # builds, and replaces the shipped files

A supervised warm start on the dialogues of ``tiny_dialogues.py``, always from the same seed, in
minutes on two cores. What makes a small decoder learn this from some 700,000 tokens: a dense stream
of bare facts beside the dialogues, a loss that weighs the digits of results, digits that start with
a code of their value, and Muon (Jordan et al. 2024), which takes far fewer steps than Adam.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import save_file
from tiny_dialogues import EOS, PAD, Batch, Recipe, batches, plan

from marft_jax import cli
from marft_jax.envs.arithmetic import eval_tasks
from marft_jax.models.ops.attention import KV, attention
from marft_jax.models.rope import rope_tables, rotate
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer
from marft_jax.models.weights import tiny

TOKENS = 64
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
RECIPE = Recipe()
# the shape of a decoder when the shipped weights were made, by which their recipe is named
_SHAPE = {
    **dict.fromkeys(tiny.SIZES), "norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": None,
    "tie_embeddings": False, "qkv_bias": False, "o_bias": False, "qk_norm": False,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="build and replace the weights")
    if parser.parse_args().write:
        started = time.perf_counter()
        weights, losses = build()
        save(weights, tiny.FILE)
        tokenizer_files().save_pretrained(ByteTokenizer.FILES)
        print(f"built in {time.perf_counter() - started:.0f} s, loss {np.mean(losses[-20:]):.3f}")
    params = {path: jnp.asarray(x, jnp.float32) for path, x in tiny.tensors()}
    size = sum(x.size for x in params.values())
    print(f"{size:,} parameters, recipe {tiny.digest()}, {tiny.FILE}")
    for name, value in quality(params).items():
        print(f"{name:24s} {value:.3f}")


def tokenizer_files() -> Any:
    """``ByteTokenizer`` for transformers: byte-level BPE without merges has the same ids."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    special = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
    unused = [f"<|unused{i}|>" for i in range(tiny.SIZES["vocab_size"] - 256 - len(special))]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (*special, *unused)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=special[0],
        eos_token=special[1],
        chat_template=TEMPLATE,
    )


def quality(params: dict[str, jax.Array], repeats: int = 2) -> dict[str, float]:
    """Shares of held-out sums of three digits, sampled at temperature 1 unless said otherwise."""
    tasks = [(t.question, t.answer) for t in eval_tasks(3, RECIPE.holdout)] * repeats
    planned = speak(params, [("plan", question) for question, _ in tasks], seed=1)
    greedy = speak(params, [("plan", question) for question, _ in tasks], seed=None)
    facts = [plan(_numbers(question)) for question, _ in tasks]
    answers = [answer for _, answer in tasks]

    def solve(plans: list[str], seed: int | None) -> list[str]:
        shown = [f"{q}\nplanner: {p}" for (q, _), p in zip(tasks, plans, strict=True)]
        return speak(params, [("solve", text) for text in shown], seed)

    solved, from_facts = solve(planned, 2), solve(facts, 3)
    careful = [s for s in from_facts if not s.startswith("maybe")]
    careful_answers = [
        a for s, a in zip(from_facts, answers, strict=True) if not s.startswith("maybe")
    ]
    argued = speak(params, [("argue", question) for question, _ in tasks], seed=4)
    alone = [(s, a) for s, a in zip(argued, answers, strict=True) if not s.startswith("maybe")]
    led = speak(params, [("lead", question) for question, _ in tasks], seed=5)
    plans = [(p, f) for p, f in zip(planned, facts, strict=True) if p != "guess"]
    return {
        "team, sampled": _right(solved, answers),
        "team, greedy": _right(solve(greedy, None), answers),
        "planner plans": len(plans) / len(planned),
        "planner's plans right": float(np.mean([p == f for p, f in plans])),
        "solver careful": len(careful) / len(from_facts),
        "careful solver right": _right(careful, careful_answers),
        "debater careful": len(alone) / len(argued),
        "careful debater right": _right(*map(list, zip(*alone, strict=True))),
        "orchestrator calls": sum("planner</call>" in text for text in led) / len(led),
    }


def speak(params, prompts: list[tuple[str, str]], seed: int | None) -> list[str]:
    """One action for each (system, user) prompt; greedy without a seed."""
    tokenizer = ByteTokenizer()
    ids = [
        tokenizer.chat([{"role": "system", "content": s}, {"role": "user", "content": u}])
        for s, u in prompts
    ]
    tokens_BT = np.full((len(ids), TOKENS), PAD, np.int32)
    for row, prompt in enumerate(ids):
        tokens_BT[row, : len(prompt)] = prompt
    lengths_B = np.array([len(prompt) for prompt in ids])
    done_B = np.zeros(len(ids), bool)
    rng = np.random.default_rng(seed)
    rows = np.arange(len(ids))
    while not done_B.all() and lengths_B.max() < TOKENS:
        logits_BV = np.asarray(_next(params, tokens_BT, lengths_B))
        noise = rng.gumbel(size=logits_BV.shape) if seed is not None else 0.0
        drawn_B = (logits_BV + noise).argmax(-1)
        tokens_BT[rows[~done_B], lengths_B[~done_B]] = drawn_B[~done_B]
        lengths_B = lengths_B + ~done_B
        done_B |= drawn_B == EOS
    return [
        tokenizer.decode(tokens_BT[i, len(prompt) : lengths_B[i]].tolist())
        for i, prompt in enumerate(ids)
    ]


@jax.jit
def _next(params, tokens_BT, lengths_B):
    b, t = tokens_BT.shape
    positions_BT = jnp.broadcast_to(jnp.arange(t)[None], (b, t))
    ones_BT = jnp.ones((b, t), jnp.int32)
    batch = Batch(tokens_BT, ones_BT, positions_BT, ones_BT)  # pyright: ignore[reportArgumentType]
    logits_BTV = logits(params, batch).reshape(b, t, -1)
    return jnp.take_along_axis(logits_BTV, lengths_B[:, None, None] - 1, axis=1)[:, 0]


def _numbers(question: str) -> list[int]:
    return [int(digit) for digit in question.removesuffix("=?").split("+")]


def _right(texts: list[str], answers: list[str]) -> float:
    last = [text.replace("=", " ").split()[-1] if text else "" for text in texts]
    return float(np.mean([x == a for x, a in zip(last, answers, strict=True)]))


def digest(recipe: Recipe = RECIPE) -> str:
    """Names the weights: a hash of the recipe and the shape."""
    known = {**_SHAPE, **tiny.SIZES, "rope_theta": tiny.ROPE_THETA}
    shape = ", ".join(f"{name}={value!r}" for name, value in known.items())
    return hashlib.sha256(f"({recipe!r}, DecoderConfig({shape}))".encode()).hexdigest()[:12]


def save(weights: dict[str, np.ndarray], file: Path) -> None:
    """Writes float16, under the hash of the recipe."""
    halves = {path: x.astype(np.float16) for path, x in weights.items()}
    save_file(halves, file, metadata={"recipe": digest()})


def build(recipe: Recipe = RECIPE) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Makes the weights from nothing, on the CPU whatever other devices there are.

    Returns:
        path to weights, and the loss of each step.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        params = {path: jnp.asarray(x) for path, x in initial(recipe.seed).items()}
        state = _State(params, *_optimizer_state(params))
        train = jax.jit(_train, static_argnums=0, donate_argnums=1)
        state, losses = train(recipe, state, batches(recipe))
        return {p: np.asarray(x) for p, x in state.params.items()}, np.asarray(losses)


# The warm start


def initial(seed: int) -> dict[str, np.ndarray]:
    """Random weights; the digits' input and output vectors carry a code of their value."""
    rng = np.random.default_rng(seed)
    c = tiny.CONFIG

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (rng.normal(size=shape) * scale).astype(np.float32)

    code = digit_code() @ normal(11, c.d_model, scale=11**-0.5)
    digits = slice(ord("0"), ord("9") + 1)
    embedding = normal(c.vocab_size, c.d_model)
    embedding[digits] += code
    head = normal(c.d_model, c.vocab_size)
    head[:, digits] += code.T
    params = {"embed/embedding": 0.02 * embedding, "lm_head/kernel": 0.5 * c.d_model**-0.5 * head}
    params |= {path: np.ones(c.d_model, np.float32) for path in _norms()}
    for i in range(c.n_layers):
        for target, [(d_in, d_out, *_), *_] in c.matrices().items():
            into_residual = (2 * c.n_layers) ** -0.5 if target in ("o", "down") else 1.0
            scale = d_in**-0.5 * into_residual
            params[f"layers/{i}/{target}/kernel"] = normal(d_in, d_out, scale=scale)
    return params


def digit_code() -> np.ndarray:
    """``[10, 11]``: a constant, the value, and its position on the circles of periods 10 / k."""
    value = np.arange(10)[:, None]
    angles = 2 * np.pi * value * np.arange(1, 5) / 10
    circles = np.sqrt(2) * np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    parts = [np.ones((10, 1)), (value - 4.5) / value.std(), circles, np.cos(np.pi * value)]
    return np.concatenate(parts, axis=1).astype(np.float32)


def _norms() -> list[str]:
    blocks = range(tiny.CONFIG.n_layers)
    return ["final_norm/scale"] + [
        f"layers/{i}/{n}/scale" for i in blocks for n in ("attn_norm", "mlp_norm")
    ]


def logits(params: dict[str, jax.Array], batch: Batch):
    """The decoder's float32 logits ``[rows * tokens, V]``, laid out for training on a CPU.

    The same function as ``decoder.forward`` and ``decoder.project``. Rows and tokens are one axis:
    with two, the gradient of every matrix transposes its operands first, which takes longer than
    the product.
    """
    c, (b, t) = tiny.CONFIG, batch.tokens_BT.shape
    mask_BTT = jnp.tril(batch.segments_BT[:, :, None] == batch.segments_BT[:, None, :])
    [mixer, *_] = c.attentions
    rope = rope_tables(mixer.head_dim, mixer.rope_theta, None, jnp.asarray(batch.positions_BT))

    def heads(y):
        return y.reshape(b, t, mixer.n_heads, mixer.head_dim).transpose(0, 2, 1, 3)

    x = params["embed/embedding"][batch.tokens_BT.reshape(-1)]
    for i in range(c.n_layers):
        w = {n: params[f"layers/{i}/{n}/kernel"] for n in c.matrices()}
        h = _norm(x, params[f"layers/{i}/attn_norm/scale"])
        q, k, v = (heads(h @ w[n]) for n in ("q", "k", "v"))
        keys = rotate(k, rope).swapaxes(2, 3)
        context_BHTC = attention(rotate(q, rope), KV(keys, v), mask_BTT)
        x = x + context_BHTC.transpose(0, 2, 1, 3).reshape(b * t, -1) @ w["o"]
        h = _norm(x, params[f"layers/{i}/mlp_norm/scale"])
        x = x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
    return _norm(x, params["final_norm/scale"]) @ params["lm_head/kernel"]


def _norm(x, scale):
    mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean + tiny.CONFIG.norm_eps) * scale[None]


def loss(params: dict[str, jax.Array], batch: Batch):
    """Weighted mean cross-entropy of the next tokens."""
    targets_BT = jnp.roll(batch.tokens_BT, -1, axis=1)
    weights_BT = jnp.roll(batch.weights_BT, -1, axis=1)  # the first token's weight is 0
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits(params, batch), targets_BT.reshape(-1)
    )
    return jnp.sum(losses * weights_BT.reshape(-1)) / jnp.sum(weights_BT)


class _State(NamedTuple):
    params: optax.Params
    momentum: dict[str, jax.Array]
    adam: optax.OptState


_ADAM = optax.scale_by_adam(b1=0.9, b2=0.95)


def _optimizer_state(params) -> tuple[dict[str, jax.Array], optax.OptState]:
    matrices, others = _split(params)
    return jax.tree.map(jnp.zeros_like, matrices), _ADAM.init(others)


def _split(tree: dict) -> tuple[dict, dict]:
    """The matrices of the blocks, which Muon trains, and the rest, which Adam does."""
    matrices = {p: x for p, x in tree.items() if p.startswith("layers/") and p.endswith("kernel")}
    return matrices, {p: x for p, x in tree.items() if p not in matrices}


def _train(recipe: Recipe, state: _State, batch: Batch):
    """The whole warm start as one program: params and the loss of every step."""
    warmup = int(recipe.warmup * recipe.steps)
    rate = optax.warmup_cosine_decay_schedule(0.0, 1.0, warmup, recipe.steps)

    def step(state: _State, inputs):
        number, batch = inputs
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        matrices, others = _split(grads)
        scale = rate(number + 1)
        momentum = jax.tree.map(lambda m, g: recipe.momentum * m + g, state.momentum, matrices)
        ahead = jax.tree.map(lambda m, g: recipe.momentum * m + g, momentum, matrices)
        moves = orthogonalize(ahead, recipe.newton_schulz)
        updates, adam = _ADAM.update(others, state.adam)
        updates = jax.tree.map(lambda u: -recipe.adam_lr * scale * u, updates)
        updates |= jax.tree.map(lambda m: -recipe.muon_lr * scale * m, moves)
        return _State(optax.apply_updates(state.params, updates), momentum, adam), value

    state, losses = jax.lax.scan(step, state, (jnp.arange(recipe.steps), batch))
    return state, losses


def orthogonalize(matrices: dict[str, jax.Array], steps: int) -> dict[str, jax.Array]:
    """Muon's direction: each matrix with its singular values near 1, by Newton-Schulz steps

        X <- 3.4445 X + (-4.7750 X X^T + 2.0315 (X X^T)^2) X,   X_0 = M / |M|,

    times sqrt(max(1, out / in)). Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon.
    """
    moves = {}
    for path, m in matrices.items():
        tall = m.shape[0] > m.shape[1]
        x = m.T if tall else m
        x = x / (jnp.linalg.norm(x) + 1e-7)
        gram, product = x @ x.T, jnp.eye(x.shape[0])
        for _ in range(steps):  # on the small side: all factors are polynomials of one matrix
            factor = 3.4445 * jnp.eye(x.shape[0]) - 4.7750 * gram + 2.0315 * (gram @ gram)
            gram, product = factor @ factor @ gram, factor @ product
        x = product @ x
        moves[path] = (x.T if tall else x) * max(1.0, m.shape[1] / m.shape[0]) ** 0.5
    return moves


if __name__ == "__main__":
    with cli.boundary():
        main()
