"""What an agent sees when it acts, and who saw what (the dependency function D).

The same function serves training, evaluation and chat, so an agent is never shown in one what it
is not shown in the other. D is written down from what was shown, so the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from marft_jax import config as config_lib
from marft_jax.models.tokenizers.tokenizer import Message, Tokenizer
from marft_jax.team.dag import Graph
from marft_jax.team.orchestrator import without_calls
from marft_jax.team.profiles import Profile
from marft_jax.types import Act, Sampling, StepResult, Turn

_RESERVED = 64  # of a growing conversation's room: for the messages of those who come after


class ContextFull(config_lib.BadInput):
    """A prompt leaves no room for a single new token."""


class Scene(NamedTuple):
    """Where the team stands in a step.

    Attributes:
        observation: the state text.
        step: the step of the episode, from 0.
        past: the turns of earlier steps, of which the environment made the observation.
        news: what is new in the observation, for those who still see what was before.
    """

    observation: str
    step: int = 0
    past: tuple[Turn, ...] = ()
    news: str = ""

    def after(self, turns: Sequence[Turn], result: StepResult) -> Scene:
        """The next step's scene."""
        news = result.feedback or result.observation
        return Scene(result.observation, self.step + 1, (*self.past, *turns), news)


class Team(NamedTuple):
    """A LaMAS: its members, how each samples, what each owns and is shown.

    Attributes:
        profiles: the members, in acting order.
        sampling: how each samples.
        owners: the adapter of each member.
        adapter_names: the name of each adapter: that of its only owner, of its group, or ``team``.
        trainable: which adapters learn.
        context: the longest prompt plus action, in tokens.
        tokenizer: of the base.
        shared: everyone continues one conversation; else each gets a prompt of its own.
        anonymous: no names, no system prompts.
        graph: of a ``dag``.
        messages: what each agent is told when its turn comes, or none.
        opener: the agent whose system prompt opens a shared conversation.
        orchestrator: the agent that calls the others, where there is one.
        judge: the agent that ends a debate, where there is one.
        rounds: of a debate.
        max_steps: calls of an orchestrator.
        view: (agent's name, observation) to what that agent sees of it, where the environment
            shows not everyone the same.
    """

    profiles: tuple[Profile, ...]
    sampling: tuple[Sampling, ...]
    owners: tuple[int, ...]
    adapter_names: tuple[str, ...]
    trainable: tuple[bool, ...]
    context: int
    tokenizer: Tokenizer
    shared: bool = False
    anonymous: bool = False
    graph: Graph = Graph()
    messages: tuple[str, ...] = ()
    opener: int = 0
    orchestrator: int | None = None
    judge: int | None = None
    rounds: int = 2
    max_steps: int = 10
    view: Callable[[str, str], str] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(profile.name for profile in self.profiles)

    @property
    def adapters(self) -> int:
        """How many adapters the team has."""
        return len(self.adapter_names)

    def act(self, agent: int, scene: Scene, turns: Sequence[Turn] = (), message: str = "") -> Act:
        """Asks ``agent`` to act, showing it the scene and the given earlier turns of this step.

        Its own context: its system prompt, then one user message: the observation, below it a
        line ``name: text`` for each visible turn, and the message. A shared context: the ids of
        all that those turns and the earlier steps' read and wrote, then a user message: what is
        new, the agent's system prompt where it was not given before, and the message. New tokens
        are capped to the room that is left. Either way it sees what earlier steps said: in the
        observation, which the environment made of that, or word for word.

        Args:
            agent: its index in the team.
            turns: the turns of this step that it may see, in acting order.
            message: what it is told; by default what the team file says, and in a shared context
                else that it is its turn.

        Raises:
            ContextFull: the prompt fills the context.
        """
        message = message or (self.messages[agent] if self.messages else "")
        said = list(turns) if self.shared else [t for t in turns if self._says(t)]
        shown = [*scene.past, *said]
        prompt, start = (
            self._continued(agent, scene, shown, bool(turns), message)
            if self.shared
            else (self._alone(agent, scene, said, message), 0)
        )
        room = self.context - len(prompt) - (_RESERVED if self.shared else 0)
        if room < 1:
            raise ContextFull(
                f"the prompt of agent {self.profiles[agent].name!r} has {len(prompt)} tokens, too "
                f"many for --model.context {self.context}: raise it, or shorten the task: "
                f"{scene.observation[:60]!r}"
            )
        sampling = self.sampling[agent]
        return Act(
            agent=agent,
            prompt=np.asarray(prompt, np.int32),
            step=scene.step,
            sees=tuple(turn.index for turn in shown),
            sampling=sampling._replace(max_new_tokens=min(sampling.max_new_tokens, room)),
            start=start,
        )

    def _alone(self, agent: int, scene: Scene, turns: Sequence[Turn], message: str) -> list[int]:
        seen = scene.observation
        if self.view is not None:
            seen = self.view(self.profiles[agent].name, seen)
        lines = [seen, *(self._says(turn) for turn in turns)]
        return self.tokenizer.chat(self._opening(agent, [*lines, message] if message else lines))

    def _opening(self, agent: int, lines: Sequence[str]) -> list[Message]:
        system = self._system(agent)
        user: Message = {"role": "user", "content": "\n".join(lines)}
        return [{"role": "system", "content": system}, user] if system else [user]

    def _system(self, agent: int) -> str:
        return "" if self.anonymous else self.profiles[agent].prompt

    def _says(self, turn: Turn) -> str:
        """A turn as others read it. Of an orchestrator's, what it says besides whom it calls."""
        text = turn.text
        if turn.agent == self.orchestrator:
            text = without_calls(text)
            if not text:
                return ""
        return text if self.anonymous else f"{turn.name}: {text}"

    def _continued(
        self, agent: int, scene: Scene, seen: Sequence[Turn], in_step: bool, message: str
    ) -> tuple[list[int], int]:
        """The prompt, and how much of it was taken over."""
        before, generation = [], []
        if seen:
            before = self.conversation(seen)
        else:
            before, generation = self.tokenizer.opening(
                self._opening(self.opener, [scene.observation])
            )
        if not seen and agent == self.opener and not message:
            return [*before, *generation], len(before)
        known = agent == self.opener or any(turn.agent == agent for turn in seen)
        parts = [
            "" if in_step else scene.news,
            "" if known else self._system(agent),
            message or self._your_turn(agent),
        ]
        text = "\n".join(part for part in parts if part)
        return [*before, *self.tokenizer.reply(text, after_action=bool(seen))], len(before)

    def _your_turn(self, agent: int) -> str:
        if self.anonymous:
            return "Now it is the next agent's turn."
        profile = self.profiles[agent]
        if agent == self.orchestrator:
            return "Please decide the next step."
        return f"Now it is {profile.name}'s turn. {profile.description}".strip()

    def resume(self, turn: Turn, text: str) -> Act | None:
        """Lets an agent go on after its own turn, told something more; None where no room is left.

        Its prompt is all it read and wrote before, id by id, and a user's message.
        """
        held = [*turn.prompt.tolist(), *self._ended(turn)]
        prompt = [*held, *self.tokenizer.reply(text)]
        room = self.context - len(prompt) - (_RESERVED if self.shared else 0)
        if room < 1:
            return None
        sampling = self.sampling[turn.agent]
        longest = min(sampling.max_new_tokens, room)
        return Act(
            agent=turn.agent,
            prompt=np.asarray(prompt, np.int32),
            step=turn.step,
            sees=turn.sees,
            sampling=sampling._replace(max_new_tokens=longest),
            start=len(held),
        )

    def _ended(self, turn: Turn) -> list[int]:
        """A turn's action, with an end where it was cut off."""
        ids = turn.action.tolist()
        return ids if ids[-1] in self.tokenizer.eos_ids else [*ids, self.tokenizer.eos_ids[-1]]

    def conversation(self, turns: Sequence[Turn]) -> list[int]:
        """One sequence of all that those turns read and wrote, each id as it was, each piece once.

        Turns that acted side by side continue the same ids; their pieces follow one another in
        acting order.
        """
        ids = turns[0].prompt[: turns[0].start].tolist()
        for turn in turns:
            ids += [*turn.prompt[turn.start :].tolist(), *self._ended(turn)]
        return ids
