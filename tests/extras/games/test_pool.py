"""Past selves as opponents: which versions are kept and played, and that a kill changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from commands import code_of
from run_files import arrays_of, killed_after, lines_of

from marft_jax import evaluate, train
from marft_jax.errors import BadInput
from marft_jax.extras.games import pool
from marft_jax.extras.report.episodes import episode
from marft_jax.extras.report.reading import read_run
from marft_jax.learning.state import TrainState
from marft_jax.learning.state_parts import after_step, begin, find_state_parts
from marft_jax.policy.optimiser import PolicyState
from marft_jax.settings.config import Rollout
from marft_jax.team.profiles import Profile
from marft_jax.team.team_files import Blueprint
from marft_jax.types import MAIN, Episode, StepResult

pytestmark = pytest.mark.usefixtures("one_device")

PAST = pool.Past(MAIN, ("rival",), (1,), (0,))
TEAM = """
workflow: players
agents:
  - {name: learner, answers: true}
  - {name: rival, answers: true, past: learner}
"""
FLAGS = """--env.name open_spiel --env.rotate true --env.illegal masked --env.numbered true
--team.max_new_tokens 2
--algo.name reinforce --algo.episodes 8 --algo.group_size 4 --model.context 128 --run.keep 9
--rollout.past_every 2 --rollout.past_kept 2 --rollout.past_choice strong --run.steps 6
--algo.kl_coef 0.1 --algo.kl_reference start --algo.kl_reference_every 3
--run.loggers none --run.transcripts_every 3 --lora.mode shared""".split()


class Counted:
    """A state whose adapter is the number of its step, and its pool."""

    def __init__(self, **settings):
        self.settings = Rollout(**settings)
        none = TrainState(*([()] * 9))
        policies = {MAIN: PolicyState({"q": {"a": jnp.zeros((2, 1))}}, ())}
        state = none._replace(step=jnp.int32(0), policies=policies)
        self.pool, self.state = pool.begin(PAST, self.settings.past_kept, state)

    def steps(self, count, outcome=lambda version: None):
        """Lists which version played each step."""
        seen = []
        for _ in range(count):
            a, step = self.state.adapters[MAIN]["q"]["a"], int(self.state.step) + 1
            seen.append(version := float(a[1, 0]))
            x = a.at[0].set(float(step))
            state = self.state.with_adapters({MAIN: {"q": {"a": x}}})
            state = state._replace(step=jnp.int32(step))
            won = outcome(version)
            info = {"outcomes": {"rival": {"outcome": won}}} if won else {}
            played = [Episode(0, 0, 0, "", [], [StepResult("", 0.0, True, info)])]
            how = self.settings, self.pool, state, played, (0, step)
            self.pool, self.state = pool.after_step(PAST, *how)
        return seen


def test_the_pool_keeps_every_version_alike_and_plays_them_all():
    run = Counted(past_every=2, past_kept=4)
    seen = run.steps(400)
    assert seen[:2] == [0.0, 0.0] and all(version % 2 == 0 for version in seen)
    assert all(version <= step for step, version in enumerate(seen))
    late = np.array(seen[200:]) / np.arange(200, 400)  # the age of those played, of all so far
    assert (late < 0.25).any() and (late > 0.75).any() and len(set(seen[200:])) > 5


def test_strong_plays_those_that_win():
    run = Counted(past_every=50, past_kept=4, past_choice="strong")
    run.steps(151)
    late = run.steps(49, lambda version: "win" if version == 50 else "loss")
    assert late.count(50.0) > 30


def test_a_pool_needs_an_agent_and_the_agent_one_that_learns():
    seats = Profile("ann", answers=True), Profile("bob", past="bob")
    with pytest.raises(BadInput, match="past: expected an agent on its base that learns, of ann"):
        small.team_of(Blueprint(seats))


def test_each_base_has_a_pool_of_the_versions_of_its_own_agents():
    seats = [Profile(n, past=of, base=base, answers=True) for n, of, base in (
        ("ann", None, None), ("bob", "ann", None), ("cy", None, "other"), ("di", "cy", "other"),
    )]  # fmt: skip
    on = (MAIN, MAIN, "other", "other")
    team = small.team_of(Blueprint((seats[0], seats[1])))
    team = team._replace(profiles=tuple(seats), bases=on, owners=(0, 1, 0, 1))
    parts = find_state_parts(small.config(), team)
    assert [*parts] == ["pool", "pool-other"]
    own = {base: {"q": {"a": jnp.array([[x], [0.0]])}} for base, x in ((MAIN, 1.0), ("other", 2.0))}
    state = TrainState(*([()] * 9))._replace(
        step=jnp.int32(0), parts={}, policies={base: PolicyState(a, ()) for base, a in own.items()}
    )
    state = after_step(parts, begin(parts, state), [], (0, 1))
    seated = {base: a["q"]["a"].ravel().tolist() for base, a in state.adapters.items()}
    assert seated == {MAIN: [1.0, 1.0], "other": [2.0, 2.0]}


def run_train(run: Path, *flags: str) -> None:
    team = run.parent / "team.yaml"
    team.write_text(TEAM)
    assert code_of(train.main, *FLAGS, "--team.file", team, "--run.dir", run, *flags) == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Six uninterrupted steps."""
    run = tmp_path_factory.mktemp("pool") / "whole"
    run_train(run, "--run.save_every", "1")
    return run


