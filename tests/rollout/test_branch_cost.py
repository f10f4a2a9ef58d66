"""Branches compute little twice: their prompts are cached, and stand once in a packed row.

``pytest -s tests/rollout/test_branch_cost.py`` prints the figures of ``rollout/README.md``.
"""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest
import small

from marft_jax.cli import configure
from marft_jax.envs.threads import DaemonThreads
from marft_jax.learning import batch
from marft_jax.learning.advantages import groups_with_signal
from marft_jax.learning.credit import make_credit
from marft_jax.rollout.collect import collect
from marft_jax.rollout.rollout import Rollout
from marft_jax.run.metrics import _once
from marft_jax.team.profiles import Profile
from marft_jax.team.team_files import Blueprint
from marft_jax.team.workflows import find_workflow
from marft_jax.types import StepResult

TASKS = 8
TASK, SYSTEM, ACTION = 150, 40, 96  # tokens of a task, a system prompt, an action


class Essay:
    """A task of some length, whose reward is a hash of the answer."""

    def reset(self, seed: int) -> str:
        letters = np.random.default_rng(seed).integers(97, 123, TASK, dtype=np.uint8)
        return letters.tobytes().decode()

    def step(self, turns):
        return StepResult("", float(sum(turns[-1].text.encode()) % 2), True)


def without_a_model(slots: int):
    """The engine, its cache and its schedule, with letters in place of what a model samples."""
    engine = small.engine(slots=slots, chunk=16, context=1024, longest=ACTION)
    letters = np.random.default_rng(0)
    s = SimpleNamespace(
        active_S=np.zeros(slots, bool),
        count_S=np.zeros(slots, int),
        length_S=np.zeros(slots, int),
        ids_SA=np.zeros((slots, ACTION), np.int32),
        logprobs_SA=np.zeros((slots, ACTION), np.float32),
        kept_S=np.full(slots, float(ACTION)),
    )

    def prefill(prompts, **_):
        prompts = jax.device_get(prompts)
        for slot, length in zip(prompts.slots_B, prompts.lengths_B, strict=True):
            if slot < slots:
                s.active_S[slot], s.count_S[slot], s.length_S[slot] = True, 0, length
        return s

    def decode(**_):
        new = s.active_S
        s.ids_SA[new] = letters.integers(97, 123, (new.sum(), ACTION))
        s.length_S[new] += ACTION
        s.count_S[new] = ACTION
        s.active_S = np.zeros(slots, bool)
        return s

    engine._slots, engine._prefill, engine._decode = s, prefill, decode
    return engine


@pytest.mark.parametrize(("branches", "slots"), [(4, 128), (8, 256)])
def test_what_is_computed_is_hardly_more_than_has_to_be(branches, slots):
    """Where the cache has a slot for every turn that is sampled together."""
    profiles = [
        Profile(name, prompt=f"You are the {name}. ".ljust(SYSTEM, "x"), answers=name == "checker")
        for name in small.NAMES
    ]
    team = small.team_of(Blueprint(tuple(profiles)), context=1024, max_new_tokens=ACTION)
    algo = {"name": "grpo", "credit": "siblings", "branches": branches, "branch_at": "every",
            "episodes": TASKS, "group_size": 1}  # fmt: skip
    config = configure({f"algo.{key}": value for key, value in algo.items()})
    engine = without_a_model(slots)
    rollout = Rollout(engine, team, find_workflow("sequential"), Essay, DaemonThreads())
    credit = make_credit(config.algo, team)
    collected = collect(rollout, credit, groups_with_signal, config, 0)
    collected = collected._replace(prefix_cached=engine.reused)
    sampled = [t for e in collected.played for t in e.turns if not t.replayed]
    rows = batch.build(collected.episodes, collected.rewards, team.owners, config.algo, "token",
                       share=True)  # fmt: skip
    once = _once(sampled, collected, rows, team)
    twice = {name: 1 / share for name, share in once.items()}
    print(f"K = {branches}:", {name: round(x, 2) for name, x in twice.items()})
    assert len(sampled) == TASKS * (3 + branches * (3 + 2 + 1))
    assert twice["tokens/once_engine"] < 1.1 and twice["tokens/once_update"] < 1.2
