"""Runs in object storage: what a bucket holds after any fault, and what other machines read."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import threading
import time
from pathlib import Path

import buckets
import pytest
from buckets import Bucket, Died, fault, metrics, names, newest, race, save, train
from fsspec.implementations.memory import MemoryFileSystem

from marft_jax.errors import BadInput, RunFailed
from marft_jax.extras.report import serving
from marft_jax.extras.storage import lock, mirror
from marft_jax.extras.storage.mirror import Mirror
from marft_jax.formats import jsonlines
from marft_jax.run.manifest import damage

RUN = "bucket://b/runs/one"


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """An empty bucket, a machine, and short times."""
    Bucket.store.clear()
    monkeypatch.setattr(lock, "RENEW_S", 0.05)
    monkeypatch.setattr(mirror, "PUSH_S", 60.0)
    monkeypatch.setattr(mirror, "SMALL", 64)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Goes to a machine that has not seen the run."""
    machines = itertools.count()

    def go() -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"machine-{next(machines)}"))

    return go


def owner() -> Mirror:
    return Mirror(RUN, trains=True)


def reader() -> Path:
    """What another process reads: all files, and the states of all checkpoints."""
    place = Mirror(RUN, trains=False)
    place.fetch("*")
    for folder in (place.path / "checkpoints").glob("[0-9]*"):
        place.fetch_checkpoint(int(folder.name))
    return place.path


def test_another_machine_reads_what_was_trained_and_continues_it(elsewhere):
    assert train(owner(), 5) == 0
    elsewhere()
    place = Mirror(RUN, trains=False)
    states = [name for name in place.path.rglob("arrays-*")]
    assert not states, "states are brought only when they are asked for"
    place.fetch_checkpoint(4)
    assert damage(place.path / "checkpoints" / "4") is None
    assert not [*place.path.rglob("arrays-2")]
    run = reader()
    assert newest(run) == 4 and metrics(run) == [1, 2, 3, 4, 5]
    elsewhere()
    assert train(owner(), 8) == 4
    run = reader()
    assert newest(run) == 8 and metrics(run) == [*range(1, 9)]
    assert len([*run.glob("transcripts/*")]) == 8


def test_small_files_go_there_between_checkpoints_and_large_ones_with_them():
    with (place := owner()).locked():
        for name, size in ("metrics.jsonl", 60), ("log.txt", 70), ("other.bin", 1):
            place.path.joinpath(name).write_bytes(b"x" * size)
        place.push(growing=True)
        assert names(RUN) == ["metrics.jsonl"]
        written: list[str] = []
        with fault(lambda kind, path, write: (written.append(path), write())):
            place.push()
            place.push()
        assert [path.rpartition("/")[2] for path in written] == ["log.txt", "other.bin"]
        place.path.joinpath("log.txt").write_bytes(b"y" * 80)
        place.push()
    assert reader().joinpath("log.txt").read_bytes() == b"y" * 80


def test_files_that_an_older_release_cut_are_refused_in_one_line():
    train(owner(), 2)
    Bucket().pipe_file("/b/runs/one/metrics.jsonl.part0001", b"{}")
    for trains in (True, False):
        with pytest.raises(BadInput, match="metrics.jsonl.part0001.*join the parts"):
            Mirror(RUN, trains=trains)


@pytest.mark.parametrize("applied", [False, True], ids=["before a write", "after a write"])
def test_a_process_that_dies_at_any_write_loses_no_saved_step(applied, elsewhere):
    """Each write of a training is the last one of a process; the next process is elsewhere."""
    train(owner(), 8)
    whole = {name: buckets.content(RUN, name) for name in names(RUN)}
    for moment in itertools.count():
        Bucket.store.clear()
        left, saved = itertools.count(), [0]

        def die(kind, path, write, moment=moment, left=left):
            if threading.current_thread() is not threading.main_thread():
                raise OSError("no renewals here")
            now = next(left)
            if now < moment or now == moment and applied:
                write()
            if now >= moment:
                raise Died

        elsewhere()
        with fault(die):
            try:
                train(owner(), 6, lambda step, saved=saved: saved.append(step))
                break
            except Died:
                pass
        if names(RUN):
            run = reader()
            assert newest(run) >= saved[-1]
            steps = metrics(run) if (run / "metrics.jsonl").exists() else []
            assert steps == [*range(1, len(steps) + 1)] and len(steps) >= newest(run)
        elsewhere()
        assert train(owner(), 8) >= saved[-1]
        now = {name: buckets.content(RUN, name) for name in names(RUN)}
        assert now == whole, f"write {moment}"
    assert moment > 20


def test_a_second_process_is_refused_while_the_first_one_trains(elsewhere, capsys):
    with owner().locked():
        elsewhere()
        for _ in range(2):
            with pytest.raises(BadInput, match="in use by another process .process"):
                owner().locked().__enter__()
        assert "watching for" in capsys.readouterr().err
    with owner().locked():  # it was given up
        pass
    assert "watching" not in capsys.readouterr().err


