"""Calls of tools in episodes: recorded answers, lost episodes, metrics, and costs."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
import small
from scripted import Scripted, Slow, text

from marft_jax.background import DaemonThreads
from marft_jax.errors import EpisodesFailed, RunFailed
from marft_jax.formats import jsonlines
from marft_jax.learning.credit import groups_with_signal, make_credit
from marft_jax.learning.settings import Appo
from marft_jax.rollout import recorded
from marft_jax.rollout.collect import collect
from marft_jax.rollout.rollout import Rollout
from marft_jax.rollout.source import Job
from marft_jax.rollout.tool_health import ToolWatch, find_down
from marft_jax.run import metrics, training, transcripts
from marft_jax.run.playing import PlaySetup
from marft_jax.team.profiles import Profile
from marft_jax.team.team_files import Blueprint
from marft_jax.team.workflows import find_workflow
from marft_jax.types import AnsweredCall, Branch, Played, Sample

CALLED: list[int] = []


def note(n: int) -> int:
    """Notes that it was called."""
    CALLED.append(n)
    return n + 1


def down(n: int) -> int:
    """Is down."""
    raise ConnectionError("nobody is there")


NOTE = f"{__name__}:note"
PAIR = (
    Profile("planner", "p", tools=(NOTE, {f"{__name__}:down": {"cost": 0.5}})),
    Profile("solver", "s", answers=True, tools=(NOTE,)),
)


def speak(request):
    if request.key.call == 2:
        return "done"
    return f'```call note\n{{"n": {sum(request.key) % 97}}}\n```'


def rollout_of(workflow="sequential", speak=speak, **more):
    nodes = {"max_new_tokens": 90, "context": 4000}
    team = small.team_of(Blueprint(PAIR, "debate"), team_context="own", rounds=1, **nodes)
    engine = Scripted(speak)
    make = find_workflow(workflow)
    return Rollout(engine, team, make, lambda: Slow(2), DaemonThreads(), **more), team


def calls_in(episode):
    return [call for turn in episode.turns for call in turn.calls]


@pytest.mark.parametrize("workflow", ["sequential", "debate"])
def test_a_branch_is_fed_the_recorded_answers_and_calls_nothing_for_them(workflow):
    rollout, _ = rollout_of(workflow)
    CALLED.clear()
    trunks = rollout.play([Sample(i, i) for i in range(12)], 0).episodes
    assert len(CALLED) == sum(len(calls_in(e)) for e in trunks) > 90
    CALLED.clear()
    wanted = [Sample(*e[:3], Branch(e, e.index % len(e.turns), 1)) for e in trunks]
    branches = rollout.play(wanted, 0).episodes
    assert any(turn.replayed and turn.calls for e in branches for turn in e.turns)
    new = [call for e in branches for turn in e.turns if not turn.replayed for call in turn.calls]
    assert sorted(CALLED) == sorted(json.loads(call.arguments)["n"] for call in new)
    for trunk, branch in zip(trunks, branches, strict=True):
        for before, turn in zip(trunk.turns, branch.turns, strict=False):
            if turn.replayed:
                assert (turn.calls, turn.tool) == (before.calls, before.tool)


def test_a_transcript_is_replayed_with_its_answers_and_a_hand_written_line_calls(tmp_path):
    rollout, team = rollout_of()
    whole = rollout.play([Sample(i, i) for i in range(3)], 0).episodes
    rows = [json.loads(jsonlines.dumps(transcripts.record(e, team.decoders))) for e in whole]
    first = rows[0]["turns"][0]["calls"]
    assert set(first[0]) == {"name", "arguments", "answer", "verdict", "seconds", "cost"}
    first[0]["answer"] = "something else"
    for turn in rows[1]["turns"]:
        turn.pop("calls", None)  # only ``tool`` is left
    rows[2]["turns"][0]["calls"] = [{"name": "note"}]
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    found = [*recorded.read(str(file))]
    assert "turns[0].calls[0].arguments: expected text" in found.pop()
    CALLED.clear()
    fed, called = recorded.replay(found, rollout)
    assert fed.turns[0].tool == "something else"
    assert text(fed.turns[1].prompt).endswith("note: something else<a>")
    assert len(CALLED) == len(calls_in(called)) == len(calls_in(whole[1]))
    assert [call.answer for call in calls_in(called)] == [c.answer for c in calls_in(whole[1])]


def call(name="down", verdict="failed"):
    return AnsweredCall(name, "{}", "error: nobody is there", verdict, 0.5, 0.0)


class Player:
    """Episodes of one turn, whose calls are those of their task."""

    def __init__(self, calls):
        self.calls = calls

    def play(self, samples, step):
        episodes = []
        for sample in samples:
            turn = small.turn(0, [1], [2])._replace(calls=tuple(self.calls(sample.index)))
            made = small.episode(sample.index, [turn], [float(sample.index % 2)])
            episodes.append(made._replace(group=sample.group, member=sample.member))
        return Played(episodes, [])


def collected(calls, step=0):
    config = small.config(algo=Appo(episodes=8, group_size=2))
    credit = make_credit(config.algo, small.team())
    return collect(Player(calls), credit, groups_with_signal, config, step)


def test_episodes_in_which_a_tool_that_is_down_failed_are_lost_and_no_others():
    found = collected(lambda task: [call()] if task % 4 else [call("note", "ok")])
    assert {e.index % 4 for e in found.episodes} == {0} and found.failed == 6
    why = "6 of 6 calls failed, the last: error: nobody is there"
    assert find_down(found.calls) == {"down": why} and len(found.calls) == 8
    # half of its calls is not most of them
    mostly = collected(lambda task: [call(), call(verdict="ok")] if task % 4 else [])
    assert mostly.failed == 0 and not find_down(mostly.calls)
    wrong = collected(lambda task: [call(verdict="wrong")])
    assert wrong.failed == 0 and len(wrong.episodes) == 8
    with pytest.raises(EpisodesFailed, match="all episodes of the step are lost: tool down is"):
        collected(lambda task: [call()])


def test_a_tool_that_stays_down_is_named_and_ends_the_run(caplog):
    watch = ToolWatch()
    bad = collected(lambda task: [call()] if task % 4 else []).calls
    good = collected(lambda task: [call(verdict="ok")]).calls
    none = collected(lambda task: []).calls
    with caplog.at_level(logging.WARNING):
        for step, calls in enumerate((bad, bad, good, bad, none, bad)):
            watch.look(step, calls)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("step 1: tool down is down: 6 of 6 calls failed")
    counts = [line.rpartition("(")[2] for line in lines]
    assert counts == [f"step {n} of 3 in a row)" for n in (1, 2, 1, 2)]
    with pytest.raises(RunFailed, match="tool down was down for 3 steps in a row: .*; start again"):
        watch.look(6, bad)


def test_the_steps_of_a_run_are_watched(monkeypatch):
    player = Player(lambda task: [call()] if task % 4 else [])
    monkeypatch.setattr(training, "make_player", lambda *_, **__: player)
    config = small.config(algo=Appo(episodes=8, group_size=2))
    run = SimpleNamespace(
        config=config,
        models=SimpleNamespace(devices=SimpleNamespace(copy_adapters=None)),
        playing=PlaySetup(config, small.team(), None, None),
        curriculum=SimpleNamespace(source=lambda level: None),
        pipeline=None,
    )
    play = training.rollout_source(run).play
    for step in range(2):
        assert play(Job(step, step, {}, 0), lambda: False).failed == 6
    with pytest.raises(RunFailed, match="tool down was down for 3 steps in a row"):
        play(Job(2, 2, {}, 0), lambda: False)


def test_a_failure_of_a_real_tool_is_answered_and_makes_its_episode_lost():
    def speak(request):
        is_first = request.key.act == request.key.call == 0
        return '```call down\n{"n": 1}\n```' if is_first and request.key.task % 4 else "done"

    rollout, team = rollout_of(speak=speak)
    config = small.config(algo=Appo(episodes=8, group_size=1))
    found = collect(rollout, make_credit(config.algo, team), groups_with_signal, config, 0)
    assert found.failed == 6 and len(found.episodes) == 2
    assert "error: ConnectionError: nobody is there" in find_down(found.calls)["down"]


def test_metrics_count_calls_per_tool_and_agent():
    _, team = rollout_of()
    own = [(0, call("note", "ok")), (0, call())]
    found = metrics._of_tools([*own, (1, call("note", "wrong")), (1, call("x", "wrong"))], team)
    length = len(team.tokenizers[0].encode("error: nobody is there"))
    assert found["tool/note/calls"] == 2 and found["tool/note/wrong"] == 0.5
    assert found["tool/note/failed"] == 0 and found["tool/down/failed"] == 1
    assert found["tool/note/seconds"] == 0.5 and found["tool/note/tokens"] == length
    assert found["agent/planner/tool_calls"] == 2 and found["agent/planner/tool_failed"] == 0.5
    assert found["agent/solver/tool_wrong"] == 1 and "tool/x/calls" not in found
    assert metrics._of_tools([], team)["tool/down/calls"] == 0
    assert metrics._of_tools([], small.team()) == {}
