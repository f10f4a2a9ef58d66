"""What an agent sees when it acts, and who saw what (the dependency function D).

The same function serves training, evaluation and chat, so an agent is never shown in one what it
is not shown in the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from marft_jax import config as config_lib
from marft_jax.models.tokenizer import Tokenizer
from marft_jax.team.roles import Profile
from marft_jax.types import Act, Sampling, Turn


class ContextFull(config_lib.BadInput):
    """A prompt leaves no room for a single new token."""


class Team(NamedTuple):
    """A LaMAS: its members, how each samples, and which adapter each owns.

    Attributes:
        profiles: the members, in acting order.
        sampling: how each samples.
        owners: the adapter of each member.
        adapter_names: the name of each adapter: that of its only owner, of its group, or ``team``.
        trainable: which adapters learn.
        context: the longest prompt plus action, in tokens.
        tokenizer: of the base.
    """

    profiles: tuple[Profile, ...]
    sampling: tuple[Sampling, ...]
    owners: tuple[int, ...]
    adapter_names: tuple[str, ...]
    trainable: tuple[bool, ...]
    context: int
    tokenizer: Tokenizer

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(profile.name for profile in self.profiles)

    @property
    def adapters(self) -> int:
        """How many adapters the team has."""
        return len(self.adapter_names)

    def act(
        self, agent: int, observation: str, turns: Sequence[Turn], *, step: int = 0, first: int = 0
    ) -> Act:
        """Asks ``agent`` to act, showing it the observation and the given earlier turns.

        Its system prompt, then one user message: the observation, and below it a line
        ``name: text`` for each visible turn. New tokens are capped to the room that is left.

        Args:
            turns: the turns of this step that the agent may see.
            step: the step of the episode.
            first: the index in the episode of ``turns[0]``.

        Raises:
            ContextFull: the prompt fills the context.
        """
        profile = self.profiles[agent]
        lines = [observation, *(f"{turn.name}: {turn.text}" for turn in turns)]
        messages = [{"role": "system", "content": profile.prompt}] if profile.prompt else []
        messages.append({"role": "user", "content": "\n".join(lines)})
        prompt = np.asarray(self.tokenizer.chat(messages), np.int32)
        room = self.context - len(prompt)
        if room < 1:
            raise ContextFull(
                f"the prompt of agent {profile.name!r} has {len(prompt)} tokens, expected less "
                f"than --model.context {self.context}: raise it, or shorten the task: "
                f"{observation[:60]!r}"
            )
        sampling = self.sampling[agent]
        return Act(
            agent=agent,
            prompt=prompt,
            step=step,
            sees=tuple(range(first, first + len(turns))),
            sampling=sampling._replace(max_new_tokens=min(sampling.max_new_tokens, room)),
        )


def make_team(
    profiles: tuple[Profile, ...],
    team: config_lib.Team,
    lora: config_lib.Lora,
    context: int,
    tokenizer: Tokenizer,
) -> Team:
    """A team whose members share adapters as ``lora.mode`` and their profiles say.

    Raises:
        BadInput: agents that share an adapter disagree on whether it learns, or where it starts.
    """
    shared = lora.mode == "shared"
    wanted = ["team" if shared else profile.adapter or profile.name for profile in profiles]
    names = tuple(dict.fromkeys(wanted))
    for name in names:
        members = [p for p, own in zip(profiles, wanted, strict=True) if own == name]
        for field in ("trainable", "init"):
            values = [getattr(member, field) for member in members]
            if any(value != values[0] for value in values):
                raise config_lib.BadInput(
                    f"agents {', '.join(m.name for m in members)} share the adapter {name!r}: "
                    f"expected one value of {field}, got {values}"
                )
    trainable = {own: p.trainable for p, own in zip(profiles, wanted, strict=True)}
    if not any(trainable.values()):
        raise config_lib.BadInput("team: every agent has `trainable: false`; nothing would learn")
    return Team(
        profiles=profiles,
        sampling=tuple(profile.sampling(team) for profile in profiles),
        owners=tuple(names.index(name) for name in wanted),
        adapter_names=names,
        trainable=tuple(trainable[name] for name in names),
        context=context,
        tokenizer=tokenizer,
    )