def test_of_several_processes_that_find_a_dead_one_a_single_one_takes_the_run(elsewhere):
    with contextlib.suppress(Died), owner().locked(), fault(_die):
        raise Died

    def place() -> Mirror:
        elsewhere()
        return owner()

    assert race(5, place, 0.01) == (1, 4)


def _die(kind, path, write):
    raise Died if threading.current_thread() is threading.main_thread() else OSError


def test_a_lock_that_another_process_makes_in_the_same_moment_is_not_overwritten():
    rival = json.dumps({"owner": "process 1 on another machine", "token": "rival"}).encode()

    def first(kind, path, write):
        if path.endswith("lock/1") and path not in Bucket.store:
            MemoryFileSystem.pipe_file(Bucket(), path, rival)
        write()

    with fault(first), owner().locked():
        assert "/b/runs/one/lock/2" in Bucket.store  # once nobody renewed the first one


def test_a_process_that_slept_while_another_one_took_the_run_writes_nothing_more(
    elsewhere, monkeypatch
):
    asleep = owner()
    asleep.path.mkdir(parents=True)
    with pytest.raises(RunFailed, match="has taken this run"):
        with asleep.locked():
            save(asleep, 2)
            monkeypatch.setattr(lock.Lock, "_write", _unless(asleep, lock.Lock._write))
            elsewhere()
            train(owner(), 8)
            before = {name: buckets.content(RUN, name) for name in names(RUN)}
            save(asleep, 4)
    assert {name: buckets.content(RUN, name) for name in names(RUN)} == before


def _unless(place, write):
    """Renews no lock of this place."""

    def call(self, *args, **how):
        if self is not place._lock:
            write(self, *args, **how)

    return call


def test_a_start_on_the_same_machine_does_not_wait_for_the_process_that_died(capsys, monkeypatch):
    monkeypatch.setattr(lock, "RENEW_S", 1000.0)
    with contextlib.suppress(Died), (place := owner()).locked(), fault(_die):
        raise Died
    with owner().locked():
        assert "watching" not in capsys.readouterr().err
    assert place.path == owner().path


def test_a_lock_whose_answer_was_lost_is_held_and_is_not_taken_for_another_one():
    def lose(kind, path, write):
        write()
        if kind == "create":
            raise FileExistsError(path)  # the repeated request finds the object of the first one

    with fault(lose), owner().locked():
        pass


@pytest.mark.parametrize("kind", [None, NotImplementedError("mode"), PermissionError("Forbidden")])
def test_a_store_that_keeps_nobody_out_or_cannot_be_written_is_refused(kind):
    def ignore(name, path, write):
        if kind is not None:
            raise kind
        write("overwrite") if name == "create" else write()

    with fault(ignore), pytest.raises(BadInput, match="bucket://b/runs/one: expected"):
        with owner().locked():
            pass


@pytest.mark.parametrize(
    "kind", ["checkpoints/", "metrics.jsonl", "manifest.json", "delete /b/runs/one/c"]
)
def test_a_write_that_is_refused_is_made_again_with_new_credentials(kind, elsewhere):
    opened = Bucket.opened

    def fail(name, path, write):
        if kind in f"{name} {path}" and Bucket.opened < opened + 2:
            raise PermissionError("ExpiredToken")
        write()

    with fault(fail):
        train(owner(), 8)
    elsewhere()
    assert newest(reader()) == 8 and metrics(reader()) == [*range(1, 9)]


def test_a_bucket_that_stays_shut_ends_the_run_and_what_was_saved_stays(elsewhere):
    def shut(name, path, write):
        raise PermissionError("AccessDenied")

    shutting = contextlib.ExitStack()
    with shutting, pytest.raises(RunFailed, match="object storage fails .*AccessDenied"):
        train(owner(), 6, lambda step: shutting.enter_context(fault(shut)))
    elsewhere()
    assert newest(reader()) == 2
    assert train(owner(), 6) == 2


def test_a_checkpoint_of_which_only_its_manifest_is_here_is_not_replaced(elsewhere):
    train(owner(), 4)
    elsewhere()
    with (place := owner()).locked():
        manifest = Bucket.store.pop("/b/runs/one/checkpoints/2/manifest.json")
        before = names(RUN)
        save(place, 6, keep=9)
        assert {*before} < {*names(RUN)}
        Bucket.store["/b/runs/one/checkpoints/2/manifest.json"] = manifest
    assert newest(reader()) == 6


def test_nothing_is_deleted_in_the_bucket_because_it_is_missing_here(elsewhere):
    with (place := owner()).locked():
        jsonlines.write(place.path / "config.yaml", ["run: {}"])
        save(place, 2)
        before = names(RUN)
        for file in [*place.path.iterdir()]:  # what cleans ~/.cache
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        place.push()
    assert names(RUN) == before
    elsewhere()
    assert newest(reader()) == 2


