"""Plan-Path: lead ``A`` to ``G`` through a grid with walls, in several steps (arXiv 2510.11062).

    A#.
    ..G    the moves DRR arrive, and no shorter ones do
    #..

A step is a line of moves (U, D, L, R), of which the first few count. Each costs 0.01, one into a
wall or off the grid 0.10 more and stays; G earns 1, and 0.5 more by as few moves as can be:

    python -m marft_jax.train --env.name configs.studies.plan_path:PlanPath
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from marft_jax.envs.base import EVAL_SEEDS, Member, held_out
from marft_jax.types import StepResult, Turn

_WAYS = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
_WALLS, _HOLDOUT = 0.22, 0.2
_STEP, _INVALID, _GOAL, _OPTIMAL = -0.01, -0.10, 1.0, 0.5
Cell = tuple[int, int]


class PlanPath:
    """A grid of ``size`` x ``size``, a pseudo-random one for each seed.

    Args:
        moves: that count in a step.
        steps: after so many the episode is over.
        letters: of up, down, left, right; the built-in model writes digits with more ease.
        simulator: an agent that writes ``?`` and moves is shown where they lead, and goes on.
    """

    def __init__(
        self,
        size: int = 3,
        moves: int = 3,
        steps: int = 3,
        letters: str = "UDLR",
        simulator: bool = False,
    ) -> None:
        self._size, self._moves, self._steps = size, moves, steps
        self._letters = dict(zip(_WAYS, letters, strict=True))
        self.tool = self._simulate if simulator else None

    def reset(self, seed: int) -> str:
        self._walls, self._at, self._goal = _draw(seed, self._size)
        self._best, self._moved, self._left = len(self._shortest()), 0, self._steps
        return self._shown()

    def step(self, turns: Sequence[Turn]) -> StepResult:
        text = next((turn.text for turn in reversed(turns) if turn.answers), "")
        paid = [self._move(way) for way in self._read(text)] or [_INVALID]
        self._left -= 1
        there = self._at == self._goal
        reward = sum(paid) + there * (_GOAL + _OPTIMAL * (self._moved == self._best))
        info = {"moves": text[:40], "shortest": self._best, "arrived": there}
        return StepResult(self._shown(), reward, there or not self._left, info)

    def demonstrate(self, agents: Sequence[Member]) -> list[dict[str, object]]:
        """A shortest path by everyone, step by step; with a simulator the first agent tries it."""
        path = "".join(self._letters[way] for way in self._shortest())
        turns = list[dict[str, object]]()
        for first in range(0, len(path), self._moves):
            part = path[first : first + self._moves]
            if self.tool is not None:
                turns.append({"agent": agents[0].name, "text": f"?{part}", "tool": True})
            turns += [{"agent": agent.name, "text": part} for agent in agents]
        return turns

    def _move(self, way: str) -> float:
        """Makes a move, and returns what it earns; none after the last."""
        if self._at == self._goal:
            return 0.0
        self._moved += 1
        at = _next(self._at, way)
        if not self._is_free(at):
            return _STEP + _INVALID
        self._at = at
        return _STEP

    def _read(self, text: str) -> list[str]:
        """The moves that count: those of the last word that is moves and nothing else."""
        ways = {letter: way for way, letter in self._letters.items()}
        words = re.findall(rf"\b[{''.join(ways)}]+\b", text.upper())
        return [ways[letter] for letter in words[-1][: self._moves]] if words else []

    def _is_free(self, cell: Cell) -> bool:
        return cell not in self._walls and all(0 <= x < self._size for x in cell)

    def _simulate(self, turn: Turn) -> str | None:
        if not turn.text.startswith("?"):
            return None
        at = self._at
        for way in self._read(turn.text):
            if not self._is_free(_next(at, way)):
                return "wall"
            at = _next(at, way)
        return "goal" if at == self._goal else "free"

    def _shortest(self) -> str:
        return _path(self._walls, self._at, self._goal, self._size) or ""

    def _shown(self) -> str:
        marks = {**dict.fromkeys(self._walls, "#"), self._goal: "G", self._at: "A"}
        rows = ["".join(marks.get((i, j), ".") for j in range(self._size))
                for i in range(self._size)]  # fmt: skip
        return "\n".join(rows)


class Simulated(PlanPath):
    """Plan-Path with its simulator as a tool."""

    def __init__(
        self, size: int = 3, moves: int = 3, steps: int = 3, letters: str = "UDLR"
    ) -> None:
        super().__init__(size, moves, steps, letters, simulator=True)


def _next(cell: Cell, way: str) -> Cell:
    down, right = _WAYS[way]
    return cell[0] + down, cell[1] + right


def _path(walls: frozenset[Cell], start: Cell, goal: Cell, size: int) -> str | None:
    """A shortest path, the first in the order UDLR of the last move; None where there is none."""
    paths, found = {start: ""}, [start]
    for cell in found:
        for way in _WAYS:
            at = _next(cell, way)
            if at not in walls and at not in paths and all(0 <= x < size for x in at):
                paths[at] = paths[cell] + way
                found.append(at)
    return paths.get(goal)


def _draw(seed: int, size: int) -> tuple[frozenset[Cell], Cell, Cell]:
    """Walls, start and goal, redrawn until there is a path and the grid is on its side."""
    draw = random.Random(f"plan path {seed} {size}")
    cells = [(i, j) for i in range(size) for j in range(size)]
    while True:
        start, goal = draw.sample(cells, 2)
        walls = frozenset(c for c in cells if draw.random() < _WALLS and c not in (start, goal))
        key = f"{sorted(walls)} {start} {goal}"
        if held_out(key, _HOLDOUT) == (seed >= EVAL_SEEDS) and _path(walls, start, goal, size):
            return walls, start, goal
