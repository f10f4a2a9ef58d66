"""Saving and restoring: exactly, atomically, and never from damaged files."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import shutil
import subprocess
import sys
import threading
from unittest import mock

import chex
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import small

from marft_jax.errors import BadInput, RunFailed
from marft_jax.formats import jsonlines
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.learner import Learner
from marft_jax.learning.settings import resolve
from marft_jax.parallel import mesh
from marft_jax.run import saving
from marft_jax.run.checkpoints import Checkpoints, SaveSchedule
from marft_jax.run.compatibility import check_fits, described, identity_of, team_changes
from marft_jax.run.directory import locked_directory
from marft_jax.settings import config as config_lib
from marft_jax.team.team_files import Blueprint
from marft_jax.types import MAIN

CONFIG = small.config(lora=config_lib.Lora(rank=2), critic=config_lib.Critic(hidden=(8,)))


def fresh(config=CONFIG):
    settings = resolve(config, {MAIN: (config.model.base, small.CONFIG)})
    how = {MAIN: small.base()}, small.team(), find_algorithm("appo"), small.one_device()
    return Learner(settings, *how).init()


def identity(config=CONFIG, **base):
    return identity_of(config, {MAIN: small.base()._replace(**base)}, small.team())


def opened(folder, keep=2, best=None, **base):
    return Checkpoints(folder, identity(**base), keep, best)


def noisy(state, seed=1):
    key = jax.random.key(seed)
    return jax.tree.map(lambda x: (x + jax.random.uniform(key, x.shape)).astype(x.dtype), state)


@pytest.fixture(scope="module")
def state():
    return noisy(fresh())._replace(step=jax.numpy.int32(7))


@pytest.fixture(scope="module")
def two(state, tmp_path_factory):
    """A run with the checkpoints 1 and 2, to be copied and damaged."""
    run = tmp_path_factory.mktemp("two")
    with opened(run) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state._replace(step=jax.numpy.int32(step)))
    return run


@pytest.mark.slow
def test_what_is_restored_is_what_was_saved_bit_for_bit(tmp_path, state):
    with opened(tmp_path) as checkpoints:
        checkpoints.save(7, state, {"rollbacks": 2, "best": 0.1 + 0.2}, metric=0.25)
    with opened(tmp_path) as checkpoints:
        saved = checkpoints.restore(fresh())
    chex.assert_trees_all_equal(saved.state, state)
    chex.assert_trees_all_equal_dtypes(saved.state, state)
    assert saved.meta["guard"] == {"rollbacks": 2, "best": 0.1 + 0.2}
    assert saved.meta["metric"] == 0.25
    assert saved.meta["config"]["algo"]["lr"] == CONFIG.algo.lr


@pytest.mark.parametrize("gone", ["bases", "on", "started"])
def test_a_checkpoint_of_an_old_release_is_refused_and_the_line_says_what_reads_it(
    tmp_path, state, gone
):
    old = identity()
    del old[gone]
    with Checkpoints(tmp_path, old, keep=2) as checkpoints:
        checkpoints.save(7, state)
    for read in (lambda c: c.restore(fresh()), lambda c: c.restore_adapters()):
        with Checkpoints(tmp_path, identity(), keep=2) as checkpoints:
            with pytest.raises(BadInput, match="expected checkpoints of commit 4c3bfa8 or later"):
                read(checkpoints)


@pytest.mark.parametrize(
    "name",
    ["targets=[q,v]", "[a-c]/b", "lr*{1,2}?", "a\\b", "gs:/b", "100%/%20 é#|&", "[", "~/a", "]["],
)
def test_what_is_saved_under_any_name_is_read_again(tmp_path, state, name):
    run = tmp_path / name / "run"
    run.mkdir(parents=True)
    with opened(run) as checkpoints:
        checkpoints.save(7, state)
    assert [path.name for path in tmp_path.iterdir()] == [name.partition("/")[0]]
    moved = run.rename(tmp_path / f"moved {name.replace('/', '')}")
    with opened(moved) as checkpoints:
        chex.assert_trees_all_equal(checkpoints.restore(fresh()).state, state)
        assert checkpoints.restore_adapters().keys() == set(small.team().names)


@pytest.mark.parametrize("spoil", [lambda x: x + 1, lambda x: x.astype(np.float16), None])
def test_a_step_is_saved_only_if_it_can_be_opened_again(two, tmp_path, state, monkeypatch, spoil):
    def read(*args, **kwargs):
        if spoil is None:
            raise ValueError("NOT_FOUND: no such array")
        return jax.tree.map(spoil, whole(*args, **kwargs))

    run, whole = shutil.copytree(two, tmp_path / "run"), ocp.StandardCheckpointHandler.restore
    with pytest.raises(RunFailed, match=f"{run}: cannot be written"), opened(run) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(ocp.StandardCheckpointHandler, "restore", read)
            checkpoints.save(3, state)
    with opened(run) as checkpoints:
        assert checkpoints.steps == [1, 2] and checkpoints.find("latest") == 2


def test_when_a_run_started_is_kept_over_every_restart(tmp_path, state):
    def started(at: int) -> Checkpoints:
        return Checkpoints(tmp_path, identity() | {"started": at}, keep=2)

    with started(100) as checkpoints:
        checkpoints.save(1, state)
    for later in (200, 300):
        with started(later) as checkpoints:
            assert checkpoints.restore(fresh()) is not None
            assert checkpoints.identity["started"] == 100
            checkpoints.save(later, state)


def test_the_newest_the_best_and_the_last_good_one_are_kept(tmp_path, state):
    metrics = {1: 0.1, 2: 0.9, 3: 0.9, 4: None, 5: float("nan"), 6: 0.3, 7: 0.2}
    with opened(tmp_path, keep=2, best="reward/mean") as checkpoints:
        for step, metric in metrics.items():
            checkpoints.save(step, state, metric=metric, good=5 if step > 4 else None)
        assert checkpoints.find("best") == 3  # of two equal ones the newer
        assert checkpoints.find("latest") == 7 and checkpoints.find(5) == 5
        assert checkpoints.find("latest", most=4) == 3 and checkpoints.find(4) is None
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["3", "5", "6", "7"]


def test_without_a_checkpoint_there_is_nothing_to_restore(tmp_path):
    with opened(tmp_path) as checkpoints:
        assert checkpoints.find("latest") is None and checkpoints.restore(fresh()) is None


def test_all_that_differs_is_named_in_one_line(two):
    other = dataclasses.replace(CONFIG, critic=config_lib.Critic(hidden=(8, 8)))
    with Checkpoints(two, identity(other, digest="b"), keep=2) as checkpoints:
        with pytest.raises(BadInput) as caught:
            checkpoints.restore(fresh())
    message = str(caught.value)
    assert "base model was 0123, is b" in message
    assert "--critic.hidden was [8], is [8, 8]" in message
    assert "\n" not in message and "another --run.dir" in message


def test_a_state_of_another_form_is_refused_by_the_name_of_an_array(two):
    """Whatever setting made the difference, also one that nobody thought of."""
    with opened(two) as checkpoints, pytest.raises(BadInput, match=r"critic.*32, 8"):
        state = fresh()
        critic = state.critic[MAIN]
        wider = critic._replace(head=[jax.numpy.zeros((1, 32, 9)), *critic.head[1:]])
        checkpoints.restore(state._replace(critic={MAIN: wider}))


def test_a_state_may_be_donated_as_soon_as_it_is_being_saved(tmp_path):
    """The next training step writes into the same memory while the save still runs."""
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 - 1, state), donate_argnums=0)
    state = noisy(fresh())
    expected = jax.device_get(jax.tree.map(lambda x: x.copy(), state))
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        jax.block_until_ready(overwrite(state))
    with opened(tmp_path) as checkpoints:
        chex.assert_trees_all_equal(checkpoints.restore(fresh()).state, expected)


def test_a_state_is_restored_onto_another_mesh_and_back(two, tmp_path, state):
    everywhere = jax.device_put(fresh(), mesh.replicated(small.mesh_of(2, 2, 2)))
    with opened(two) as checkpoints:
        restored = checkpoints.restore(everywhere).state
    chex.assert_trees_all_equal(jax.device_get(restored.adapters), jax.device_get(state.adapters))
    assert all(len(x.sharding.device_set) == 8 for x in jax.tree.leaves(restored))
    with opened(tmp_path) as checkpoints:
        checkpoints.save(2, restored)
        back = checkpoints.restore(fresh()).state
    chex.assert_trees_all_equal(jax.device_get(back), jax.device_get(restored))
    assert all(len(x.sharding.device_set) == 1 for x in jax.tree.leaves(back))


def files_of(run):
    folder = run / "checkpoints" / "2"
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def truncated(file):
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def flipped(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


DAMAGE = {"truncated": truncated, "flipped": flipped, "deleted": lambda file: file.unlink()}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_to_any_file_makes_the_older_checkpoint_the_newest(two, tmp_path, how, caplog):
    names = files_of(two)
    assert len(names) > 5
    for name in names:
        shutil.copytree(two, tmp_path / "run", dirs_exist_ok=True)
        DAMAGE[how](tmp_path / "run" / "checkpoints" / "2" / name)
        caplog.clear()
        with opened(tmp_path / "run") as checkpoints:
            assert checkpoints.find("latest") == 1, name
            assert "checkpoint 2 is not intact" in caplog.text
        shutil.rmtree(tmp_path / "run")


def test_after_damage_the_older_state_is_restored_and_the_damaged_one_replaced(
    two, tmp_path, state
):
    run = shutil.copytree(two, tmp_path / "run")
    flipped(run / "checkpoints" / "2" / "meta.json")
    with opened(run) as checkpoints:
        restored = checkpoints.restore(fresh()).state
        assert int(restored.step) == 1
        checkpoints.save(2, restored._replace(step=jax.numpy.int32(2)))
        assert checkpoints.find("latest") == 2 and int(checkpoints.restore(fresh()).state.step) == 2


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_left_as_it_is(two, tmp_path):
    run = shutil.copytree(two, tmp_path / "run")
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    for step in (1, 2):
        truncated(run / "checkpoints" / str(step) / "manifest.json")
    with opened(run) as checkpoints:
        assert checkpoints.restore(fresh()) is checkpoints.find("latest") is None
        with (
            mock.patch.object(saving, "fresh_state", lambda *_: fresh()),
            pytest.raises(BadInput, match=r"none of its checkpoints \(1, 2\) is intact"),
        ):
            saving.resume(mock.Mock(), mock.Mock(), checkpoints, mock.Mock())
    assert (run / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_the_last_finished_step_is_saved_whatever_ends_the_run(tmp_path, state):
    with pytest.raises(KeyError), opened(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state, now=False)
        checkpoints.save(3, state, {"rollbacks": 1}, 0.5, now=False)
        raise KeyError
    with opened(tmp_path) as checkpoints:
        assert checkpoints.steps == [1, 3]
        saved = checkpoints.restore(fresh(), 3)
    chex.assert_trees_all_equal(saved.state, state)
    assert saved.meta["guard"] == {"rollbacks": 1} and saved.meta["metric"] == 0.5


def test_the_guards_memory_is_saved_as_it_was_when_the_step_ended(tmp_path, state):
    """It changes with the next step, before this one is written."""
    memory = {"since": {}, "met": ["kl solver"]}
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, state, memory, now=False)
        memory["met"].append("entropy solver")
        memory["since"]["kl solver"] = 2
    with opened(tmp_path) as checkpoints:
        guard = checkpoints.restore(fresh()).meta["guard"]
    assert guard == {"since": {}, "met": ["kl solver"]}


def test_what_is_held_can_be_saved_by_any_thread_at_any_moment(tmp_path, state):
    with opened(tmp_path) as checkpoints:
        checkpoints.flush()  # nothing is finished yet
        checkpoints.save(1, state, now=False)
        others = [threading.Thread(target=checkpoints.flush) for _ in range(4)]
        for other in others:
            other.start()
        for other in others:
            other.join()
        assert checkpoints.find("latest") == 1
        checkpoints.save(2, state, now=False)
        checkpoints.drop_after(0)  # a rollback: what is held is not to come back
    assert not (tmp_path / "checkpoints" / "2").exists()


def edited(**changes):
    planner, solver = small.team().profiles
    return small.team_of(Blueprint((dataclasses.replace(planner, **changes), solver)))


def test_a_team_file_that_was_edited_is_told_field_by_field():
    before = described(small.team())
    assert json.loads(json.dumps(before)) == before  # as a checkpoint keeps it
    assert team_changes(before, described(small.team())) == []
    now = edited(prompt="Plan.", answers=True, trainable=False)._replace(workflow="debate")
    assert team_changes(before, described(now)) == [
        ("team: workflow", "'sequential'", "'debate'"),
        ("team: planner.prompt", "'p'", "'Plan.'"),
        ("team: planner.answers", "False", "True"),
        ("team: planner.trainable", "True", "False"),
    ]


def test_a_save_that_was_killed_is_no_checkpoint_and_is_cleaned_up(two, tmp_path):
    run = shutil.copytree(two, tmp_path / "run")
    shutil.copytree(run / "checkpoints" / "2", run / "checkpoints" / ".saving-3")
    (run / "checkpoints" / ".saving-3" / "manifest.json").unlink()
    (run / "checkpoints" / "02").mkdir()  # a user's folder is no checkpoint either, and stays
    with opened(run) as checkpoints:
        assert checkpoints.steps == [1, 2]
        checkpoints.clean()
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["02", "1", "2"]


def test_later_checkpoints_can_be_dropped_and_saved_anew(two, tmp_path, state):
    run = shutil.copytree(two, tmp_path / "run")
    with opened(run) as checkpoints:
        checkpoints.drop_after(1)
        assert checkpoints.find("latest") == 1
        checkpoints.save(2, noisy(state, 3))
    with opened(run) as checkpoints:
        chex.assert_trees_all_equal(checkpoints.restore(fresh()).state, noisy(state, 3))


def test_a_full_disk_is_one_clear_error_and_what_was_saved_stays(two, tmp_path, state, monkeypatch):
    run = shutil.copytree(two, tmp_path / "run")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunFailed, match="No space left on device.*stay loadable"):
        with opened(run) as checkpoints:
            with monkeypatch.context() as patch:
                patch.setattr(jsonlines, "write", full)
                checkpoints.save(3, state)
    with opened(run) as checkpoints:
        assert checkpoints.find("latest") == 2 and checkpoints.restore(fresh()) is not None
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["1", "2"]


def test_a_run_directory_that_vanished_is_not_made_anew(tmp_path, state):
    run = tmp_path / "run"
    with pytest.raises(RunFailed, match="cannot be written"), opened(run) as checkpoints:
        checkpoints.save(1, state)
    assert not run.exists()


def test_a_second_process_is_refused_and_a_dead_one_locks_nobody_out(tmp_path):
    code = f"""
