"""What is not finite is skipped, a collapse is seen, and the run goes back to where it was good."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from unittest import mock

import bounds
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from marft_jax import train
from marft_jax.errors import BadInput, RunFailed
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.learner import Learner
from marft_jax.learning.objectives import objective_of
from marft_jax.learning.settings import Appo, Grpo, resolve
from marft_jax.learning.step_metrics import Stepped, report
from marft_jax.policy.objective import measures
from marft_jax.run import saving
from marft_jax.run.checkpoints import Checkpoints
from marft_jax.run.compatibility import identity_of
from marft_jax.run.guard import Finding, Guard, Verdict, by_agent, skipped_updates
from marft_jax.run.metrics import check_best_metric
from marft_jax.run.reporters import Events
from marft_jax.settings import config as config_lib
from marft_jax.types import MAIN

NAMES = ("planner", "solver")
SETTINGS = config_lib.Guard(skips=2, patience=3)
FINE = {"kl": 0.01, "entropy": 0.5, "reward": 0.5, "std": 0.4}


def guard(tmp_path, **settings):
    return Guard(dataclasses.replace(SETTINGS, **settings), NAMES, Events(tmp_path))


def episodes():
    turns = [small.turn(agent, [1], (1, 2, 3)) for agent in (0, 1)]
    return [small.episode(i, turns, [0.5]) for i in range(4)]


def metrics(**changed):
    numbers = FINE | changed
    both = {"approx_kl": numbers["kl"], "entropy": numbers["entropy"]}
    told = {f"agent/{name}/{what}": value for name in NAMES for what, value in both.items()}
    return told | {"reward/mean": numbers["reward"], "reward/std": numbers["std"]}


def run_steps(guard, steps, first=1):
    """Each step is (episodes, metrics, nonfinite); the verdicts, by step."""
    verdicts = {}
    for step, seen in enumerate(steps, start=first):
        verdict = guard.look(step, *seen)[1]
        if verdict is not None:
            verdicts[step] = verdict
    return verdicts


GOOD = (episodes(), metrics(), {})
BAD = {
    "kl": (episodes(), metrics(kl=25.0), {}),
    "kl that is not a number": (episodes(), metrics(kl=math.nan), {}),
    "entropy": (episodes(), metrics(entropy=1e-9), {}),
    "reward": (episodes(), metrics(reward=0.05), {}),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_collapse_is_seen_when_it_lasts(kind, tmp_path):
    steps = [GOOD] * 3 + [BAD[kind]] * 2 + [GOOD] + [BAD[kind]] * 3
    verdicts = run_steps(guard(tmp_path), steps)
    assert list(verdicts) == [9]
    finding, good = verdicts[9]
    assert finding.kind == kind.split()[0]
    assert good == (3 if kind == "reward" else 6)
    assert finding.who == {"reward": "team"}.get(kind, "planner")


@pytest.mark.parametrize(
    "seen, said",
    [
        (BAD["kl"], "step 1 in a row (--guard.patience 3)"),
        ((*GOOD[:2], {"solver": {"gradient q": 1.0}}), "step 1 in a row (--guard.skips 2)"),
    ],
)
def test_a_warning_counts_and_names_the_limit(seen, said, tmp_path, caplog):
    run_steps(guard(tmp_path), [seen])
    line = caplog.records[0].getMessage()
    assert line.startswith("step 1: ") and line.endswith(f"; {said}")


@pytest.mark.parametrize("kind", BAD)
def test_each_bound_can_be_turned_off(kind, tmp_path):
    off = {"kl": "max_kl", "entropy": "min_entropy", "reward": "reward_drop"}
    watching = guard(tmp_path, **{off[kind.split()[0]]: None})
    assert not run_steps(watching, [GOOD] * 3 + [BAD[kind]] * 5)
    assert not (tmp_path / "events.jsonl").exists()


def test_a_base_that_was_like_that_in_all_or_most_steps_has_not_collapsed(tmp_path):
    low = BAD["entropy"]
    for steps in ([low] * 9, [low, low, GOOD, GOOD, *[low] * 9]):
        assert not run_steps(guard(tmp_path), steps)


def test_an_agent_that_did_not_act_is_not_judged(tmp_path):
    only = [e._replace(turns=e.turns[1:]) for e in episodes()]
    silent = metrics() | {"agent/planner/entropy": 0.0, "agent/planner/approx_kl": 0.0}
    assert not run_steps(guard(tmp_path), [GOOD] * 3 + [(only, silent, {})] * 5)


def test_a_kl_stays_outside_until_the_agent_moves_again(tmp_path):
    """A team that one step destroyed fails in every task, and never moves again by itself."""
    still = (episodes(), metrics(kl=1e-10, reward=0.0), {})
    [(step, verdict)] = run_steps(guard(tmp_path), [GOOD, BAD["kl"], still, still]).items()
    assert step == 4 and verdict.good == 1 and "without a move" in str(verdict.finding)
    assert not run_steps(guard(tmp_path), [BAD["kl"], still, GOOD, still, still])


def test_updates_that_are_not_finite_have_a_limit_of_their_own(tmp_path):
    counts = {"planner": {"logprobs": 2.0, "advantages": 0.0}, "critic": {}}
    broken = (episodes(), metrics(reward=math.nan), counts)
    verdicts = run_steps(guard(tmp_path), [GOOD, broken, GOOD, broken, broken])
    assert verdicts == {5: Verdict(Finding("nonfinite", "planner", 2.0, 0, ("logprobs",)), 3)}
    assert not run_steps(guard(tmp_path, skips=None), [broken] * 9)
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert rows[0].pop("time") and rows[0] == {
        "step": 2, "rollbacks": 0, "event": "skipped", "kind": "nonfinite", "who": "planner",
        "value": 2.0, "bound": 0, "tensors": ["logprobs"],
    }  # fmt: skip


def test_decisions_are_the_same_after_a_save_and_a_restart(tmp_path):
    steps = [GOOD, GOOD, BAD["entropy"], GOOD, GOOD] + [BAD["reward"]] * 4
    whole = guard(tmp_path / "whole")
    expected = run_steps(whole, steps)
    for cut in range(1, len(steps)):
        first = guard(tmp_path / str(cut))
        before = run_steps(first, steps[:cut])
        second = guard(tmp_path / str(cut))
        second.recall(json.loads(json.dumps(first.memory)))
        after = run_steps(second, steps[cut:], first=cut + 1)
        assert before | after == expected and second.memory == whole.memory


def test_events_of_steps_that_come_again_are_dropped(tmp_path):
    watching = guard(tmp_path)
    run_steps(watching, [GOOD] * 3 + [BAD["kl"]] * 3)
    watching.rolled_back({})
    run_steps(watching, [BAD["kl"], GOOD, BAD["kl"]])
    watching.events.forget_after(2)
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(r["rollbacks"], r["step"]) for r in rows if r["who"] == "planner"] == [
        (0, 4), (0, 5), (0, 6), (1, 1),
    ]  # fmt: skip


def test_numbers_of_a_shared_adapter_go_to_each_agent_that_has_it():
    settings = resolve(dataclasses.replace(CONFIG, algo=Grpo()), {MAIN: ("tiny", small.CONFIG)})
    objective = objective_of(settings, find_algorithm("grpo"))
    sums = {name: jnp.zeros((1, 2)) for name in ("units", "tokens", *measures(objective))}
    stepped = [Stepped([sums], {MAIN: jnp.array([norm])}, []) for norm in (1, 3, np.inf)]
    sound, broken = (report(objective, [(MAIN, 0)] * 2, some) for some in (stepped[:2], stepped))
    assert sound["grad_norm"].tolist() == [2, 2] and not sound["nonfinite"]["gradient"].any()
    assert broken["nonfinite"]["gradient"].tolist() == [1, 1]


def test_counts_go_to_their_agents():
    counts = {"logprobs": np.array([1, 0]), "gradient": np.array([2, 2]),
              "critic gradient": np.float32(3)}  # fmt: skip
    team = small.team(2, shared=True)
    assert by_agent(counts, team) == {
        "critic": {"critic gradient": 3.0},
        "planner": {"logprobs": 1.0, "gradient": 2.0},
        "solver": {"logprobs": 0.0, "gradient": 2.0},
    }
    assert skipped_updates(by_agent(counts, team)) == 7


CONFIG = small.config(
    lora=config_lib.Lora(rank=small.RANK, alpha=small.ALPHA, targets=small.QV),
    critic=config_lib.Critic(hidden=(8,)),
    algo=Appo(epochs=1, minibatches=1, microbatch_tokens=512),
)


@pytest.fixture(scope="module")
def learner():
    settings, bases = resolve(CONFIG, {MAIN: ("tiny", small.CONFIG)}), {MAIN: small.base()}
    return Learner(settings, bases, small.team(), find_algorithm("appo"), small.one_device())


def learn(learner, **state):
    played = small.random_episodes(4)
    batch = learner.pack(played, small.paid(played))
    old = learner.init().with_adapters({MAIN: small.adapters(2)})._replace(**state)
    before = jax.tree.map(np.array, old)
    new, _, report = learner.learn(old, batch, 0)
    return before, new, jax.device_get(report["nonfinite"])


@pytest.mark.slow
def test_a_sound_update_skips_nothing_and_the_scale_scales_it(learner):
    before, one, counts = learn(learner)
    assert not any(np.any(count) for count in counts.values())
    _, tenth, _ = learn(learner, lr_scale=jnp.float32(0.1))
    for tree in ("adapters", "critic"):
        start, whole, part = (jax.tree.leaves(getattr(s, tree)) for s in (before, one, tenth))
        for a, b, c in zip(start, whole, part, strict=True):
            moves = np.asarray(c) - a, 0.1 * (np.asarray(b) - a)
            bounds.close(*moves, size=np.abs(a).max())
            assert np.abs(np.asarray(b) - a).max() > 0


@pytest.fixture
def saved(tmp_path, learner):
    """A run with checkpoints 2, 4 and 6, each with numbers of its own."""
    identity = identity_of(CONFIG, {MAIN: small.base()}, small.team())
    with Checkpoints(tmp_path, identity, keep=9) as checkpoints:
        for step in (2, 4, 6):
            state = learner.init()._replace(step=jnp.int32(step))
            checkpoints.save(step, state, {"rollbacks": 0, "best": step / 10})
        yield checkpoints


def back(checkpoints, learner, watching, good):
    verdict = Verdict(Finding("kl", "planner", 25.0, 20.0), good)
    begin = lambda _, fresh: fresh._replace(critic_opt=None)  # noqa: E731 so that it is recognised
    run = mock.Mock(checkpoints=checkpoints, guard=watching)
    with (
        mock.patch.object(saving, "fresh_state", lambda *_: learner.init()),
        mock.patch.object(saving, "initial_state", begin),
    ):
        return saving.roll_back(run, 7, verdict)


def test_a_rollback_takes_the_last_good_checkpoint_and_lowers_the_rates(saved, learner, tmp_path):
    watching = guard(tmp_path)
    state = back(saved, learner, watching, good=5)
    assert int(state.step) == 4 and float(state.lr_scale) == pytest.approx(0.1)
    assert watching.memory["best"] == 0.4 and watching.rollbacks == 1
    assert saved.steps == [2, 4]
    state = back(saved, learner, watching, good=3)  # that checkpoint knows of no rollback
    assert int(state.step) == 2 and float(state.lr_scale) == pytest.approx(0.01)
    state = back(saved, learner, watching, good=1)
    assert int(state.step) == 0 and state.critic_opt is None  # as a new run begins
    assert float(state.lr_scale) == pytest.approx(0.001) and saved.steps == []
    with pytest.raises(RunFailed, match=r"step 7 after 3 rollbacks: kl of planner: 25, bound 20"):
        back(saved, learner, watching, good=1)
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(r["event"], r.get("to")) for r in rows] == [
        ("rolled back", 4), ("rolled back", 2), ("rolled back", 0), ("stopped", None),
    ]  # fmt: skip


def test_a_metric_that_no_step_will_have_is_refused():
    check_best_metric("reward/mean", {"reward/mean"})
    check_best_metric(None, set())
    with pytest.raises(BadInput, match="got 'reward/meen'; did you mean 'reward/mean'"):
        check_best_metric("reward/meen", {"reward/mean"})


BROKEN_ENV = """
from marft_jax.types import StepResult