def test_the_bucket_decides_and_not_what_a_machine_had_before(elsewhere, monkeypatch, tmp_path):
    train(owner(), 4)
    dying = contextlib.ExitStack()
    with contextlib.suppress(Died), dying, (place := owner()).locked():
        dying.enter_context(fault(_die))
        save(place, 40)  # here, and not there
    elsewhere()
    assert train(owner(), 6) == 4
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert (place.path / "checkpoints" / "40").is_dir()
    for name in ("transcripts/5.jsonl", "transcripts/99.jsonl", "wandb/old", "config.yaml"):
        jsonlines.write(place.path / name, ["stale"])
    before = buckets.content(RUN, "transcripts/5.jsonl")
    assert train(owner(), 8) == 6
    assert metrics(reader()) == [*range(1, 9)]
    assert buckets.content(RUN, "transcripts/5.jsonl") == before
    assert not {"transcripts/99.jsonl", "wandb/old"} & {*names(RUN)}


def test_a_checkpoint_without_its_manifest_is_not_there_and_its_rest_is_removed(elsewhere):
    train(owner(), 4)
    del Bucket.store["/b/runs/one/checkpoints/4/manifest.json"]
    elsewhere()
    assert newest(reader()) == 2
    with owner().locked():
        assert not [name for name in names(RUN) if name.startswith("checkpoints/4/")]


def test_a_damaged_object_is_found_by_its_hash_and_not_by_its_size(elsewhere):
    train(owner(), 4)
    Bucket.store["/b/runs/one/checkpoints/4/state/d/arrays-4"].getbuffer()[7] ^= 1
    elsewhere()
    place = Mirror(RUN, trains=False)
    place.fetch_checkpoint(4)
    assert damage(place.path / "checkpoints" / "4") == "state/d/arrays-4 differs from its manifest"


def test_a_checkpoint_of_a_step_that_was_saved_before_replaces_all_of_it(elsewhere):
    with (place := owner()).locked():
        save(place, 2)
        with buckets.whole_folder(place.path / "checkpoints" / "2") as draft:
            (draft / "other").write_bytes(b"1")
            (draft / "meta.json").write_text("{}")
        place.push()
    assert not [name for name in names(RUN) if "arrays" in name]
    elsewhere()
    assert newest(reader()) == 2


def test_names_that_lead_elsewhere_are_not_written(elsewhere, tmp_path):
    train(owner(), 2)
    manifest = json.loads(buckets.content(RUN, "checkpoints/2/manifest.json"))
    for name in ("../outside", "a/../../outside", "/tmp/outside", "./b", "folder/"):
        Bucket().pipe_file(f"/b/runs/one/{name}", b"1")
        manifest[f"../../{name}"] = [1, "0"]
    Bucket().pipe_file("/b/runs/one/checkpoints/2/manifest.json", json.dumps(manifest).encode())
    elsewhere()
    run = reader()
    assert not [*tmp_path.rglob("outside"), *tmp_path.rglob("b")] and run.is_dir()


def test_who_reads_changes_nothing_and_keeps_what_it_adds(elsewhere):
    train(owner(), 4)
    before = names(RUN)
    elsewhere()
    place = Mirror(RUN, trains=False)
    with place.keeping("evaluations"):
        jsonlines.append(place.path / "evaluations" / "a.jsonl", ["{}"])
    place.push()
    assert names(RUN) == sorted([*before, "evaluations/a.jsonl"])
    elsewhere()
    place = Mirror(RUN, trains=False)
    with place.keeping("evaluations"):
        jsonlines.append(place.path / "evaluations" / "a.jsonl", ["{}"])
    assert buckets.content(RUN, "evaluations/a.jsonl") == b"{}\n{}\n"


def test_a_page_that_follows_a_run_looks_there_again(elsewhere, monkeypatch):
    train(owner(), 2)
    elsewhere()
    monkeypatch.setattr(serving, "_FETCH_S", 0.0)
    followed = serving._Followed([Mirror(RUN, trains=False)])
    before = followed.state()["words"]
    elsewhere()
    train(owner(), 4)
    assert ("step 2" in before, "step 4" in followed.state()["words"]) == (True, True), before


def test_a_slow_bucket_does_not_hold_up_the_lock(elsewhere, monkeypatch):
    """A save takes longer than three renewals, and the run is not taken meanwhile."""

    def slow(kind, path, write):
        time.sleep(0.2 if "checkpoints/" in path else 0)
        write()

    with (place := owner()).locked(), fault(slow):
        saving = threading.Thread(target=save, args=(place, 2))
        saving.start()
        elsewhere()
        with pytest.raises(BadInput, match="in use"), owner().locked():
            pass
        assert saving.is_alive()
        saving.join()
    assert newest(reader()) == 2
