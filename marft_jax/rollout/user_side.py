"""User's side of an episode: environment and workflow, called in threads and checked."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

from marft_jax.envs.base import Env
from marft_jax.errors import BadInput, place
from marft_jax.models.tokenizers.tokenizer import Message
from marft_jax.plugins import result_of, shown, text_of
from marft_jax.team.prompts import ContextFull, Team
from marft_jax.team.protocol import Step, check_acts, check_step
from marft_jax.team.workflows import Workflow, find_workflow
from marft_jax.tools import answer_calls, find_calls
from marft_jax.types import Act, StepResult, Turn


class Rules(NamedTuple):
    """Settings that all episodes of a play share, as of ``Rollout``."""

    team: Team
    workflow: Callable[[Team, str], Workflow]
    create_env: Callable[[], Env]
    max_turns: int
    max_tool_calls: int
    snapshots: bool  # of environments that offer them, after each step

    def alone(self, agent: int) -> Rules:
        """Rules of that agent alone."""
        return self._replace(team=self.team.alone(agent), workflow=find_workflow("solo"))


class End(NamedTuple):
    """Workflow returned, or was cut short by what ``truncated`` names."""

    truncated: str = ""


class UserSide:
    """Environment and workflow of an episode. Its methods run in threads, return plain values."""

    def __init__(self, rules: Rules, task: int):
        self._rules, self._task = rules, task
        self._env: Any = None
        self._generator: Any = None
        self._has_tool = False
        self.players: Mapping[str, str] = {}  # of a game: the player of each agent

    def reset(self) -> str:
        self._env = self._rules.create_env()
        observation = text_of("reset: the task", self._env.reset(self._task))
        self._has_tool = getattr(self._env, "tool", None) is not None
        if getattr(self._env, "players", None) is not None:
            self.players = _players(self._env, self._rules.team.names)
        return observation

    def begin(self, observation: str) -> list[Act] | Step | End:
        """Starts the workflow, and checks what it wants first."""
        team, workflow = self._rules.team, self._rules.workflow
        if getattr(self._env, "view", None) is not None:
            if team.shared:
                raise BadInput(
                    "--team.context shared: this environment shows each agent a part of the "
                    "state, and a conversation shows all of them everything; use own"
                )
            team = team._replace(view=self._view)
        game = self._env if self.players else None
        team = team._replace(program=getattr(self._env, "program", None), game=game)
        self._generator = workflow(team, observation)
        if not isinstance(self._generator, Generator):
            raise BadInput(
                "--team.workflow: expected a generator function, one with `yield`, but it "
                f"returned {shown(self._generator)}{place(workflow)}"
            )
        return self.go_on(None, (), 0)

    def go_on(self, answer: Any, turns: Sequence[Turn], first: int) -> list[Act] | Step | End:
        """Gives the workflow its answer, and checks what it wants next; ``turns`` are those of the
        episode so far, ``first`` is the number of the first one of this step."""
        try:
            wanted = self._generator.send(answer)
        except StopIteration:
            if first == len(turns) > 0:
                return End()
            when = "without a Step, so nothing is graded" if turns else "before any agent acted"
            raise BadInput(
                f"--team.workflow: it returned {when}{place(self._rules.workflow)}"
            ) from None
        except ContextFull:
            if not turns:
                raise
            return End("context")
        if isinstance(answer, StepResult) and answer.done:
            return End()  # whatever the workflow wants
        try:
            if isinstance(wanted, Step):
                return check_step(wanted, turns, first)
            return check_acts(wanted, self._rules.team, len(turns), self._rules.max_turns)
        except BadInput as error:
            raise BadInput(f"--team.workflow: {error}{_place_in(self._generator)}") from None

    def _view(self, agent: str, observation: str) -> str:
        return text_of("view", self._env.view(agent, observation))

    def step(self, turns: Sequence[Turn], acted: Sequence[str]) -> StepResult:
        answer = self._env.step(turns)
        try:
            result = result_of(answer, {*self.players, *self.players.values()} or acted)
        except BadInput as error:
            what = f"the step of environment {type(self._env).__name__}"
            raise BadInput(f"{what}: {error}{place(self._env.step)}") from None
        if self._rules.snapshots and hasattr(self._env, "snapshot"):
            result = result._replace(snapshot=self._env.snapshot())
        return result

    def restore(self, snapshot: Any) -> None:
        self._env.restore(snapshot)

    def may_call(self, turn: Turn, number: int) -> bool:
        """True where a turn, the ``number``-th of its act, may call a tool of its agent or of the
        environment."""
        has_tools = bool(self._rules.team.tools_of(turn.agent)) or self._has_tool
        return has_tools and number <= self._rules.max_tool_calls

    def answer_tools(self, turn: Turn) -> list[Message]:
        """Answers the calls of a turn: of its agent's tools, else of the environment's own tool,
        which finds its calls itself. Returns no messages where the turn calls nothing."""
        tools = self._rules.team.tools_of(turn.agent)
        names = [tool.name for tool in tools]
        _, calls = find_calls(turn.text, names, self._rules.team.tokenizers[turn.agent])
        if calls or not self._has_tool:
            return answer_calls(tools, calls)
        answer = self._env.tool(turn)
        if answer is None:
            return []
        return [{"role": "user", "content": text_of("the environment's tool", answer)}]

    def close(self) -> None:
        """Drops environment and workflow; what they do then is users' code, too."""
        generator, self._generator, self._env = self._generator, None, None
        if isinstance(generator, Generator):
            generator.close()


def _players(env: Any, names: Sequence[str]) -> dict[str, str]:
    found: Mapping[str, Any] | None = env.players(names)
    if not isinstance(found, Mapping) or not all(found.get(name) for name in names):
        raise BadInput(f"players: expected the player of each of {', '.join(names)}, got "
                       f"{shown(found)}{place(env.players)}")  # fmt: skip
    return {name: text_of("players", found[name]) for name in names}


def _place_in(generator: Any) -> str:
    """Finds where it yielded."""
    while (inner := getattr(generator, "gi_yieldfrom", None)) is not None:
        generator = inner
    return place(getattr(generator, "gi_frame", None))
