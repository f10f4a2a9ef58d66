"""The built-in model ``tiny``: a decoder of 1.6 million parameters, made by this file in minutes.

A supervised warm start on synthetic dialogues of a two-agent team makes the weights from nothing,
always from the same seed. ``scripts/build_tiny.py`` did so once and keeps the result beside this
file, in float16, under the hash of the recipe, so that a first start need not wait; for any other
recipe the weights are made on first use and cached. The team can then add up digits, each agent
doing its share,

    3+5+9=?   planner: 3+5=8   solver: 8+9=17

but rarely bothers: the planner often writes ``guess`` instead, which leaves the solver nothing to
work from, and the solver is at times hasty and writes ``maybe 14``. Each decides by its first
token, so reinforcement learning has a policy to shift and nothing to teach.

It also knows the members of other teams: an orchestrator who calls them, debaters who work alone
and then read each other, a verifier.

What makes a small decoder learn this from some 700,000 tokens: a dense stream of bare facts
beside the dialogues, a loss that weighs the digits of results, digits that start with a code of
their value, and Muon (Jordan et al. 2024), which takes far fewer steps than Adam.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file
from safetensors.numpy import save as safetensors_bytes

from marft_jax.envs.base import held_out
from marft_jax.models.decoder import DecoderConfig, rope_tables, rotate
from marft_jax.models.ops.attention import KV, attention

CONFIG = DecoderConfig(
    vocab_size=264,
    d_model=160,
    n_layers=4,
    n_heads=4,
    n_kv_heads=4,
    head_dim=32,
    d_ff=640,
    max_position=1024,
    rope_theta=30.0,  # short texts: every frequency tells neighbours apart
)
PAD, EOS, SYSTEM, USER, ASSISTANT = range(256, 261)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights; its hash names the cached file.

    Attributes:
        careful_planner, careful_solver: how likely each agent starts the careful way.
        shown_planner, shown_solver: how often the data shows the careful way. Weights on the first
            token turn the shares shown into the wanted ones, so few rows are wasted on laziness.
        facts, extra: of the dialogues drawn, streams of bare facts, and other roles and lengths.
        result_weight: of a result's digits in the loss.
        holdout: the tasks that stay unseen, ``env.holdout``'s default.
    """

    version: int = 2
    seed: int = 0
    steps: int = 800
    rows: int = 8
    row_tokens: int = 112
    careful_planner: float = 0.42
    careful_solver: float = 0.78
    shown_planner: float = 0.75
    shown_solver: float = 0.8
    facts: float = 0.2
    fact_tokens: int = 52
    fact_weight: float = 1.0
    late_facts: float = 0.08
    extra: float = 0.5
    extra_from: float = 0.5
    result_weight: float = 4.0
    plan_weight: float = 1.0
    holdout: float = 0.1
    muon_lr: float = 0.02
    adam_lr: float = 4e-3
    warmup: float = 0.1
    momentum: float = 0.9
    newton_schulz: int = 3


RECIPE = Recipe()
SHIPPED = Path(__file__).with_name("tiny.safetensors")
SECONDS = 150


def digest(recipe: Recipe = RECIPE) -> str:
    """Names the weights: a hash of the recipe and the shape."""
    return hashlib.sha256(repr((recipe, CONFIG)).encode()).hexdigest()[:12]


DIGEST = digest()


def tensors() -> Iterator[tuple[str, np.ndarray]]:
    """The weights of ``tiny``, path by path: shipped, cached, or else built and cached now."""
    file = cache_file()
    if shipped := next((f for f in (SHIPPED, file) if _recipe_of(f) == DIGEST), None):
        weights = load_file(shipped)
    else:
        print(
            f"building the tiny model (once, about {SECONDS} s on 2 cores) ...",
            file=sys.stderr,
            flush=True,
        )
        weights = {path: x.astype(np.float16) for path, x in build()[0].items()}  # as it is kept
        save(weights, file)
    yield from sorted(weights.items())


