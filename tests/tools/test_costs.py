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
    "both": ([("note", '{"text": "a"}'), ("search", "{}")], 0.75),
    "wrong arguments": ([("calculator", '{"expresion": 1}')], 0.25),
    "more calls than are answered": ([("calculator", GOOD)] * 18, 18 * 0.25),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_call_costs(name):
    calls, expected = CALLS[name]
    entries = [{"calculator": {"cost": 0.25}}, {f"{__name__}:note": {"cost": 0.5}}]
    [box] = load_toolboxes({"solver": entries}, "team")
    tools = EpisodeTools(DaemonThreads())
    answered = tools.answer(box, [ToolCall(*call) for call in calls])
    tools.close()
    turns = [small.turn(0, [1], [2])._replace(calls=answered), small.turn(1, [1], [2])]
    paid = make_credit(Grpo(), small.team(2)).pay(small.episode(0, turns, [1.0]))
    assert paid.tolist() == [pytest.approx(-expected), 1]  # the caller's alone
    assert len(answered) == len(calls)
    [free] = load_toolboxes({"solver": ["calculator"]}, "team")
    assert (free.cost("calculator"), free.cost("unknown")) == (0, 0)
