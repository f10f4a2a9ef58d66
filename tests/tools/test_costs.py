"""Each call costs something, whatever tool it names."""

from __future__ import annotations

import pytest
import small

from marft_jax.background import DaemonThreads
from marft_jax.learning.credit import make_credit
from marft_jax.learning.settings import Grpo
from marft_jax.tools.calls import ToolCall
from marft_jax.tools.toolbox import EpisodeTools, load_toolboxes

GOOD = '{"expression": "1+1"}'


def note(text: str) -> str:
    """Notes a text."""
    return text


CALLS = {
    "a known tool": ([("calculator", GOOD)], 0.25),
    "an unknown tool": ([("calculater", GOOD)], 0.25),
    "an empty name": ([("", "{}")], 0.25),
    "both": ([("note", '{"text": "a"}'), ("search", "{}")], 0.75),
    "wrong arguments": ([("calculator", '{"expresion": 1}')], 0.25),
    "arguments that are no JSON": ([("calculator", "{")], 0.25),
    "more calls than are answered": ([("calculator", GOOD)] * 18, 18 * 0.25),
    "more unknown calls than are answered": ([("x", "{}")] * 17, 17 * 0.25),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_call_costs(name):
    calls, expected = CALLS[name]
    entries = [{"calculator": {"cost": 0.25}}, {f"{__name__}:note": {"cost": 0.5}}]
    [box] = load_toolboxes({"solver": entries}, "team")
    tools = EpisodeTools(DaemonThreads())
    answered = tools.answer(box, [ToolCall(*call) for call in calls])
    tools.close()
    turn = small.turn(0, [1], [2])._replace(calls=answered)
    paid = make_credit(Grpo(), small.team(1))(small.episode(0, [turn], [1.0]))
    assert paid[0] == pytest.approx(1 - expected)
    assert len(answered) == len(calls)


def test_calls_without_a_cost_cost_nothing():
    [box] = load_toolboxes({"solver": ["calculator"]}, "team")
    assert (box.cost("calculator"), box.cost("unknown")) == (0, 0)
