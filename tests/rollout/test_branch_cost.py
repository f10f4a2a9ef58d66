"""Little is computed twice: prompts of branches are cached, and stand once in a packed row.

``pytest -s -n 0 tests/rollout/test_branch_cost.py`` prints the figures of ``rollout/README.md``.
"""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest
import small

from marft_jax.background import DaemonThreads
from marft_jax.cli import configure
from marft_jax.learning import batch
from marft_jax.learning.credit import groups_with_signal, make_credit
from marft_jax.parallel import compilation
from marft_jax.rollout.collect import collect
from marft_jax.rollout.rollout import Rollout
from marft_jax.run.metrics import _once
from marft_jax.team.profiles import Profile
from marft_jax.team.prompts import Team
from marft_jax.team.team_files import Blueprint
from marft_jax.team.workflows import find_workflow
from marft_jax.types import StepResult, Turn

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
        active_S=np.zeros(slots, bool), count_S=np.zeros(slots, int),
        length_S=np.zeros(slots, int), kept_S=np.full(slots, float(ACTION)),
        ids_SA=np.zeros((slots, ACTION), np.int32),
        logprobs_SA=np.zeros((slots, ACTION), np.float32),
    )  # fmt: skip

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


def twice(slots: int, team: Team, **algo) -> tuple[dict[str, float], list[Turn]]:
    """Tokens computed for each that had to be, in a step of grpo, and the sampled turns."""
    config = configure({f"algo.{key}": value for key, value in {"name": "grpo", **algo}.items()})
    engine = without_a_model(slots)
    rollout = Rollout(engine, team, find_workflow("sequential"), Essay, DaemonThreads())
    credit = make_credit(config.algo, team)
    collected = collect(rollout, credit, groups_with_signal, config, 0)
    collected = collected._replace(stats=engine.stats())
    sampled = [t for e in collected.played for t in e.turns if not t.replayed]
    rows = batch.build(collected.episodes, collected.rewards, team.owners, config.algo, "token",
                       share=True)  # fmt: skip
    once = _once(sampled, collected, rows, team)
    computed = {name.removeprefix("tokens/once_"): 1 / share for name, share in once.items()}
    calls = compilation.prefill_tokens(small.one_device())
    rounded = {name: round(float(x), 2) for name, x in computed.items()}
    print(f"{slots} slots, calls of {calls} tokens, {algo}: {rounded}")
    return computed, sampled


def team_of_three() -> Team:
    profiles = [
        Profile(name, prompt=f"You are the {name}. ".ljust(SYSTEM, "x"), answers=name == "checker")
        for name in small.NAMES
    ]
    return small.team_of(Blueprint(tuple(profiles)), context=1024, max_new_tokens=ACTION)


@pytest.mark.parametrize(("branches", "slots", "tasks", "tokens", "most"), [
    (4, 128, 8, 512, 1.1), (8, 256, 8, 512, 1.1), (4, 24, 16, 512, 1.35),  # as on a CPU
    (4, 128, 8, 8192, 1.1), (8, 256, 8, 8192, 1.15), (4, 24, 16, 8192, 1.35),  # and elsewhere
])  # fmt: skip
@pytest.mark.release
def test_branches_compute_hardly_more_than_has_to_be(
    branches, slots, tasks, tokens, most, monkeypatch
):
    """Where the cache has a slot for most turns that are sampled together, and a call of prefill so
    many tokens."""
    monkeypatch.setattr(compilation, "prefill_tokens", lambda mesh: tokens)
    algo = {"credit": "siblings", "branches": branches, "branch_at": "every", "group_size": 1}
    computed, sampled = twice(slots, team_of_three(), episodes=tasks, **algo)
    assert len(sampled) == tasks * (3 + branches * (3 + 2 + 1))
    assert computed["engine"] < most and computed["update"] < 1.2
