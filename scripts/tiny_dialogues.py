"""Texts for the built-in model: dialogues of teams that add up digits, written here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from marft_jax.envs.base import held_out

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
    """Writes as a careful planner: all facts but the last, or the number it starts from."""
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
        """An agent's prompt and its action; ``first`` weighs the action's first token.

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
