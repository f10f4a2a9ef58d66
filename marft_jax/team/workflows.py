"""Workflows: who acts when, as one Python generator per episode.

A workflow gets the team and the first observation. It yields a list of ``Act`` and receives the
turns of these agents, which act at the same time; or it yields ``Step(turns)`` and receives the
environment's answer. It returns when the episode is over. ``_repeat`` below makes a workflow from a
generator of one step. A topology of your own is named as ``package.module:function``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any

from marft_jax.errors import BadInput
from marft_jax.plugins import check_takes, load_extra, load_plugin, shown
from marft_jax.team.orchestrator import parse_call
from marft_jax.team.profiles import last_answering
from marft_jax.team.prompts import State, Team
from marft_jax.team.protocol import Step
from marft_jax.types import Act, Turn, without_thinking

Workflow = Generator[Any, Any, None]
"""Yields ``list[Act]`` and receives ``list[Turn]``; yields ``Step``, receives ``StepResult``."""

_OneStep = Callable[[Team, State], Generator[Any, Any, Step]]


def sequential(team: Team, state: State) -> Generator[Any, Any, Step]:
    """Lets agents act one after another; each sees all actions before it in this step.

    D is the strict lower triangle (MARFT, section 3).
    """
    turns: list[Turn] = []
    for agent in range(len(team.profiles)):
        turns += yield [team.act(agent, state, turns)]
    return Step(turns)


def solo(team: Team, state: State) -> Generator[Any, Any, Step]:
    """Lets the last answering agent act alone: the baseline for a team."""
    return Step((yield [team.act(last_answering(team.profiles), state)]))


def dag(team: Team, state: State) -> Generator[Any, Any, Step]:
    """Lets the nodes of the team file's graph act, layer by layer; a layer acts at the same time.

    A node sees the actions of the nodes on which it depends, directly or indirectly. Of an
    answering agent, an action is graded unless a later action of the same agent depends on it.
    """
    graph, names = team.graph, team.names
    turns: dict[str, Turn] = {}
    for layer in graph.layers():
        acts: list[Act] = []
        for node in layer:
            visible = graph.ancestors(node)
            shown = [turn for id, turn in turns.items() if id in visible]
            acts.append(team.act(names.index(node.role), state, shown, node.message))
        turns |= zip((node.id for node in layer), (yield acts), strict=True)
    drafts = {
        draft.id
        for node in graph.nodes
        for draft in graph.nodes
        if draft.role == node.role and draft.id in graph.ancestors(node)
    }
    graded = [turn for id, turn in turns.items() if turn.answers and id not in drafts]
    return Step(list(turns.values()), graded=graded or None)


def orchestrated(team: Team, state: State) -> Generator[Any, Any, Step]:
    """Lets an orchestrator call one specialist after another, until it says done or calls none.

    Every agent sees all turns before. The last action of an answering agent is the team's answer.
    """
    assert team.orchestrator is not None
    specialists = [name for i, name in enumerate(team.names) if i != team.orchestrator]
    turns: list[Turn] = []
    for _ in range(team.max_steps):
        turns += yield [team.act(team.orchestrator, state, turns)]
        name = parse_call(without_thinking(turns[-1].text), specialists)
        if name is None:
            break
        turns += yield [team.act(team.names.index(name), state, turns)]
    return Step(turns, graded=[turn for turn in turns if turn.answers][-1:])


def debate(team: Team, state: State) -> Generator[Any, Any, Step]:
    """Lets all debaters answer at the same time, in rounds; each sees all last answers.

    Then the judge decides. Without a judge the most frequent answer of the last round wins, on a
    tie the earliest.
    """
    debaters = [agent for agent in range(len(team.profiles)) if agent != team.judge]
    turns, last = list[Turn](), list[Turn]()
    for _ in range(team.rounds):
        last = yield [team.act(agent, state, _visible(team, turns, last)) for agent in debaters]
        turns += last
    if team.judge is None:
        winner, votes = majority(last)
        return Step(turns, {"votes": votes}, [winner])
    [verdict] = yield [team.act(team.judge, state, _visible(team, turns, last))]
    return Step([*turns, verdict], graded=[verdict])


def players(team: Team, state: State) -> Generator[Any, Any, Step]:
    """Lets the agents act that the game names, each with its own view and legal moves."""
    if team.game is None:
        raise BadInput("--team.workflow players: expected a game, an environment with `players`")
    acting = list(team.game.acting())
    if not acting or not set(acting) <= set(team.names):
        raise BadInput(f"acting: expected some of {', '.join(team.names)}, got {shown(acting)}")
    legal = getattr(team.game, "legal", None)
    acts: list[Act] = []
    for name in acting:
        agent = team.names.index(name)
        texts = () if legal is None else legal(name)
        choices = tuple(team.ids_of(agent, text) for text in texts)
        acts.append(team.act(agent, state)._replace(choices=choices))
    turns = yield acts
    return Step(turns, graded=turns)


def majority(turns: Sequence[Turn]) -> tuple[Turn, dict[str, int]]:
    """Finds the first turn with the most frequent answer, and counts the answers.

    The answer of a text is its boxed part, the part after ``####``, or its last number; else the
    whole text.
    """
    from marft_jax.envs.grading.extract import extract
    from marft_jax.envs.grading.normalize import normalize

    texts = [without_thinking(turn.text) for turn in turns]
    answers = [normalize(extract(text, "0") or text) for text in texts]
    votes = Counter(answers)
    return turns[answers.index(votes.most_common(1)[0][0])], dict(votes)


def _visible(team: Team, turns: Sequence[Turn], last: Sequence[Turn]) -> Sequence[Turn]:
    """Returns the last answers; in a shared conversation all turns, as none can be left out."""
    return list(turns) if team.shared else last


def _repeat(step: _OneStep) -> Callable[[Team, str], Workflow]:
    """Makes a workflow that repeats a step, with the environment's feedback, until done."""

    def play(team: Team, observation: str) -> Workflow:
        state = State(observation)
        while True:
            acted = yield from step(team, state)
            result = yield acted
            if result.done:
                return
            state = state.after(acted.turns, result)

    return play


def _program(team: Team, observation: str) -> Workflow:
    """Plays an agent program of the user; see ``extras/gateway``."""
    return load_extra("program.workflow")(team, observation)


WORKFLOWS: dict[str, Callable[[Team, str], Workflow]] = {
    "program": _program,
    **{
        step.__name__: _repeat(step)
        for step in (sequential, dag, orchestrated, debate, solo, players)
    },
}


NEED_ENV = ("program", "players")
"""Workflows that need a special environment, not only questions."""


def find_workflow(name: str) -> Callable[[Team, str], Workflow]:
    """Finds a built-in workflow, or the function that ``package.module:function`` names.

    Raises:
        BadInput: there is no such workflow.
    """
    if name in WORKFLOWS:
        return WORKFLOWS[name]
    workflow = load_plugin(name, "--team.workflow", WORKFLOWS)
    check_takes(workflow, f"--team.workflow {name}", "team", "observation")
    return workflow