def cache_file() -> Path:
    """Where the weights are kept: ``$XDG_CACHE_HOME/marft_jax/tiny-<digest>.safetensors``."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "marft_jax" / f"tiny-{DIGEST}.safetensors"


def _recipe_of(file: Path) -> str | None:
    """The digest of the recipe that made a weight file; None where there is no readable one."""
    try:
        with safe_open(file, framework="numpy") as opened:
            return (opened.metadata() or {}).get("recipe")
    except (OSError, SafetensorError):
        return None


def save(weights: dict[str, np.ndarray], file: Path) -> None:
    """Writes float16, whole or not at all; a cache that cannot be written costs only time."""
    halves = {path: x.astype(np.float16) for path, x in weights.items()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as part:
            part.write(safetensors_bytes(halves, metadata={"recipe": DIGEST}))
        os.chmod(part.name, 0o644)
        os.replace(part.name, file)
    except OSError as error:
        print(f"cannot cache the tiny model in {file.parent}: {error}", file=sys.stderr)


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


# Synthetic dialogues


class Dialogue(NamedTuple):
    """Token ids, and the weight of each in the loss."""

    ids: list[int]
    weights: list[float]


class Batch(NamedTuple):
    """Dialogues packed into rows; segment 0 is padding."""

    tokens_BT: np.ndarray
    segments_BT: np.ndarray
    positions_BT: np.ndarray
    weights_BT: np.ndarray


def chain(numbers: Sequence[int]) -> list[str]:
    """The sum as facts, one after the other.

    >>> chain([3, 5, 9])
    ['3+5=8', '8+9=17']
    """
    totals = np.cumsum(numbers)
    return [f"{a}+{b}={c}" for a, b, c in zip(totals, numbers[1:], totals[1:], strict=False)]


def plan(numbers: Sequence[int]) -> str:
    """What a careful planner writes: all facts but the last, or the number it starts from."""
    return ",".join(chain(numbers)[:-1]) or str(numbers[0])


class Author:
    """Writes dialogues about problems that are not held out."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.rng = np.random.default_rng(recipe.seed)

    def draw(self, progress: float) -> Dialogue:
        """A dialogue of the mixture that the recipe describes, ``progress`` from 0 to 1."""
        early = progress < self.recipe.extra_from
        if self.rng.random() < (self.recipe.facts if early else self.recipe.late_facts):
            return self.facts()
        if not early and self.rng.random() < self.recipe.extra:
            return self.extra()
        return self.planner(3) if self.rng.random() < 0.4 else self.solver(3)

    def planner(self, terms: int, past: str = "") -> Dialogue:
        numbers, task = self.problem(terms)
        share, shown = self.recipe.careful_planner, self.recipe.shown_planner
        if self.rng.random() < shown:
            return self.dialogue("plan", [task + past], plan(numbers), share / shown)
        return self.dialogue("plan", [task + past], "guess", (1 - share) / (1 - shown))

    def solver(self, terms: int, past: str = "") -> Dialogue:
        numbers, task = self.problem(terms)
        share, shown = self.recipe.careful_solver, self.recipe.shown_solver
        shows = [f"{task}{past}\nplanner: "]
        if self.rng.random() < 0.1:
            return self.dialogue("solve", [shows[0] + "guess"], self.hasty(terms))
        shows.append(plan(numbers))
        if self.rng.random() < shown:
            return self.dialogue("solve", shows, chain(numbers)[-1], share / shown)
        return self.dialogue("solve", shows, self.hasty(terms), (1 - share) / (1 - shown))

    def extra(self) -> Dialogue:
        """Other lengths, a second step after the judge's verdict, and roles of other teams."""
        kind = self.rng.random()
        if kind < 0.13:
            return self.planner(4)
        if kind < 0.3:
            return self.solver(4)
        if kind < 0.35:
            return self.planner(2) if self.rng.random() < 0.5 else self.solver(2)
        if kind < 0.45:
            return self.planner(3, self.failed_step())
        if kind < 0.55:
            return self.solver(3, self.failed_step())
        if kind < 0.65:
            return self.lead()
        if kind < 0.9:
            return self.argue()
        numbers, task = self.problem(3)
        last = chain(numbers)[-1]
        seen = last if self.rng.random() < 0.6 else self.hasty(3)
        role = ("verify", "reflect")[self.rng.integers(2)]
        return self.dialogue(role, [f"{task}\nplanner: {plan(numbers)}\nsolver: {seen}"], last)

    def lead(self) -> Dialogue:
        """An orchestrator, who often ends the episode too early."""
        numbers, task = self.problem(3)
        planned = "guess" if self.rng.random() < 0.5 else plan(numbers)
        solved = self.hasty(3) if planned == "guess" else chain(numbers)[-1]
        shown = [task, f"{task}\nplanner: {planned}"]
        shown.append(f"{shown[1]}\nsolver: {solved}")
        said = int(self.rng.integers(3))
        call = ("<call>planner</call>", "<call>solver</call>", "<done/>")[said]
        lazy = "<call>planner</call>" if said == 2 else "<done/>"
        return self.dialogue("lead", [shown[said]], call if self.rng.random() < 0.6 else lazy)

    def argue(self) -> Dialogue:
        """A debater, who works alone at first and then sees what all said; half of them guess."""
        numbers, task = self.problem(3)
        whole = ",".join(chain(numbers))
        if self.rng.random() < 0.5:
            for name in ("ann", "bob", "cy"):
                task += f"\n{name}: {whole if self.rng.random() < 0.6 else self.hasty(3)}"
        share, shown = 0.5, 0.8
        if self.rng.random() < shown:
            return self.dialogue("argue", [task], whole, share / shown)
        return self.dialogue("argue", [task], self.hasty(3), (1 - share) / (1 - shown))

    def facts(self) -> Dialogue:
        """Sums that follow on nothing: the densest way to learn addition. Only results count."""
        ids, weights = [ASSISTANT], [0.0]
        while True:
            a, b = (
                self.rng.integers(0, 19 if self.rng.random() < 0.8 else 28),
                self.rng.integers(10),
            )
            sides = f"{a}+{b}=", f"{a + b},"
            if len(ids) + len("".join(sides)) > self.recipe.fact_tokens:
                return Dialogue(ids, weights)
            for text, weight in zip(sides, (0.0, self.recipe.fact_weight), strict=True):
                ids += text.encode()
                weights += [weight] * len(text)

    def problem(self, terms: int) -> tuple[list[int], str]:
        while True:
            numbers = self.rng.integers(0, 10, terms).tolist()
            task = "+".join(map(str, numbers)) + "=?"
            if not held_out(task, self.recipe.holdout):
                return numbers, task

    def hasty(self, terms: int) -> str:
        return f"maybe {self.rng.integers(9 * terms + 1)}"

    def failed_step(self) -> str:
        wrong, _ = self.problem(3)
        planned = "guess" if self.rng.random() < 0.6 else plan(wrong)
        solved = self.hasty(3) if self.rng.random() < 0.6 else chain(wrong)[-1]
        return f"\nplanner: {planned}\nsolver: {solved}\njudge: The answer is incorrect."

    def dialogue(self, system: str, shows: list[str], action: str, first: float = 1.0) -> Dialogue:
        """What an agent is shown, and its action; ``first`` weighs the action's first token.

        Of two texts shown, the second follows from the first, so it is learned as well.
        """
        ids = [SYSTEM, *system.encode()] if system else []
        ids += [USER, *shows[0].encode()]
        weights = [0.0] * len(ids)
        for text in shows[1:]:
            ids += text.encode()
            weights += [self.recipe.plan_weight] * len(text)
        ids += [ASSISTANT, *action.encode(), EOS]
        weights += [0.0, first, *self._action_weights(action)[1:], 1.0]
        return Dialogue(ids, weights)

    def _action_weights(self, action: str) -> list[float]:
        result, weights = False, []
        for character in action:
            result = character == "=" or (result and character != ",")
            digit = result and character != "="
            weights.append(self.recipe.result_weight if digit else 1.0)
        return weights


