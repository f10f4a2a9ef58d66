"""The members of a team: profiles, and the files they come from.

agents:
  - name: planner
    prompt: Plan how to solve the task. Do not solve it.
  - name: solver
    prompt: Solve the task. Put the final answer in \\boxed{}.
    answers: true
    max_new_tokens: 200
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from marft_jax import config
from marft_jax.config import BadInput
from marft_jax.types import Sampling

_Check = tuple[str, Callable[[Any], bool]]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_name(value: Any) -> bool:
    return (
        isinstance(value, str)
        and value != ""
        and value == value.strip()
        and value.isprintable()
        and "/" not in value
    )


def _is_optional_name(value: Any) -> bool:
    return value is None or _is_name(value)


_EXPECTED: dict[str, _Check] = {
    "name": ("a name: text on one line, without / and outer spaces", _is_name),
    "prompt": ("text", lambda v: isinstance(v, str)),
    "description": ("text", lambda v: isinstance(v, str)),
    "answers": ("true or false", lambda v: isinstance(v, bool)),
    "adapter": ("a name: text on one line, without / and outer spaces", _is_optional_name),
    "trainable": ("true or false", lambda v: isinstance(v, bool)),
    "init": ("a folder with an adapter", lambda v: v is None or isinstance(v, str) and v != ""),
    "reward": ("a step reward's name", lambda v: v is None or isinstance(v, str) and v != ""),
    "max_new_tokens": ("a whole number > 0", lambda v: v is None or _is_int(v) and v > 0),
    "temperature": ("a number >= 0", lambda v: v is None or _is_number(v) and 0 <= v < math.inf),
    "top_p": ("a number with 0 < top_p <= 1", lambda v: v is None or _is_number(v) and 0 < v <= 1),
    "top_k": ("a whole number >= 0", lambda v: v is None or _is_int(v) and v >= 0),
    "min_p": ("a number from 0 to 1", lambda v: v is None or _is_number(v) and 0 <= v <= 1),
}


@dataclasses.dataclass(frozen=True)
class Profile:
    """One member of a team. A sampling setting that is None is the team's.

    Attributes:
        name: how the others see it, and its name in metrics and checkpoints.
        prompt: its system prompt; empty for none.
        description: one sentence for those who introduce or call it.
        answers: its actions are the team's answer and are graded.
        adapter: roles that name the same one share it; without, the agent has its own.
        trainable: whether its adapter learns.
        init: a peft folder that its adapter starts from; without, it starts as the base.
        reward: its step reward where ``algo.credit`` is ``per_step``; without, the team's.
        max_new_tokens, temperature, top_p, top_k, min_p: as in ``types.Sampling``.

    Raises:
        BadInput: a field of the wrong type or out of range, by its name.
    """

    name: str
    prompt: str = ""
    description: str = ""
    answers: bool = False
    adapter: str | None = None
    trainable: bool = True
    init: str | None = None
    reward: str | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        for field, (expected, is_fine) in _EXPECTED.items():
            value = getattr(self, field)
            if not is_fine(value):
                raise BadInput(f"{field}: expected {expected}, got {value!r}")

    def sampling(self, team: config.Team) -> Sampling:
        """How this agent's tokens are drawn: its own settings before the team's."""
        own = {field: getattr(self, field) for field in Sampling._fields}
        return Sampling(
            **{f: getattr(team, f) if value is None else value for f, value in own.items()}
        )


def load_team(file: str | None) -> tuple[Profile, ...]:
    """The team in a file, in acting order; without a file the built-in planner and solver.

    A file is YAML or JSON: ``agents:`` with a list of profiles, or the bare list of the first
    MARFT release, whose keys are ``role``, ``prompt`` and ``with_answer`` (its ``device`` means
    nothing here: the mesh places every agent).

    Raises:
        BadInput: one line with the file, the agent and the field, and how to fix it.
    """
    if file is None:
        return BUILT_IN
    rows = _rows(_read(file), file)
    team = tuple(_profile(row, f"{file}: agent {i + 1}") for i, row in enumerate(rows))
    check_team(team, file)
    return team


def check_team(team: Sequence[Profile], source: str) -> None:
    """Checks what concerns the team as a whole.

    Raises:
        BadInput: no agent, two of one name (capitals do not tell names apart), or none that
            answers.
    """
    if not team:
        raise BadInput(
            f"{source}: expected at least one agent, got none; list them below `agents:`"
        )
    seen: set[str] = set()
    for profile in team:
        if profile.name.lower() in seen:
            raise BadInput(
                f"{source}: expected distinct names, got {profile.name!r} twice; rename one"
            )
        seen.add(profile.name.lower())
    if not any(profile.answers for profile in team):
        raise BadInput(
            f"{source}: no agent's action would be graded; "
            "add `answers: true` to the agent that gives the team's answer"
        )


BUILT_IN = (
    Profile("planner", prompt="plan", description="Writes the next step down."),
    Profile("solver", prompt="solve", description="Gives the answer.", answers=True),
)

_FIRST_RELEASE = {"role": "name", "with_answer": "answers"}


def _read(file: str) -> Any:
    try:
        text = Path(file).read_text(encoding="utf-8")
        return json.loads(text) if file.endswith(".json") else yaml.safe_load(text)
    except OSError as error:
        raise BadInput(f"--team.file {file}: cannot be read ({error.strerror})") from error
    except (ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise BadInput(f"--team.file {file}: neither YAML nor JSON: {why}") from error


def _rows(tree: Any, file: str) -> list[Any]:
    if isinstance(tree, list):
        return [_from_first_release(row) for row in tree]
    if not isinstance(tree, dict) or not isinstance(tree.get("agents"), list):
        raise BadInput(f"{file}: expected a list of agents below `agents:`, got {tree!r:.80}")
    _reject_unknown(tree, ["agents"], file)
    return tree["agents"]


def _from_first_release(row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    return {_FIRST_RELEASE.get(key, key): row[key] for key in row if key != "device"}


def _profile(row: Any, where: str) -> Profile:
    fields = [field.name for field in dataclasses.fields(Profile)]
    if not isinstance(row, dict):
        raise BadInput(f"{where}: expected settings like `name: solver`, got {row!r:.80}")
    _reject_unknown(row, fields, where)
    if "name" not in row:
        raise BadInput(f"{where}: name is missing; add `name: ...`")
    try:
        return Profile(**{key: _as_number(key, value) for key, value in row.items()})
    except BadInput as error:
        raise BadInput(f"{where}, {error}") from error


def _as_number(key: str, value: Any) -> Any:
    """YAML takes ``1e-1`` for text; where a number is expected it is one."""
    if key not in ("temperature", "top_p", "min_p") or not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _reject_unknown(row: Mapping[Any, Any], known: Sequence[str], where: str) -> None:
    for key in row:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise BadInput(f"{where}: unknown key {key!r}; {hint}")


def dump_team(team: Sequence[Profile]) -> str:
    """The team as a file that ``load_team`` reads back to equal profiles."""
    rows = [
        {key: value for key, value in dataclasses.asdict(profile).items() if value is not None}
        for profile in team
    ]
    return yaml.safe_dump({"agents": rows}, sort_keys=False, allow_unicode=True)
