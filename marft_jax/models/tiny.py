"""The built-in model ``tiny``: a decoder of a million parameters, made here, in seconds, on CPU.

Nothing is downloaded. On first use a supervised warm start on synthetic dialogues of a two-agent
team makes the weights, always the same ones, and caches them. Afterwards the team can add up
digits, each agent doing its share,

    3+5+9=?   planner: 3+5=8   solver: 8+9=17

but rarely bothers: the planner often writes ``guess`` instead, which leaves the solver nothing to
work from, and the solver is at times hasty and writes ``maybe 14``. Each decides by its first
token, so reinforcement learning has a policy to shift and nothing to teach.

What makes a million parameters learn this from some 150,000 tokens: a dense stream of bare facts
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

from marft_jax.envs.base import held_out
from marft_jax.models.decoder import KV, DecoderConfig, attention, rope_tables, rotate

CONFIG = DecoderConfig(
    vocab_size=264,
    d_model=128,
    n_layers=3,
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

    version: int = 1
    seed: int = 0
    steps: int = 180
    rows: int = 8
    row_tokens: int = 104
    careful_planner: float = 0.42
    careful_solver: float = 0.78
    shown_planner: float = 0.75
    shown_solver: float = 0.8
    facts: float = 0.2
    fact_tokens: int = 52
    extra: float = 0.25
    result_weight: float = 4.0
    plan_weight: float = 1.0
    holdout: float = 0.1
    muon_lr: float = 0.02
    adam_lr: float = 4e-3
    warmup: float = 0.1
    momentum: float = 0.9
    newton_schulz: int = 3


RECIPE = Recipe()
SECONDS = 18


def digest(recipe: Recipe = RECIPE) -> str:
    """Names the weights: a hash of the recipe and the shape."""
    return hashlib.sha256(repr((recipe, CONFIG)).encode()).hexdigest()[:12]


DIGEST = digest()


def tensors() -> Iterator[tuple[str, np.ndarray]]:
    """The weights of ``tiny``, path by path, float32; built and cached on first use."""
    file = cache_file()
    if file.exists():
        from safetensors.numpy import load_file

        weights = load_file(file)
    else:
        print(
            f"building the tiny model (once, about {SECONDS} s on 2 cores) ...",
            file=sys.stderr,
            flush=True,
        )
        weights = build()[0]
        _save(weights, file)
    yield from sorted(weights.items())


def cache_file() -> Path:
    """Where the weights are kept: ``$XDG_CACHE_HOME/marft_jax/tiny-<digest>.safetensors``."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "marft_jax" / f"tiny-{DIGEST}.safetensors"


def _save(weights: dict[str, np.ndarray], file: Path) -> None:
    """Writes whole or not at all; a cache that cannot be written costs only time."""
    from safetensors.numpy import save

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as part:
            part.write(save(weights))
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
        params, losses = train(recipe, state, batches(recipe))
        return {path: np.asarray(x) for path, x in params.items()}, np.asarray(losses)


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

    def draw(self) -> Dialogue:
        """A dialogue of the mixture that the recipe describes."""
        kind = self.rng.random()
        if kind < self.recipe.facts:
            return self.facts()
        if kind < self.recipe.facts + self.recipe.extra:
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
        """Other lengths, a second step after the judge's verdict, and roles of larger teams."""
        kind = self.rng.random()
        if kind < 0.25:
            return self.planner(4)
        if kind < 0.55:
            return self.solver(4)
        if kind < 0.6:
            return self.planner(2) if self.rng.random() < 0.5 else self.solver(2)
        if kind < 0.65:
            return self.planner(3, self.failed_step())
        if kind < 0.75:
            return self.solver(3, self.failed_step())
        numbers, task = self.problem(int(self.rng.integers(2, 5)) if kind < 0.87 else 3)
        if kind < 0.87:
            return self.dialogue("", [task], ",".join(chain(numbers)))
        last = chain(numbers)[-1]
        seen = last if self.rng.random() < 0.6 else self.hasty(3)
        role = ("verify", "reflect")[self.rng.integers(2)]
        return self.dialogue(role, [f"{task}\nplanner: {plan(numbers)}\nsolver: {seen}"], last)

    def facts(self) -> Dialogue:
        """Sums that follow on nothing: the densest way to learn addition. Only results count."""
        ids, weights = [ASSISTANT], [0.0]
        while True:
            a, b = self.rng.integers(0, 19 if self.rng.random() < 0.8 else 28), self.rng.integers(10)
            sides = f"{a}+{b}=", f"{a + b},"
            if len(ids) + len("".join(sides)) > self.recipe.fact_tokens:
                return Dialogue(ids, weights)
            for text, weight in zip(sides, (0.0, self.recipe.result_weight), strict=True):
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
    """All batches of a warm start, ``[steps, rows, tokens]``, in an order of their own."""
    author, rows = Author(recipe), recipe.steps * recipe.rows
    shape = (rows, recipe.row_tokens)
    batch = Batch(*(np.full(shape, fill, kind) for fill, kind in _EMPTY))
    for row in range(rows):
        start, segment = 0, 0
        while True:
            dialogue = author.draw()
            stop = start + len(dialogue.ids)
            if stop > recipe.row_tokens:
                break
            segment += 1
            for array, values in zip(
                batch, (dialogue.ids, segment, np.arange(stop - start), dialogue.weights), strict=True
            ):
                array[row, start:stop] = values
            start = stop
    return Batch(*(x.reshape(recipe.steps, recipe.rows, -1) for x in batch))


_EMPTY = ((PAD, np.int32), (0, np.int32), (0, np.int32), (0, np.float32))