import time
from pathlib import Path
from marft_jax.run.directory import locked_directory
from marft_jax.run.manifest import manifest_of
with locked_directory(Path({str(tmp_path)!r})):
    print("held", flush=True)
    time.sleep(60)
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(BadInput, match=f"in use by .*process {other.pid}"):
            with locked_directory(tmp_path):
                pass
    finally:
        other.kill()
        other.wait()
    with locked_directory(tmp_path):
        pass


def test_a_run_directory_that_cannot_be_made_is_bad_input(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="--run.dir"), locked_directory(tmp_path / "file" / "run"):
        pass


def test_saves_are_due_by_steps_by_minutes_and_at_the_end():
    clock = [0.0]
    settings = config_lib.Run(steps=9, save_every=4, save_minutes=2)
    schedule = SaveSchedule(settings, now=lambda: clock[0])
    due = []
    for step, seconds in enumerate([30, 60, 60, 0, 60, 61, 0, 0, 0], start=1):
        clock[0] += seconds
        due += [step] if schedule.is_due(step) else []
    assert due == [3, 4, 6, 8, 9]
    never = SaveSchedule(dataclasses.replace(settings, save_minutes=0), now=lambda: clock[0])
    clock[0] += 1e6
    assert not never.is_due(3)


def test_a_change_of_what_is_saved_is_named_by_its_setting_and_not_by_the_arrays(tmp_path):
    """A KL to the start, a baseline, a part of the state, an agent that plays as the past."""
    saved = {
        "bases": {}, "agents": ["a"], "adapters": ["a"], "arrays": {".x": "float32[2]"},
        "team": {"workflow": "sequential", "a.past": None},
        "config": {"algo": {"kl_reference": "base", "lr": 0.1}, "run": {"steps": 1}},
    }  # fmt: skip
    kl = {"algo": {"kl_reference": "start", "lr": 0.1}, "run": {"steps": 2}}
    past = {"workflow": "sequential", "a.past": "b"}
    for change, named in (
        ({"config": kl}, "--algo.kl_reference was base, is start; use the old"),
        ({"team": past}, "team: a.past was None, is 'b'; use the old"),
        ({}, ".y was absent, is float32[1]; use the old"),
    ):
        now = {**saved, **change, "arrays": {**saved["arrays"], ".y": "float32[1]"}}
        with pytest.raises(BadInput, match=f"settings: {re.escape(named)}"):
            check_fits(saved, now, tmp_path, continues=True)
    check_fits(saved, {**saved, "config": kl, "team": past}, tmp_path, continues=True)