class Broken:
    '''Pays what the algorithm makes NaN of in steps 4 and later, unless the run went back.'''

    def reset(self, seed):
        self.broken = 8 * 3 <= seed < 8 * 1000 or {always}
        return "3+4+5=?"

    def step(self, turns):
        good = float("12" in turns[-1].text)
        return StepResult("", 77.0 if self.broken else good, True)
"""


@pytest.fixture
def broken_env(tmp_path, monkeypatch):
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *backend: first)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_once.py").write_text(BROKEN_ENV.replace("{always}", "False"))
    (tmp_path / "broken_always.py").write_text(BROKEN_ENV.replace("{always}", "seed > 8 * 3"))
    flags = "--algo.episodes 8 --run.save_every 2 --guard.skips 2 --algo.name spoiled:SPOILED"
    return flags.split()


def train_until_exit(*flags):
    with pytest.raises(SystemExit) as left:
        train.main([str(flag) for flag in flags])
    return left.value.code


@pytest.mark.release
def test_advantages_that_are_no_numbers_are_skipped_and_rolled_back(broken_env, tmp_path):
    run = tmp_path / "run"
    env = ["--env.name", "broken_once:Broken"]
    assert train_until_exit(*broken_env, *env, "--run.dir", run, "--run.steps", 6) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["guard/rollbacks"] for row in rows] == [0, 0, 1, 1, 1, 1]
    assert rows[-1]["guard/lr_scale"] == pytest.approx(0.1)
    assert all(row["reward/mean"] is not None for row in rows)
    events = [json.loads(x) for x in (run / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "start"] == [1]
    assert {(e["step"], e["event"]) for e in events if "kind" in e} == {
        (4, "skipped"), (5, "skipped"), (5, "rolled back"),
    }  # fmt: skip
    log = (run / "log.txt").read_text()
    assert re.search(r"step 5: nonfinite of .*rollback 1 to step 2", log)


@pytest.mark.slow
def test_a_run_that_breaks_again_and_again_stops_with_a_report(broken_env, tmp_path, capsys):
    flags = [*broken_env, "--env.name", "broken_always:Broken", "--guard.rollbacks", "1"]
    assert train_until_exit(*flags, "--run.dir", tmp_path / "run", "--run.steps", 9) == 1
    report = capsys.readouterr().err.splitlines()[-1]
    assert "after 1 rollbacks: nonfinite of" in report and "events.jsonl" in report


UNSOUND_ENV = """
import math

