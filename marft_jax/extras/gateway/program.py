"""An agent program of a user's, played as an environment and a workflow.

``--team.workflow program --env.name package.module:play``: ``play(task, client)`` gets the number
of its task and a client like OpenAI's, in which ``model`` is an agent's name; it returns its
reward, one for each agent by name, or a ``StepResult``. The environment runs the program, and the
workflow makes acts of its calls.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from marft_jax.envs.base import EnvSource, Split, first_seed
from marft_jax.errors import BadInput
from marft_jax.extras.gateway.answers import Choice
from marft_jax.extras.gateway.channel import Channel, PendingCall, Play
from marft_jax.extras.gateway.errors import ApiError
from marft_jax.extras.gateway.history import History
from marft_jax.team.prompts import Team
from marft_jax.team.protocol import Pause, Step
from marft_jax.team.workflows import Workflow
from marft_jax.types import Act, StepResult, Turn

if TYPE_CHECKING:
    from marft_jax.extras.gateway.endpoint import Endpoint

_WRONG = "--team.workflow program: expected together with --env.name package.module:play, a "
_WRONG += "function of (task, client); give both"


def source(play: Play, split: Split, is_game: bool = False) -> EnvSource:
    """Makes episodes of a program; episodes of an evaluation have other tasks.

    Args:
        is_game: each agent earns its own reward, and none is paid to the whole team.
    """
    from marft_jax.extras.gateway.client import make_client

    started, lock = list["Endpoint"](), threading.Lock()

    def enter(channel: Channel) -> str:
        from marft_jax.extras.gateway.endpoint import Endpoint

        with lock:
            if not started:
                started.append(Endpoint())
        return started[0].enter(channel)

    def create() -> ProgramEnv:
        channel = Channel(play, enter)
        channel.client = make_client(channel)
        return ProgramEnv(channel, first_seed(split), is_game)

    def close() -> None:
        while started:
            started.pop().close()

    return EnvSource(create, close=close)


class ProgramEnv:
    """Environment that is a run of a program: it pays what the program returns.

    Attributes:
        play: the program, whose results it returns.
        program: its calls, for the workflow.
        players: in a game, the player of each agent: itself.
    """

    def __init__(self, program: Channel, first: int, is_game: bool = False) -> None:
        self.program, self.play, self._first = program, program.play, first
        self.players = (lambda names: dict(zip(names, names, strict=True))) if is_game else None
        weakref.finalize(self, program.close)

    def reset(self, seed: int) -> str:
        self.program.task = seed + self._first
        return f"task {self.program.task}"

    def step(self, turns: Sequence[Turn]) -> StepResult:
        if not self.program.started:
            raise BadInput(_WRONG)
        program = self.program
        reward = program.sent if program.returned is None else program.returned
        if isinstance(reward, StepResult):
            return reward
        if isinstance(reward, Mapping):
            return StepResult("", 0.0, True, agent_rewards=reward)
        return StepResult("", reward, True)


def program(team: Team, observation: str) -> Workflow:
    """Lets agents act as the program of the environment calls them, until it returns."""
    channel: Channel | None = team.program
    if channel is None:
        raise BadInput(_WRONG)
    history, turns = History(team), list[Turn]()
    channel.start()
    while calls := (yield Pause(channel.begin)):
        ready = _acts(channel, history, calls)
        if not ready:
            continue
        acted = iter((yield [act for _, acts in ready for act in acts]))
        answers: list[tuple[PendingCall, list[Choice]]] = []
        for pending, acts in ready:
            turns += (turns_of_call := [*itertools.islice(acted, len(acts))])
            answers.append((pending, history.take(pending.call, turns_of_call)))
        channel.answer(answers)
    if not turns:
        why = f"; its last call was refused: {history.refused}" if history.refused else ""
        raise BadInput(f"--env.name: the program returned before an agent answered a call{why}")
    graded = [turn for turn in turns if turn.answers][-1:]
    yield Step(turns, {"rewritten": history.rewritten}, graded)


def _acts(
    channel: Channel, history: History, calls: Sequence[PendingCall]
) -> list[tuple[PendingCall, list[Act]]]:
    """Acts of each call; a call that is refused gets its error."""
    ready: list[tuple[PendingCall, list[Act]]] = []
    for pending in calls:
        try:
            ready.append((pending, history.acts(pending.call)))
        except ApiError as error:
            history.refused = str(error)
            channel.answer([(pending, error)])
    return ready
