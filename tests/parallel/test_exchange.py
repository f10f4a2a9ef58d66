"""Episodes that travel between processes arrive as they were, and nothing else does."""

from __future__ import annotations

import json
import math
import pickle

import numpy as np
import pytest
import small

from marft_jax.errors import BadInput, RunFailed
from marft_jax.parallel import processes
from marft_jax.parallel.exchange import read_part, write_part
from marft_jax.settings.config import Mesh
from marft_jax.types import FailedEpisode, Played, StepResult

FAILED = FailedEpisode(7, 2, 1, "OSError: no such task")


def episodes():
    played = small.random_episodes(3, steps=2)
    info = {"verdict": "right\x1b", "seen": [1, 2], "nan": None}
    result = StepResult("state \u2028 \ud83d", math.nan, True, info, {"planner": 0.5})
    turn = small.turn(1, [], [], sees=(0, 2))._replace(choices=((1, 2), (3, 4)), form="{}")
    return [*played, played[0]._replace(turns=(turn,), results=(result,)), played[1]]


def played(episodes):
    return Played(episodes, [FAILED])


def test_episodes_arrive_as_they_were():
    sent = episodes()
    found, failure = read_part(write_part(played(sent)))
    assert failure is None and found.failed == [FAILED]
    for one, other in zip(sent, found.episodes, strict=True):
        assert one[:4] == other[:4]
        for turn, again in zip(one.turns, other.turns, strict=True):
            for key, value in turn._asdict().items():
                np.testing.assert_array_equal(getattr(again, key), value)
                assert not hasattr(value, "dtype") or getattr(again, key).dtype == value.dtype
    assert found.episodes[3].turns[0].choices == ((1, 2), (3, 4))
    result = found.episodes[3].results[0]
    assert math.isnan(result.reward) and result.observation == "state \u2028 \ud83d"
    assert result.agent_rewards == {"planner": 0.5}
    assert result.info == {"verdict": "right\x1b", "seen": [1, 2], "nan": None}


def test_why_a_process_could_not_play_arrives_too():
    nothing = Played([], [])
    assert read_part(write_part(nothing, ["Stopped", ""])) == (nothing, ["Stopped", ""])


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('executed')",)


def spoiled(change):
    part = json.loads(write_part(played(episodes())))
    change(part)
    return json.dumps(part).encode()


HOSTILE = {
    "a pickle": lambda: pickle.dumps(Evil()), "no JSON": lambda: b"{",
    "deep JSON": lambda: b"[" * 100_000, "no episodes": lambda: b'{"episodes": 3, "failure": null}',
    "a field too many": lambda: spoiled(lambda p: p["episodes"][0]["turns"][0].update(x=1)),
    "a field too few": lambda: spoiled(lambda p: p["episodes"][0].pop("task")),
    "no tokens": lambda: spoiled(lambda p: p["episodes"][0]["turns"][0].update(action=["a"])),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_anything_else_is_refused_and_nothing_is_executed(what):
    with pytest.raises(RunFailed, match="another process sent"):
        read_part(HOSTILE[what]())


@pytest.mark.parametrize(("changed", "message"), [
    ({"coordinator": "localhost"}, "expected HOST:PORT, or auto"),
    ({"coordinator": "localhost:99999"}, "expected HOST:PORT, or auto"),
    ({"process": 2}, "--mesh.process below N, got 2 and 2"),
    ({"processes": None}, "--mesh.processes N as well"),
])  # fmt: skip
def test_a_coordinator_that_cannot_be_is_bad_input(changed, message):
    known = {"coordinator": "localhost:1", "processes": 2, "process": 1, "wait_seconds": 0.2}
    with pytest.raises(BadInput, match=message):
        processes.start(Mesh(**(known | changed)))
