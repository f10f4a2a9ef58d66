"""Prompts: what an agent sees when it acts, the same in training, evaluation and chat.

The dependency function D is recorded from what was shown, so it always matches the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from marft_jax.errors import BadInput
from marft_jax.models.tokenizers.tokenizer import Message, Tokenizer, Tools
from marft_jax.team.bases import folder_of
from marft_jax.team.dag import Graph
from marft_jax.team.orchestrator import strip_calls
from marft_jax.team.profiles import Profile
from marft_jax.team.teachers import Teacher
from marft_jax.tools import Toolbox, for_model
from marft_jax.types import Act, Sampling, StepResult, Turn, without_thinking

_RESERVED = 64  # tokens of a shared conversation kept free for the messages of later agents


class ContextFull(BadInput):
    """A prompt leaves no room for a new token."""


class State(NamedTuple):
    """State in which a step begins.

    Attributes:
        step: number of the step in the episode.
        past: turns of earlier steps.
        feedback: what is new in the observation, for a conversation that has the earlier ones.
    """

    observation: str
    step: int = 0
    past: tuple[Turn, ...] = ()
    feedback: str = ""

    def after(self, turns: Sequence[Turn], result: StepResult) -> State:
        """Returns the next step's state."""
        feedback = result.feedback or result.observation
        return State(result.observation, self.step + 1, (*self.past, *turns), feedback)


