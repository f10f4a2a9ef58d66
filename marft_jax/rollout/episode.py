"""One episode, from its reset to its end.

``play_episode`` runs in the thread that plays. Environment, workflow and tools run in threads of
their own (``env_session``); whoever runs the coroutine decides when an answer that has come is used
(``rounds``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from marft_jax.plugins import load_extra
from marft_jax.rollout.actions import TurnSampler, expect
from marft_jax.rollout.env_session import End, EnvSession
from marft_jax.rollout.rounds import together
from marft_jax.team.prompts import Team
from marft_jax.team.protocol import Pause, Step
from marft_jax.team.workflows import Workflow
from marft_jax.types import Act, Branch, Episode, Sample, StepResult, Turn


async def play_episode(
    team: Team,
    workflow: Callable[[Team, str], Workflow],
    env: EnvSession,
    sample: Sample,
    sampler: TurnSampler,
) -> Episode:
    """Plays an episode from its reset to its end.

    A branch is played from its beginning like any other episode; its ``sampler`` repeats the turns
    of the trunk.

    Raises:
        Failure: it cannot be played to its end.
    """
    turns, results, branch = list[Turn](), list[StepResult](), sample.branch
    first = 0  # index of the first turn of this step
    call_workflow = functools.partial(env.call, "the workflow", serialised=True)
    task = await env.call("reset", env.reset, sample.index)
    wanted = await call_workflow(env.start, workflow, task)
    while not isinstance(wanted, End):
        if isinstance(wanted, Step):
            answer = await _step(env, wanted, turns[first:], branch, len(results))
            graded = {turn.index: turn for turn in wanted.turns}
            turns[first:] = [graded.get(t.index, t._replace(answers=False)) for t in turns[first:]]
            results.append(answer)
            first = len(turns)
            if branch and branch.stops and first > branch.turn:
                break
        elif isinstance(wanted, Pause):
            answer = await env.watch("the program", wanted.begin)
        elif len(turns) + len(wanted) > env.limits.turns:
            wanted = End("turns")
            break
        else:
            acts = [act._replace(step=len(results)) for act in wanted]
            answer = await _act(team, env, sampler, acts, turns)
        wanted = await call_workflow(env.go_on, answer, tuple(turns), first)
    if isinstance(wanted, End) and wanted.truncated:  # the episode keeps what it has earned
        results.append(StepResult("", 0.0, True, {"truncated": wanted.truncated}))
    kind = None if sample.alone is None else (-1, sample.alone)
    kind = (branch.turn, branch.number) if branch else kind
    return Episode(*sample[:3], task, tuple(turns), tuple(results), kind)


async def _step(
    env: EnvSession, step: Step, turns: Sequence[Turn], branch: Branch | None, number: int
) -> StepResult:
    """Gets the environment's answer to a step; a branch repeats that of its trunk.

    Args:
        turns: all turns of the step.
        number: of the step.
    """
    before = None
    if branch and all(turn.replayed for turn in turns):
        before = branch.trunk.results[number]
        if before.snapshot is not None:
            await env.call("restore", env.restore, before.snapshot)
            return before
    acted = [turn.name for turn in turns]
    result = await env.call("step", env.step, tuple(map(_graded, step.turns)), acted)
    result = result._replace(info={**result.info, **step.info})
    if before is not None:
        expect(env.task, "answer to a step", before, result)
    return result


def _graded(turn: Turn) -> Turn:
    """Returns the turn as it is graded: without a text that breaks its schema."""
    wrong = bool(turn.form) and load_extra("form.violates")(turn.form, turn.text)
    return turn._replace(text="") if wrong else turn


async def _act(
    team: Team, env: EnvSession, sampler: TurnSampler, acts: Sequence[Act], turns: list[Turn]
) -> list[Turn]:
    """Lets agents act together; adds their turns to ``turns`` and returns the last of each."""
    acted, begun = sum(turn.tool is None for turn in turns), len(turns)
    numbers = range(acted, acted + len(acts))

    async def act_of(number: int, act: Act | None) -> list[Turn]:
        """Lets one agent act, and again after each call of a tool."""
        nonlocal begun
        turns_of_act = list[Turn]()
        while act is not None:
            begun += 1
            calls = len(turns_of_act)
            may_call = begun < env.limits.turns and env.may_call(act.agent, calls)
            act = act if may_call else team.without_calls(act)
            turn = await sampler(act, (number, calls), numbers)
            turn, act = await _use_tools(team, env, turn, may_call)
            turns_of_act.append(turn)
        return turns_of_act

    answers = list[Turn]()
    for turns_of_act in await together(list(map(act_of, numbers, acts))):
        first = len(turns)
        for call, turn in enumerate(turns_of_act):
            before = range(first, first + call)  # the agent's turns before its last tool call
            turns.append(turn._replace(index=first + call, sees=(*turn.sees, *before)))
        answers.append(turns[-1])
    return answers


async def _use_tools(
    team: Team, env: EnvSession, turn: Turn, may_call: bool
) -> tuple[Turn, Act | None]:
    """Answers what a turn calls. Returns the turn with its calls, and the act in which the agent
    goes on; None where it called nothing, or has no room to go on."""
    recorded = turn
    turn = turn._replace(player=env.players.get(turn.name, ""), calls=(), tool=None)
    answered = None
    if may_call:
        answered = await env.call("tool", env.answer_tools, turn, recorded.calls)
    if answered is None:
        return turn, None
    messages, calls = answered
    turn = turn._replace(calls=calls)
    act = team.resume(turn, messages, team.tools[turn.agent].definitions)
    if act is None:
        return turn, None
    answer = "\n".join(message["content"] for message in messages)
    if turn.replayed:
        expect(env.task, "tool's answer", recorded.tool, answer)
    return turn._replace(answers=False, tool=answer), act