from marft_jax.types import StepResult


class Unsound:
    def reset(self, seed):
        self.bad = seed % 8 == 3 or {always}
        return "3+4+5=?"

    def step(self, turns):
        good = float("12" in turns[-1].text)
        return StepResult("", {value} if self.bad else good, True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("value", ["math.nan", "-math.inf"])
def test_an_episode_with_a_reward_that_is_not_finite_is_lost_and_named(
    broken_env, tmp_path, monkeypatch, value
):
    name = f"unsound_{value[-3:]}"
    (tmp_path / f"{name}.py").write_text(UNSOUND_ENV.format(always=False, value=value))
    flags = ["--algo.episodes", "8", "--env.name", f"{name}:Unsound", "--run.steps", "1"]
    assert train_until_exit(*flags, "--run.dir", tmp_path / "run") == 0
    [row] = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert row["episode/failed"] == 1 and row["guard/skipped"] == 0
    assert math.isfinite(row["reward/mean"]) and row["agent/solver/grad_norm"] > 0
    [line] = re.findall(r".*dropped an episode.*", (tmp_path / "run/log.txt").read_text())
    got = value[5:]
    assert re.search(rf"task \d+: .*Unsound.* reward: expected a finite number, got {got}", line)


@pytest.mark.slow
def test_where_no_reward_is_finite_the_run_ends_with_one_line(broken_env, tmp_path, capsys):
    (tmp_path / "unsound_all.py").write_text(UNSOUND_ENV.format(always=True, value="math.nan"))
    flags = ["--env.name", "unsound_all:Unsound", "--run.steps", "1"]
    assert train_until_exit(*broken_env[:2], *flags, "--run.dir", tmp_path / "run") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "Unsound: reward: expected a finite number, got nan" in last
