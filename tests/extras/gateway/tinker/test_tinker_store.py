"""The server's folder after a process that was killed at any moment."""

from __future__ import annotations

import numpy as np

from marft_jax.extras.gateway.tinker.store import ANSWER, Store
from marft_jax.policy import Adapter

MODEL = "one:train:0"
ADAPTER = Adapter(8.0, {"q": {"a": np.ones((1, 4, 2)), "b": np.ones((1, 2, 4))}})


def test_what_a_killed_process_left_half_written_is_no_call_and_stops_no_later_one(tmp_path):
    store = Store(tmp_path, durable=True, most_bytes=1 << 20)
    store.write_state(MODEL, 0, ADAPTER, {"model_id": MODEL})
    store.write_call(MODEL, 1, "optim_step", b"whole")
    calls = tmp_path / "models" / "one.train.0" / "calls"
    (calls / ".000000002.optim_step.4711").write_bytes(b"ha")
    (calls / ".000000001.answer.4711").write_bytes(b"{")
    store.write_state(MODEL, 1, ADAPTER, {"model_id": MODEL})  # while the process lives
    again = Store(tmp_path, durable=True, most_bytes=1 << 20)
    assert list(again.calls(MODEL, after=0)) == [(1, "optim_step", b"whole")]
    assert again.read_answer(MODEL, 1) is None and [*again.models()][0]["number"] == 1
    assert [file.name for file in calls.iterdir()] == ["000000001.optim_step"]
    again.write_call(MODEL, 1, ANSWER, b"{}")
    again.write_state(MODEL, 2, ADAPTER, {"model_id": MODEL})
    assert again.read_answer(MODEL, 1) == b"{}"
