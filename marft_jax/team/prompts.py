"""Prompts: what an agent sees when it acts, in training as in evaluation and chat.

The dependency function D is written down from what was shown, so the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from marft_jax.errors import BadInput
from marft_jax.models.tokenizers.tokenizer import Message, Tokenizer, Tools
from marft_jax.team.dag import Graph
from marft_jax.team.orchestrator import strip_calls
from marft_jax.team.profiles import Profile
from marft_jax.tools import Tool
from marft_jax.types import Act, Sampling, StepResult, Turn

_RESERVED = 64  # of a growing conversation's room: for the messages of those who come after


class ContextFull(BadInput):
    """A prompt leaves no room for a single new token."""


class State(NamedTuple):
    """State of the game that a step begins in."""

    observation: str
    step: int = 0  # of the episode
    past: tuple[Turn, ...] = ()  # turns of earlier steps, of which the observation was made
    feedback: str = ""  # what is new in the observation, for those who still see what was before

    def after(self, turns: Sequence[Turn], result: StepResult) -> State:
        """Returns the next step's state."""
        feedback = result.feedback or result.observation
        return State(result.observation, self.step + 1, (*self.past, *turns), feedback)


class Team(NamedTuple):
    """A LaMAS: its members, how each samples, what each owns and is shown."""

    profiles: tuple[Profile, ...]  # in acting order
    sampling: tuple[Sampling, ...]  # of each member
    owners: tuple[int, ...]  # the adapter of each member
    adapter_names: tuple[str, ...]  # each that of its only owner, of its group, or ``team``
    trainable: tuple[bool, ...]  # adapters that learn
    context: int  # the longest prompt plus action, in tokens
    tokenizer: Tokenizer
    shared: bool = False  # all continue one conversation; else each gets a prompt of its own
    anonymous: bool = False  # no names, no system prompts
    graph: Graph = Graph()  # of a ``dag``
    messages: tuple[str, ...] = ()  # shown to each agent when its turn comes; or none
    opener: int = 0  # the agent whose system prompt opens a shared conversation
    orchestrator: int | None = None  # the agent that calls the others
    judge: int | None = None  # the agent that ends a debate
    rounds: int = 2  # of a debate
    max_steps: int = 10  # calls of an orchestrator
    tools: tuple[tuple[Tool, ...], ...] = ()  # of each member; or none
    view: Callable[[str, str], str] | None = None  # (name, observation) to what that agent sees
    program: Any = None  # the environment's, whose calls the workflow ``program`` answers
    game: Any = None  # the environment, where it is an ``envs.base.Game``

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(profile.name for profile in self.profiles)

    @property
    def adapters(self) -> int:
        """Number of adapters."""
        return len(self.adapter_names)

    def tools_of(self, agent: int) -> tuple[Tool, ...]:
        """Tools that an agent may call."""
        return self.tools[agent] if self.tools else ()

    def alone(self, agent: int) -> Team:
        """Returns the team for the workflow ``solo``, in which this agent acts and is graded."""
        own = [replace(p, answers=i == agent) for i, p in enumerate(self.profiles)]
        return self._replace(profiles=tuple(own), opener=agent, orchestrator=None, judge=None)

    def act(self, agent: int, state: State, turns: Sequence[Turn] = (), message: str = "") -> Act:
        """Asks ``agent`` to act, showing it the state and the given earlier turns of this step.

        Its own context: its system prompt, then one user message: the observation, below it a
        line ``name: text`` for each visible turn, and the message. A shared context: the ids of
        all that those turns and the earlier steps' read and wrote, then a user message: what is
        new, the agent's system prompt where it was not given before, and the message. New tokens
        are capped to the room that is left. It sees the turns of earlier steps in the observation,
        which the environment made of them, or word for word.

        Args:
            turns: the turns of this step that it may see, in acting order.
            message: by default the team file's, and in a shared context else that it is its turn.

        Raises:
            ContextFull: the prompt fills the context.
        """
        message = message or (self.messages[agent] if self.messages else "")
        if self.shared:
            seen = [*state.past, *turns]
            prompt, start = self._continued_prompt(agent, state, seen, bool(turns), message)
        else:
            visible = [turn for turn in turns if self._line(turn)]
            seen = [*state.past, *visible]
            prompt, start = self._own_prompt(agent, state, visible, message), 0
        return self._fitted(agent, prompt, state.step, tuple(t.index for t in seen), start)

    def ids_of(self, text: str) -> tuple[int, ...]:
        """Ids of an action with this text, its end included."""
        return (*self.tokenizer.encode(text), self.tokenizer.end_id)

    def resume(self, turn: Turn, new: Sequence[Message], tools: Tools = ()) -> Act | None:
        """Lets an agent go on after its own turn, shown more; None where no room is left.

        Its prompt is all it read and wrote before, id by id, and messages of others.
        """
        before = [*turn.prompt.tolist(), *self._ended(turn)]
        prompt = [*before, *self.tokenizer.reply(new, tools=tools)]
        try:
            return self._fitted(turn.agent, prompt, turn.step, turn.sees, len(before))
        except ContextFull:
            return None

    def _fitted(
        self, agent: int, prompt: list[int], step: int, sees: tuple[int, ...], start: int
    ) -> Act:
        """Makes an act with as many new tokens as there is room for."""
        room = self.context - len(prompt) - (_RESERVED if self.shared else 0)
        if room < 1:
            raise ContextFull(
                f"the prompt of agent {self.profiles[agent].name!r} has {len(prompt)} tokens, too "
                f"many for --model.context {self.context}: raise it, or shorten the task"
            )
        sampling = self.sampling[agent]
        sampling = sampling._replace(max_new_tokens=min(sampling.max_new_tokens, room))
        return Act(agent, np.asarray(prompt, np.int32), step, sees, sampling, start)

    def _own_prompt(
        self, agent: int, state: State, turns: Sequence[Turn], message: str
    ) -> list[int]:
        seen = state.observation
        if self.view is not None:
            seen = self.view(self.profiles[agent].name, seen)
        lines = [seen, *map(self._line, turns)]
        messages = self._opening(agent, [*lines, message] if message else lines)
        return self.tokenizer.chat(messages, [tool.definition for tool in self.tools_of(agent)])

    def _continued_prompt(
        self, agent: int, state: State, seen: Sequence[Turn], in_step: bool, message: str
    ) -> tuple[list[int], int]:
        """Returns the prompt, and how many of its ids are those of the conversation so far."""
        if seen:
            before, generation = self._conversation(seen), []
        else:
            opening = self._opening(self.opener, [state.observation])
            before, generation = self.tokenizer.opening(opening)
            if agent == self.opener and not message:
                return [*before, *generation], len(before)
        is_known = agent == self.opener or any(turn.agent == agent for turn in seen)
        parts = [
            "" if in_step else state.feedback,
            "" if is_known else self._system(agent),
            message or self._your_turn(agent),
        ]
        text = "\n".join(part for part in parts if part)
        new: list[Message] = [{"role": "user", "content": text}]
        return [*before, *self.tokenizer.reply(new, after_action=bool(seen))], len(before)

    def _opening(self, agent: int, lines: Sequence[str]) -> list[Message]:
        system = self._system(agent)
        user: Message = {"role": "user", "content": "\n".join(lines)}
        return [{"role": "system", "content": system}, user] if system else [user]

    def _system(self, agent: int) -> str:
        return "" if self.anonymous else self.profiles[agent].prompt

    def _line(self, turn: Turn) -> str:
        """A turn as others read it; empty where there is nothing to read."""
        is_call = turn.agent == self.orchestrator
        text = strip_calls(turn.text) if is_call else turn.text
        return text if self.anonymous or (is_call and not text) else f"{turn.name}: {text}"

    def _your_turn(self, agent: int) -> str:
        if self.anonymous:
            return "Now it is the next agent's turn."
        profile = self.profiles[agent]
        if agent == self.orchestrator:
            return "Please decide the next step."
        return f"Now it is {profile.name}'s turn. {profile.description}".strip()

    def _conversation(self, turns: Sequence[Turn]) -> list[int]:
        """Concatenates all that those turns read and wrote, each id as it was, each piece once.
        Pieces of turns that acted side by side follow one another in acting order."""
        ids = turns[0].prompt[: turns[0].start].tolist()
        for turn in turns:
            ids += [*turn.prompt[turn.start :].tolist(), *self._ended(turn)]
        return ids

    def _ended(self, turn: Turn) -> list[int]:
        """A turn's action, with an end where it was cut off."""
        ids = turn.action.tolist()
        return ids if ids[-1] in self.tokenizer.eos_ids else [*ids, self.tokenizer.end_id]
