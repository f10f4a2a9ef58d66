"""The programs in scripts/programs, with the packages that they are written for."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest
import small
from programs import TAGGED, play, turns_of, with_template

from marft_jax.extras.structured.grammar import constraint
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer


@pytest.fixture
def programs(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "scripts" / "programs")
    monkeypatch.setenv("DELAY", "0.02")


def by_length(request):
    return f"{len(request.prompt) * 7 % 10}+1={sum(request.key) % 9973}"


def test_plain_asyncio_repeats_whatever_its_delays(programs, monkeypatch):
    """Calls side by side over HTTP are answered together, in an order of their own."""
    pytest.importorskip("openai")
    import plain_openai

    runs = [play(plain_openai.play, monkeypatch, range(6), by_length) for _ in range(2)]
    assert turns_of(runs[0][0]) == turns_of(runs[1][0])
    for episode in runs[0][0].episodes:
        assert [(t.name, t.sees) for t in episode.turns] == [
            ("planner", ()), ("planner", ()), ("solver", (0, 1)),
        ]  # fmt: skip


def test_a_graph_of_langgraph_with_a_loop(programs, monkeypatch):
    pytest.importorskip("langgraph")
    pytest.importorskip("langchain_openai")
    import langgraph_drafts

    def speak(request):
        """The solver needs a second time, in every other task."""
        asked = bytes(i for i in request.prompt.tolist() if i < 256)
        is_first = asked.startswith(b"s") and not asked.endswith(b"again")
        return "none" if is_first and sum(request.key) % 2 else by_length(request)

    runs = [play(langgraph_drafts.play, monkeypatch, range(6), speak) for _ in range(2)]
    assert turns_of(runs[0][0]) == turns_of(runs[1][0])
    lengths = [len(episode.turns) for episode in runs[0][0].episodes]
    assert set(lengths) == {3, 4}
    for episode in runs[0][0].episodes:
        assert episode.results[0].info["rewritten"] == 0
        assert episode.turns[2].sees == (0,)
        assert all(t.sees == (0, 2) and t.start > 0 for t in episode.turns[3:])


@pytest.mark.parametrize(
    ("package", "program", "rewritten"),
    [("pydantic_ai", "pydantic_sum", 0), ("langchain", "langchain_sum", 0),
     ("smolagents", "smolagents_sum", None)],
)  # fmt: skip
def test_a_framework_that_requires_calls_or_a_form_of_the_answer(
    package, program, rewritten, programs, monkeypatch
):
    """What is sampled is any text of the form, and the framework can use it."""
    pytest.importorskip(package)
    pytest.importorskip("llguidance")
    tokenizer = ByteTokenizer()

    def speak(request):
        rng, ids = np.random.default_rng(sum(request.key) % 9973), list[int]()
        allowed = constraint(tokenizer, 264, request.form)
        while (mask := allowed(ids)) is not None:
            ids.append(int(rng.choice(np.flatnonzero(mask))))
        return tokenizer.decode(ids)

    team = small.team(2, context=30000, max_new_tokens=3000)
    module = importlib.import_module(program)
    played, engine = play(module.play, monkeypatch, range(3), speak, team=team)
    assert all(request.form for request in engine.requests)
    for episode in played.episodes:
        assert rewritten in (None, episode.results[0].info["rewritten"])


def test_a_handoff_of_the_agents_sdk(programs, monkeypatch):
    pytest.importorskip("agents")
    import agents_handoff

    def speak(request):
        asked = bytes(i for i in request.prompt.tolist() if i < 256)
        call = {"name": "transfer_to_solver", "arguments": {}}
        hands_over = b"transfer_to_solver" in asked and sum(request.key) % 2
        return f"<tool_call>{json.dumps(call)}</tool_call>" if hands_over else "so 7"

    team = small.team(2, context=3000, max_new_tokens=99)
    team = small.with_tokenizer(team, with_template(TAGGED))
    played, _ = play(agents_handoff.play, monkeypatch, range(1, 9), speak, team=team)
    names = [[turn.name for turn in episode.turns] for episode in played.episodes]
    assert ["planner", "solver"] in names and ["planner"] in names
    for episode in played.episodes:
        assert episode.results[0].info["rewritten"] == 0
        assert episode.turns[-1].sees == tuple(range(len(episode.turns) - 1))
    assert [e.reward for e in played.episodes] == [float(e.index == 7) for e in played.episodes]
