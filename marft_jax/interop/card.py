"""Model cards: of an exported adapter or model, ``card.md``, and of the team, ``team_card.md``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import yaml

from marft_jax.config import Config
from marft_jax.envs.datasets.rows import SUFFIXES
from marft_jax.formats import foreign
from marft_jax.team.team_files import Blueprint

_METRICS = ("reward/mean", "reward/std", "episode/turns")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class Facts(NamedTuple):
    """Facts of a run, for its card."""

    run: str
    step: int
    config: Config
    blueprint: Blueprint
    base: str


def write(
    folder: Path,
    facts: Facts,
    agents: Sequence[str],
    adapter: str = "",
    base: str = "",
    adapters: Sequence[str] = (),
    plays: bool = False,
) -> None:
    """Writes ``README.md``: base, task, team, metrics and how peft, transformers and vLLM load it.

    Args:
        folder: of the export.
        agents: whose actions this adapter or model writes.
        adapter: its name; none for a merged model.
        base: where the adapter's loader finds the base.
        adapters: of the whole team, beside this one.
        plays: ``team.py`` lies beside them.
    """
    profiles, config = facts.blueprint.agents, facts.config
    text = _render(
        "card.md",
        facts,
        bool(adapter),
        agents=agents,
        own=[profile for profile in profiles if profile.name in agents],
        others=[profile.name for profile in profiles if profile.name not in agents],
        demonstrations=_demonstrations(Path(facts.run)) if config.algo.recorded else None,
        adapters=adapters,
        plays=plays,
        adapter=adapter,
        base=base,
        quote=lambda prompt: json.dumps(prompt, ensure_ascii=False),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def write_team(
    folder: Path, facts: Facts, folders: Mapping[str, Sequence[str]], plays: bool, *, adapters: bool
) -> None:
    """Writes the ``README.md`` of the whole team; ``folders``: those of agents, to their names."""
    workflow = facts.config.team.workflow or facts.blueprint.workflow
    agents = [profile.name for profile in facts.blueprint.agents]
    how = dict(agents=agents, folders=folders, workflow=workflow, plays=plays, own=adapters)
    text = _render("team_card.md", facts, adapters, **how)
    (folder / "README.md").write_text(text, encoding="utf-8")


def _render(name: str, facts: Facts, adapted: bool, /, **values: Any) -> str:
    """Renders a card with its head, which the hub checks: it knows a base by its hub id alone."""
    head: dict[str, Any] = {"library_name": "peft" if adapted else "transformers"}
    head |= {"base_model": facts.base} if _HUB_ID.fullmatch(facts.base) else {}
    head |= {"tags": ["marft", "multi-agent", *(["lora"] if adapted else [])]}
    text = Path(__file__).with_name(name).read_text("utf-8")
    return jinja2.Template(text, keep_trailing_newline=True).render(
        head=yaml.safe_dump(head, sort_keys=False),
        facts=facts,
        config=facts.config,
        data=[_portable(source) for source in facts.config.env.data],
        metrics=metrics_at(Path(facts.run), facts.step, facts.config.algo.recorded),
        **values,
    )


def metrics_at(run: Path, step: int, recorded: bool = False) -> Mapping[str, float]:
    """Rewards of the step and the newest evaluations up to it, from ``metrics.jsonl``; of a team
    that learned from demonstrations their losses, for it earned no reward."""

    def counts(name: str) -> bool:
        of_step = name.endswith("loss") if recorded else name in _METRICS
        return of_step or name.startswith("eval/")

    file, found = run / "metrics.jsonl", dict[str, Any]()
    for line in file.read_text("utf-8").splitlines() if file.is_file() else ():
        row = foreign.loads(line)
        if row["step"] <= step:
            found |= {k: v for k, v in row.items() if counts(k)}
    return {name: value for name, value in found.items() if value is not None}


def _demonstrations(run: Path) -> int | None:
    file = run / "demonstrations.jsonl"
    return len(file.read_bytes().splitlines()) if file.is_file() else None


def _portable(source: str) -> str:
    """A data set by its hub id, or the name of its file alone."""
    return Path(source).name if Path(source).suffix in SUFFIXES else source