@pytest.mark.release
def test_the_reference_moves_to_the_present_adapters_every_so_many_steps(whole):
    states = {step: arrays_of(whole, step) for step in range(1, 7)}
    for step, state in states.items():
        for target, parts in state["policies"][MAIN]["reference"].items():
            if step < 3:
                assert not parts["b"].any()  # as the run began
            else:
                moved = states[step // 3 * 3]["policies"][MAIN]["adapters"][target]["b"][0]
                np.testing.assert_array_equal(parts["b"][0], moved)
    assert any(parts["b"][0].any() for parts in states[3]["policies"][MAIN]["reference"].values())


@pytest.mark.release
def test_a_run_with_other_settings_may_be_an_opponent(whole, tmp_path, capsys):
    run_train(tmp_path / "other", "--run.seed", "5", "--run.steps", "1", "--algo.lr", "1e-2")
    words = "--run", whole, "--against", tmp_path / "other", "--limit", 4, "--out", tmp_path
    assert code_of(evaluate.main, *words) == 0, capsys.readouterr()
    assert len([*tmp_path.glob("match-*")]) == 2


@pytest.mark.slow
def test_elo_compares_checkpoints_of_a_run_and_the_report_draws_it(whole, capsys):
    assert code_of(evaluate.main, "--run", whole, "--elo", 2, "--limit", 4) == 0
    rows = [*map(json.loads, (whole / "evaluations" / "elo.jsonl").read_text().splitlines())]
    assert [row["step"] for row in rows] == [1, 6]
    assert sum(row["elo"] for row in rows) == pytest.approx(0, abs=1e-6)  # of hundreds
    assert f"{rows[0]['elo']:+.0f}" in capsys.readouterr().out
    record = read_run(whole)
    assert record.metrics[6]["eval/game/elo"] == rows[1]["elo"]
    assert 0 <= record.metrics[6]["eval/rival against step:1/won"] <= 1
    assert all(file.name.startswith("match-") for file in record.evaluations)
    shown = episode(record.episodes(6)[0], {})
    assert set(shown.outcomes) == {"learner", "rival"} and shown.boards[0].count(" ") == 2


@pytest.mark.slow
def test_self_play_against_past_selves_continues_exactly_after_a_kill(whole, tmp_path, monkeypatch):
    killed = tmp_path / "killed"
    ours = [arrays_of(whole, step)["policies"][MAIN]["adapters"] for step in range(1, 7)]
    for step in (2, 3, 4, 5, 6):  # who plays the next step is an earlier self, bit for bit
        earlier = [0, *range(2, step + 1, 2)]
        kept = [ours[k - 1] for k in earlier if k]
        for target, parts in ours[step - 1].items():
            rival = parts["b"][1]
            assert any(np.array_equal(rival, x[target]["b"][0]) for x in kept) or not rival.any()
    assert any(parts["b"][1].any() for own in ours for parts in own.values())
    with killed_after(5, monkeypatch):
        run_train(killed, "--run.save_every", "3")
    run_train(killed, "--run.save_every", "3")
    assert lines_of(killed) == lines_of(whole)
    both = [jax.tree_util.tree_leaves_with_path(arrays_of(r, 6)) for r in (killed, whole)]
    for (path, one), (_, two) in zip(*both, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes(), path