def batches(recipe: Recipe) -> Batch:
    """All batches of a warm start, ``[steps, rows, tokens]``.

    A row takes the longest of the waiting dialogues that still fits, until none does.
    """
    author, rows = Author(recipe), recipe.steps * recipe.rows
    waiting = [author.draw(0.0) for _ in range(16)]
    shape = (rows, recipe.row_tokens)
    fills = ((PAD, np.int32), (0, np.int32), (0, np.int32), (0, np.float32))
    batch = Batch(*(np.full(shape, fill, kind) for fill, kind in fills))
    for row in range(rows):
        start = segment = 0
        while fitting := [d for d in waiting if start + len(d.ids) <= recipe.row_tokens]:
            chosen = max(fitting, key=lambda d: len(d.ids))
            waiting[waiting.index(chosen)] = author.draw(row / rows)
            segment, stop = segment + 1, start + len(chosen.ids)
            values = (chosen.ids, segment, np.arange(stop - start), chosen.weights)
            for array, value in zip(batch, values, strict=True):
                array[row, start:stop] = value
            start = stop
    return Batch(*(x.reshape(recipe.steps, recipe.rows, -1) for x in batch))


# The warm start


def initial(seed: int) -> dict[str, np.ndarray]:
    """Random weights; the digits' input and output vectors carry a code of their value."""
    rng = np.random.default_rng(seed)
    c = CONFIG

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
        for target in ("q", "k", "v", "o", "gate", "up", "down"):
            d_in, d_out = c.target_shape(target)
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
    blocks = range(CONFIG.n_layers)
    return ["final_norm/scale"] + [
        f"layers/{i}/{n}/scale" for i in blocks for n in ("attn_norm", "mlp_norm")
    ]


def logits(params: dict[str, jax.Array], batch: Batch):
    """The decoder's float32 logits ``[rows * tokens, V]``, laid out for training on a CPU.

    The same function as ``decoder.forward`` and ``decoder.project``. Rows and tokens are one axis:
    with two, the gradient of every matrix transposes its operands first, which takes longer than
    the product.
    """
    c, (b, t) = CONFIG, batch.tokens_BT.shape
    mask_BTT = jnp.tril(batch.segments_BT[:, :, None] == batch.segments_BT[:, None, :])
    rope = rope_tables(c, jnp.asarray(batch.positions_BT))

    def heads(y):
        return y.reshape(b, t, c.n_heads, c.head_dim).transpose(0, 2, 1, 3)

    x = params["embed/embedding"][batch.tokens_BT.reshape(-1)]
    for i in range(c.n_layers):
        w = {
            n: params[f"layers/{i}/{n}/kernel"] for n in ("q", "k", "v", "o", "gate", "up", "down")
        }
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
    return x * jax.lax.rsqrt(mean + CONFIG.norm_eps) * scale[None]


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