class Team(NamedTuple):
    """A LaMAS: its members, their sampling and adapters, and what each member sees."""

    profiles: tuple[Profile, ...]  # in acting order
    sampling: tuple[Sampling, ...]  # of each member
    bases: tuple[str, ...]  # the name of the base of each member
    owners: tuple[int, ...]  # the adapter of each member, among those of its base
    tokenizers: tuple[Tokenizer, ...]  # of each member
    contexts: tuple[int, ...]  # of each member: longest prompt plus action, in tokens
    # of each base: an adapter is named after its only owner, its group, or ``team``
    adapter_names: Mapping[str, tuple[str, ...]]
    trainable: Mapping[str, tuple[bool, ...]]  # adapters of each base that learn
    workflow: str = "sequential"  # the name of who acts when
    shared: bool = False  # all members continue one conversation
    anonymous: bool = False  # no names, no system prompts
    graph: Graph = Graph()  # of a ``dag``
    messages: tuple[str, ...] = ()  # of each member, shown when its turn comes; "" for none
    opener: int = 0  # agent whose system prompt opens a shared conversation
    orchestrator: int | None = None  # agent that calls the others
    judge: int | None = None  # agent that decides a debate
    rounds: int = 2  # of a debate
    max_steps: int = 10  # calls of an orchestrator
    tools: tuple[Toolbox, ...] = ()  # of each member
    forms: tuple[str, ...] = ()  # of each member's texts where it may call its tools; "" for any
    teachers: tuple[Teacher | None, ...] = ()  # of each member
    view: Callable[[str, str], str] | None = None  # maps (name, observation) to the shown text
    program: Any = None  # of the environment; the workflow ``program`` answers its calls
    game: Any = None  # the environment, if it is an ``envs.base.Game``

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(profile.name for profile in self.profiles)

    @property
    def decoders(self) -> list[Callable[..., str]]:
        """Ids to text, of each agent."""
        return [tokenizer.decode for tokenizer in self.tokenizers]

    @property
    def adapters(self) -> dict[str, int]:
        """Number of adapters of each base."""
        return {base: len(names) for base, names in self.adapter_names.items()}

    @property
    def numbers(self) -> dict[str, tuple[int, ...]]:
        """Numbers of each base's adapters in the team, in the order in which agents first use
        them."""
        order = list(dict.fromkeys(zip(self.bases, self.owners, strict=True)))
        return {
            base: tuple(order.index((base, n)) for n in range(count))
            for base, count in self.adapters.items()
        }

    @property
    def learning_bases(self) -> tuple[str, ...]:
        """Bases with an adapter that learns."""
        return tuple(base for base, learns in self.trainable.items() if any(learns))

    def folder_of(self, base: str, n: int) -> str:
        """Names the folder of an adapter in an export, see ``bases.folder_of``."""
        return folder_of(self.adapter_names[base][n], base, several=len(self.adapter_names) > 1)

    def alone(self, agent: int) -> Team:
        """Returns the team for the workflow ``solo``, in which this agent acts and is graded."""
        profiles = tuple(replace(p, answers=i == agent) for i, p in enumerate(self.profiles))
        return self._replace(profiles=profiles, opener=agent, orchestrator=None, judge=None)

    def system_of(self, agent: int) -> str:
        """Returns an agent's system prompt, with its tools where the chat template has none."""
        tokenizer, tools = self.tokenizers[agent], self.tools[agent].definitions
        messages, _ = for_model(self._opening(agent, [""]), tools, tokenizer)
        return next((m["content"] for m in messages if m["role"] == "system"), "")

    def act(self, agent: int, state: State, turns: Sequence[Turn] = (), message: str = "") -> Act:
        """Makes an act of an agent, which sees the state and the given turns of this step.

        Own context: the agent's system prompt, then one user message with the observation, a line
        ``name: text`` for each visible turn, and the message. Turns of earlier steps are part of
        the observation. Shared context: the ids that all these turns and those of earlier steps
        read and wrote, then a user message with what is new, the agent's system prompt if it has
        not acted before, and the message. New tokens are limited to the room that is left.

        Args:
            turns: turns of this step that the agent sees, in acting order.
            message: text for the agent. Default: that of the team file; in a shared context
                otherwise a line that says that it is the agent's turn.

        Raises:
            ContextFull: the prompt fills the context.
        """
        if self.shared:
            seen = [*state.past, *turns]
            prompt, start = self._continued_prompt(agent, state, seen, bool(turns), message)
        else:
            seen = [*state.past, *(turn for turn in turns if self._line(turn))]
            messages, tokenizer = self.shown(agent, state, turns, message), self.tokenizers[agent]
            shown = for_model(messages, self.tools[agent].definitions, tokenizer)
            prompt, start = tokenizer.chat(*shown), 0
        return self._fitted(agent, prompt, state.step, tuple(t.index for t in seen), start)

    def shown(
        self, agent: int, state: State, turns: Sequence[Turn] = (), message: str = ""
    ) -> list[Message]:
        """Returns the messages that an agent with a context of its own is shown, see ``act``."""
        seen = state.observation
        if self.view is not None:
            seen = self.view(self.profiles[agent].name, seen)
        lines = [line for line in map(self._line, turns) if line]
        said = message or self.messages[agent]
        return self._opening(agent, [seen, *lines, said] if said else [seen, *lines])

    def ids_of(self, agent: int, text: str) -> tuple[int, ...]:
        """Returns the ids of an agent's action with this text, with the end of turn."""
        return (*self.tokenizers[agent].encode(text), self.tokenizers[agent].end_id)

    def resume(self, turn: Turn, new: Sequence[Message], tools: Tools = ()) -> Act | None:
        """Makes an act that continues an agent's own turn after new messages.

        The prompt has the ids that the turn read and wrote, then the messages. None if no room is
        left.
        """
        before, tokenizer = [*turn.prompt.tolist(), *self._ended(turn)], self.tokenizers[turn.agent]
        messages, tools = for_model(new, tools, tokenizer, begins=False)
        prompt = [*before, *tokenizer.reply(messages, tools=tools)]
        try:
            return self._fitted(turn.agent, prompt, turn.step, turn.sees, len(before))
        except ContextFull:
            return None

    def without_calls(self, act: Act) -> Act:
        """Returns an act whose text follows the agent's schema alone: none of its calls would be
        answered."""
        form = self.profiles[act.agent].form
        return act._replace(form=form) if act.form == self.forms[act.agent] else act

    def with_hint(self, agent: int, prompt: np.ndarray, hint: str) -> np.ndarray:
        """Returns an agent's prompt with one more message of the user at its end."""
        tokenizer = self.tokenizers[agent]
        _, generation = tokenizer.opening([{"role": "user", "content": "a"}])
        cut = len(prompt) - len(generation)
        if prompt[cut:].tolist() != generation:
            raise BadInput(
                f"teacher of agent {self.profiles[agent].name!r}: its prompt does not end as the "
                "chat template ends one, so no message can be added; use `sees: own`"
            )
        new = tokenizer.reply([{"role": "user", "content": hint}], after_action=False)
        return np.concatenate([prompt[:cut], np.asarray(new, np.int32)])

    def _fitted(
        self, agent: int, prompt: list[int], step: int, sees: tuple[int, ...], start: int
    ) -> Act:
        """Makes an act whose new tokens fit into the context."""
        context = self.contexts[agent]
        room = context - len(prompt) - (_RESERVED if self.shared else 0)
        if room < 1:
            raise ContextFull(
                f"the prompt of agent {self.profiles[agent].name!r} has {len(prompt)} tokens, too "
                f"many for --model.context {context}: raise it as far as the base allows, or "
                "shorten the task"
            )
        sampling = self.sampling[agent]
        sampling = sampling._replace(max_new_tokens=min(sampling.max_new_tokens, room))
        ids, form = np.asarray(prompt, np.int32), self.forms[agent]
        return Act(agent, ids, step, sees, sampling, start, form=form)

    def _continued_prompt(
        self, agent: int, state: State, seen: Sequence[Turn], in_step: bool, message: str
    ) -> tuple[list[int], int]:
        """Returns the prompt, and the number of its ids that belong to the conversation so far."""
        message = message or self.messages[agent]
        if seen:
            before, generation = self._conversation(seen), []
        else:
            opening = self._opening(self.opener, [state.observation])
            before, generation = self.tokenizers[agent].opening(opening)
            if agent == self.opener and not message:
                return [*before, *generation], len(before)
        is_known = agent == self.opener or any(turn.agent == agent for turn in seen)
        parts = [
            "" if in_step else state.feedback,
            "" if is_known else self.system(agent),
            message or self._your_turn(agent),
        ]
        text = "\n".join(part for part in parts if part)
        new: list[Message] = [{"role": "user", "content": text}]
        reply = self.tokenizers[agent].reply(new, after_action=bool(seen))
        return [*before, *reply], len(before)

    def _opening(self, agent: int, lines: Sequence[str]) -> list[Message]:
        system = self.system(agent)
        user: Message = {"role": "user", "content": "\n".join(lines)}
        return [{"role": "system", "content": system}, user] if system else [user]

    def system(self, agent: int) -> str:
        """Returns an agent's system prompt; none of an anonymous team."""
        return "" if self.anonymous else self.profiles[agent].prompt

    def _line(self, turn: Turn) -> str:
        """Writes a turn as others read it; "" if there is nothing to read."""
        is_call = turn.agent == self.orchestrator
        text = without_thinking(turn.text)
        text = strip_calls(text) if is_call else text
        return text if self.anonymous or (is_call and not text) else f"{turn.name}: {text}"

    def _your_turn(self, agent: int) -> str:
        if self.anonymous:
            return "Now it is the next agent's turn."
        profile = self.profiles[agent]
        if agent == self.orchestrator:
            return "Please decide the next step."
        return f"Now it is {profile.name}'s turn. {profile.description}".strip()

    def _conversation(self, turns: Sequence[Turn]) -> list[int]:
        """Concatenates the ids that turns read and wrote, each once, in acting order."""
        ids = turns[0].prompt[: turns[0].start].tolist()
        for turn in turns:
            ids += [*turn.prompt[turn.start :].tolist(), *self._ended(turn)]
        return ids

    def _ended(self, turn: Turn) -> list[int]:
        """Returns the ids of a turn's action, with an end of turn if it was truncated."""
        ids, tokenizer = turn.action.tolist(), self.tokenizers[turn.agent]
        return ids if ids[-1] in tokenizer.eos_ids else [*ids, tokenizer.end_id]
