"""The server's folder after a process that was killed at any moment, and on a disk that is full."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from marft_jax.errors import BadInput
from marft_jax.extras.gateway.tinker.store import LOST, Store
from marft_jax.policy import Adapter

MODEL = "one:train:0"


def adapter(value):
    return Adapter(8.0, {"q": {"a": np.full((1, 4, 2), value), "b": np.ones((1, 2, 4))}})


def value_of(store):
    return store.read_state(MODEL).factors["q"]["a"][0, 0, 0]


def opened(folder):
    return Store(folder, most_bytes=1 << 20)


def test_what_a_killed_process_left_half_done_is_done_again(tmp_path):
    store = opened(tmp_path)
    store.create_model(MODEL, adapter(0.0), {"model_id": MODEL})
    for number in range(1, 4):
        store.write_call(MODEL, number, "optim_step", b"call %d" % number)
    store.write_answer(MODEL, 1, b"1", adapter(1.0))
    states = tmp_path / "models" / "one.train.0"
    (states / "state-000000002").write_bytes(b"ha")  # whole or not, it does not count yet
    (states / ".state-000000003.4711").write_bytes(b"ha")
    store.write_answer(MODEL, 2, b"2")  # of a pass, which leaves no state
    again = opened(tmp_path)
    assert [*again.models()] == [{"model_id": MODEL, "number": 1}] and value_of(again) == 1
    assert again.calls(MODEL, 1) == [(2, "optim_step", b"call 2"), (3, "optim_step", b"call 3")]
    assert [again.read_answer(MODEL, n) for n in (1, 2, 3, 4)] == [b"1", b"2", None, None]
    again.write_answer(MODEL, 3, b"3", adapter(3.0))
    assert value_of(again) == 3 and again.calls(MODEL, 3) == []
    assert [file.name for file in states.iterdir()] == ["state-000000003"]


def test_a_model_whose_folder_was_removed_is_gone_and_may_be_made_anew(tmp_path):
    store = opened(tmp_path)
    store.create_model(MODEL, adapter(1.0), {"model_id": MODEL})
    store.write_call(MODEL, 1, "optim_step", b"call")
    (tmp_path / "models" / "one.train.0" / "state-000000000").unlink()
    assert [*store.models()] == []
    store.create_model(MODEL, adapter(2.0), {"model_id": MODEL})
    assert value_of(store) == 2 and store.calls(MODEL, 0) == []


@pytest.mark.parametrize(
    ("name", "what"), [("sessions/a.json", "older"), ("server.db", "not a database")]
)
def test_a_folder_of_something_else_is_refused_and_left_as_it_is(name, what, tmp_path):
    (file := tmp_path / name).parent.mkdir(exist_ok=True)
    file.write_text("{}" * 999)
    with pytest.raises(BadInput, match=f"--run.dir {tmp_path}: .*{what}"):
        opened(tmp_path)
    assert file.read_text() == "{}" * 999


FULL = """
import resource, signal, sys
from pathlib import Path
sys.path.append(sys.argv[2])
from test_tinker_store import MODEL, adapter, opened
store = opened(Path(sys.argv[1]))
store.create_model(MODEL, adapter(0.0), {"model_id": MODEL})
store.write_call(MODEL, 1, "optim_step", b"call")
store.write_session("s", {})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
size = Path(sys.argv[1], "server.db").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
for keep in (lambda: store.write_call(MODEL, 2, "optim_step", b"x" * size),
             lambda: store.write_answer(MODEL, 1, b"x" * size)):
    try:
        keep()
        print("kept")
    except OSError as error:
        print(error.strerror)
store.lose(MODEL, 1)
"""


def test_a_call_that_a_full_disk_failed_can_still_be_marked(tmp_path, request):
    run = tmp_path / "run"
    command = [sys.executable, "-c", FULL, str(run), str(request.path.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "kept" not in done.stdout and len(done.stdout.splitlines()) == 2
    assert opened(run).calls(MODEL, 0) == [(1, LOST, b"call")]
