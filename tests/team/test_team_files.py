"""Team files: the wiring they describe, and one clear line for each thing that can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from marft_jax.errors import BadInput
from marft_jax.team.dag import Graph, Node, check_graph
from marft_jax.team.profiles import Profile
from marft_jax.team.team_files import Blueprint, dump_team, load_team

TEXT = """
workflow: dag
agents:
  - {name: planner, prompt: p}
  - {name: solver, prompt: s, answers: true}
nodes:
  - {id: plan, role: planner}
  - {id: one, role: solver}
  - {id: two, role: solver, message: Another way.}
edges: [[plan, one], [plan, two]]
messages: [Plan., Solve.]
orchestrator: planner
judge: solver
"""
BLUEPRINT = Blueprint(
    (Profile("planner", "p"), Profile("solver", "s", answers=True)),
    "dag",
    (Node("plan", "planner"), Node("one", "solver"), Node("two", "solver", "Another way.")),
    (("plan", "one"), ("plan", "two")),
    ("Plan.", "Solve."),
    "planner",
    "solver",
)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "team.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_says_who_the_members_are_and_how_they_are_wired(tmp_path):
    assert load_team(written(tmp_path, TEXT)) == BLUEPRINT


@pytest.mark.parametrize("blueprint", [BLUEPRINT, Blueprint(BLUEPRINT.agents), load_team(None)])
def test_what_is_dumped_loads_again(tmp_path, blueprint):
    assert load_team(written(tmp_path, dump_team(blueprint))) == blueprint


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("[Plan., Solve.]", "[Plan.]", "messages: expected one for each of the 2 agents, got 1"),
        ("[Plan., Solve.]", "[1, 2]", "messages[0]: expected text or none, got 1"),
        ("[plan, two]]", "[plan]]", "edges[1][1]: expected text, got ['plan']"),
        ("judge: solver", "judge: [solver]", "judge: expected text or none, got ['solver']"),
        ("prompt: p", "temperature: true", "agents[0].temperature: expected a number from 0 to"),
        ("prompt: p", "min_p: .nan", "expected a number from 0 to 1 or none, got nan"),
        ("name: planner", "name: team", "expected other names than 'team', which names all of"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, old, new, expected):
    with pytest.raises(BadInput) as caught:
        load_team(written(tmp_path, TEXT.replace(old, new)))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


NESTED = {
    "bases: {x: {model: tiny, quantise: int8}}": "quantise: unknown key; did you mean 'quantize'",
    "teacher: {answer: true}": "teacher.answer: unknown key; known are base, init, sees",
    "nodes: [{id: a, role: a, msg: x}]": "nodes[0].msg: unknown key; known are id, message, role",
    "temperature: 1": "temperature: unknown key; known are agents, bases, edges, judge, messages,",
    "bases: {x: }": "bases.x: expected a mapping, got None",
}
OF_AGENT = {
    "teacher: {see: answer}": "agents[0].teacher.see: unknown key; did you mean 'sees'",
    "model: tiny": "agents[0].model: unknown key; known are adapter, answers, base, description,",
    "max_tokens: 3": "agents[0].max_tokens: unknown key; did you mean 'max_new_tokens'",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [(f"{text}\nagents: [{{name: a, answers: true}}]", said) for text, said in NESTED.items()]
    + [(f"agents: [{{name: a, answers: true, {text}}}]", said) for text, said in OF_AGENT.items()],
)
def test_an_unknown_key_is_answered_with_the_keys_of_its_place(tmp_path, text, expected):
    with pytest.raises(BadInput) as caught:
        load_team(written(tmp_path, text))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_message_that_is_null_is_the_usual_one(tmp_path):
    blueprint = load_team(written(tmp_path, TEXT.replace("[Plan., Solve.]", "[Plan., null]")))
    assert blueprint.messages == ("Plan.", "")
    assert load_team(written(tmp_path, dump_team(blueprint))) == blueprint


def test_edges_without_nodes_are_refused(tmp_path):
    with pytest.raises(BadInput, match="edges: expected nodes too"):
        load_team(written(tmp_path, "agents: [{name: a, answers: true}]\nedges: [[a, b]]"))


A, B = Node("a", "planner"), Node("b", "solver")


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (Graph(), "expected nodes of the dag, got none"),
        (Graph((A,), (("x", "a"),)), "unknown node 'x'"),
        (Graph((A, B), (("a", "b"), ("b", "a"))), "expected no cycle, got one through a, b"),
        (Graph((A,), (("a", "a"),)), "expected no cycle, got one through a"),
        (Graph((Node("a", "poet"),)), "expected a role of planner, solver, got 'poet'"),
        (Graph((A, A)), "expected distinct ids, got 'a' twice"),
    ],
)
def test_a_graph_that_cannot_be_walked_is_refused(graph, expected):
    with pytest.raises(BadInput) as caught:
        check_graph(graph, ["planner", "solver"], "FILE")
    assert expected in str(caught.value)


def test_layers_are_topological_and_keep_the_files_order():
    nodes = tuple(Node(id, "planner") for id in "dcba")
    graph = Graph(nodes, (("a", "b"), ("b", "d"), ("c", "d")))
    assert [[node.id for node in layer] for layer in graph.layers()] == [["c", "a"], ["b"], ["d"]]
    assert graph.ancestors(nodes[0]) == {"a", "b", "c"}
    assert graph.ancestors(nodes[3]) == set()
