"""Teachers: models that score what agents sampled, and may see more than the agents do."""

from __future__ import annotations

import string
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from marft_jax.settings.setting import PathText, Section, setting
from marft_jax.types import Episode

_Text = Annotated[str, Field(min_length=1)]
_SEES = {
    "own": "",
    "answer": "The correct answer is {answer}.",
    "all": "The whole task: {state}\nThe correct answer is {answer}.",
}


def _template(text: str) -> str:
    """Checks what a teacher sees: a name, or a text with fields."""
    try:
        fields = {name for _, name, *_ in string.Formatter().parse(text) if name is not None}
    except ValueError:
        fields = {text}
    if text in _SEES or (fields and fields <= {"answer", "state"}):
        return text
    names = ", ".join(_SEES)
    raise ValueError(f"{names}, or a text that has {{answer}} or {{state}} in it")


@dataclass(frozen=True)
class Teacher(Section):
    """Teacher of an agent.

    Raises:
        pydantic.ValidationError: a field has the wrong type, or ``sees`` has unknown fields.
    """

    base: _Text | None = None
    """Base of the team file that scores; none: the agent's own base."""
    sees: Annotated[str, AfterValidator(_template)] = "own"
    """What it is shown besides the agent's prompt. own: nothing. answer: the correct answer. all:
    the task and the answer. Or a text with {answer} or {state} in it."""
    init: Annotated[PathText, Field(min_length=1)] | None = setting(None, path=bool)
    """Folder of its adapter, in peft's format; none: the base alone."""

    def hint(self, episode: Episode, step: int) -> str | None:
        """Writes what the teacher sees of a step besides the agent's prompt; "" for nothing.

        Returns:
            None if it needs the answer of an episode that ended before it was graded.
        """
        text = _SEES.get(self.sees, self.sees)
        state = episode.results[step - 1].observation if step else episode.task
        infos = [result.info for result in episode.results if "reference" in result.info]
        if "{answer}" in text and not infos:
            return None
        return text.format(state=state, answer=infos[-1]["reference"] if infos else "")
