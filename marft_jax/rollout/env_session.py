"""Environment and workflow of one episode: users' code, called in threads and checked."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, TypeVar, cast

from marft_jax.envs.base import Env
from marft_jax.envs.threads import Calls
from marft_jax.errors import BadInput, Spot, place
from marft_jax.models.tokenizers.tokenizer import Message
from marft_jax.plugins import result_of, shown, text_of
from marft_jax.team.prompts import ContextFull, Team
from marft_jax.team.protocol import Pause, Step, check_acts, check_step
from marft_jax.team.workflows import Workflow
from marft_jax.tools import EpisodeTools, find_calls, messages_of
from marft_jax.types import Act, AnsweredCall, StepResult, Turn

_T = TypeVar("_T")


class Limits(NamedTuple):
    """Limits of an episode, and what is kept of it.

    Attributes:
        turns: of all agents, at most; an episode whose workflow wants more is truncated.
        tool_calls: of an agent in one act, at most.
        snapshots: take one after each step, of an environment that offers them.
    """

    turns: int
    tool_calls: int
    snapshots: bool


class End(NamedTuple):
    """The workflow returned; or ``truncated`` names the limit that ended it."""

    truncated: str = ""


class EnvSession:
    """Environment, workflow and tools of one episode.

    Its other methods run in threads, through ``call``. They check what users' code returns, and
    return plain values.

    Attributes:
        call, watch: wait for users' code, see ``Calls.start`` and ``Calls.watch``.
        task: number of the task.
        players: in a game, the player of each agent, by its name.
    """

    def __init__(
        self, team: Team, create_env: Callable[[], Env], calls: Calls, limits: Limits
    ) -> None:
        self._team, self._create, self.limits = team, create_env, limits
        self.call, self.watch = calls.start, calls.watch
        self._env: Any = None
        self._generator: Any = None
        self._tools = EpisodeTools(calls.threads)
        self._has_tool = False
        self.task = 0
        self.players: Mapping[str, str] = {}

    def reset(self, task: int) -> str:
        """Creates the environment and returns its first observation."""
        self.task, self._env = task, self._create()
        reset = self._env.reset
        observation = _checked(reset, text_of, "reset: the task", reset(task))
        self._has_tool = getattr(self._env, "tool", None) is not None
        if (players := getattr(self._env, "players", None)) is not None:
            names = self._team.names
            self.players = _checked(players, _players, players(names), names)
        return observation

    def start(
        self, workflow: Callable[[Team, str], Workflow], observation: str
    ) -> list[Act] | Step | Pause | End:
        """Starts the workflow, and returns what it wants first."""
        self._workflow, team = workflow, self._team
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

    def go_on(
        self, answer: Any, turns: Sequence[Turn], first: int
    ) -> list[Act] | Step | Pause | End:
        """Sends the workflow an answer, and returns what it wants next.

        Args:
            answer: turns of its acts, the result of its step, or the value of its pause.
            turns: all turns of the episode so far.
            first: index of the first turn of this step.
        """
        try:
            wanted = self._generator.send(answer)
        except StopIteration:
            if first == len(turns) > 0:
                return End()
            when = "without a Step, so nothing is graded" if turns else "before any agent acted"
            raise BadInput(f"--team.workflow: it returned {when}{place(self._workflow)}") from None
        except ContextFull:
            if not turns:
                raise
            return End("context")
        if isinstance(answer, StepResult) and answer.done:
            return End()  # whatever the workflow wants
        if isinstance(wanted, Pause):
            return wanted
        at = _frame_of(self._generator)
        if isinstance(wanted, Step):
            return _checked(at, check_step, wanted, turns, first, what="--team.workflow: ")
        most = self.limits.turns
        return _checked(at, check_acts, wanted, self._team, most, what="--team.workflow: ")

    def _view(self, agent: str, observation: str) -> str:
        view = self._env.view
        return _checked(view, text_of, "view", view(agent, observation))

    def step(self, turns: Sequence[Turn], acted: Sequence[str]) -> StepResult:
        """Steps the environment.

        Args:
            turns: turns that the workflow gives it.
            acted: names of the agents that acted in this step; they alone may be rewarded, but
                for the players of a game.
        """
        what, code = f"the step of environment {type(self._env).__name__}: ", self._env.step
        answer = code(turns)
        if (program := getattr(self._env, "play", None)) is not None:
            what, code = "what the program returned: ", program
        paid = {*self.players, *self.players.values()} or acted
        result = _checked(code, result_of, answer, paid, what=what)
        if self.limits.snapshots and hasattr(self._env, "snapshot"):
            result = result._replace(snapshot=self._env.snapshot())
        return result

    def restore(self, snapshot: Any) -> None:
        """Puts the environment into the state of a snapshot."""
        self._env.restore(snapshot)

    def may_call(self, agent: int, calls: int) -> bool:
        """True where an agent may call a tool of its own or of the environment.

        Args:
            calls: number of calls before it in its act.
        """
        has_tools = bool(self._team.tools[agent].sources) or self._has_tool
        return has_tools and calls < self.limits.tool_calls

    def answer_tools(
        self, turn: Turn, recorded: Sequence[AnsweredCall]
    ) -> tuple[list[Message], tuple[AnsweredCall, ...]] | None:
        """Answers a turn that calls tools of its agent, or else the environment's own tool, which
        finds its calls itself.

        Args:
            recorded: answers to the turn's calls, used in place of new calls.

        Returns:
            The answers as messages, and the calls of the agent's tools; None where the turn calls
            nothing.
        """
        box, tokenizer = self._team.tools[turn.agent], self._team.tokenizers[turn.agent]
        if recorded:
            self._tools.repeat(box, recorded)
            return messages_of(recorded), tuple(recorded)
        _, calls = find_calls(turn.action.tolist(), box.definitions, tokenizer, turn.form)
        names = {tool.name for tool in box.tools}
        if self._has_tool and not any(call.name in names for call in calls):
            tool = self._env.tool
            if (text := tool(turn)) is not None:
                text = _checked(tool, text_of, "the environment's tool", text)
                return [{"role": "user", "content": text}], ()
        answered = self._tools.answer(box, calls)
        return (messages_of(answered), answered) if calls else None

    def close(self) -> None:
        """Drops environment, workflow and tools; users' code may run then, too."""
        self._tools.close()
        generator, self._generator, self._env = self._generator, None, None
        if isinstance(generator, Generator):
            generator.close()


def _checked(at: Spot | None, check: Callable[..., _T], *values: Any, what: str = "") -> _T:
    """Checks what users' code returned; an error names the place of this code."""
    try:
        return check(*values)
    except BadInput as error:
        raise BadInput(f"{what}{error}{place(at)}") from None


def _players(players: Any, names: Sequence[str]) -> dict[str, str]:
    known = cast(dict[Any, Any], players if isinstance(players, Mapping) else {})
    if not all(known.get(name) for name in names):
        wanted = f"expected the player of each of {', '.join(names)}"
        raise BadInput(f"players: {wanted}, got {shown(players)}")
    return {name: text_of("players", known[name]) for name in names}


def _frame_of(generator: Any) -> FrameType | None:
    """Returns the frame in which a generator yielded."""
    while (inner := getattr(generator, "gi_yieldfrom", None)) is not None:
        generator = inner
    return getattr(generator, "gi_frame", None)
