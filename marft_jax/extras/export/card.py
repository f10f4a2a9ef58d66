"""Writes the model card of an exported team, from ``card.md``."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCard, ModelCardData

from marft_jax.envs.datasets.rows import SUFFIXES
from marft_jax.formats import jsonlines
from marft_jax.settings.config import Config
from marft_jax.team.prompts import Team
from marft_jax.team.team_files import Blueprint

_METRICS = ("reward/mean", "reward/std", "episode/turns")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class Facts(NamedTuple):
    """What a card tells of a run."""

    run: str
    step: int
    config: Config
    blueprint: Blueprint
    base: str
    team: Team | None = None


def write(
    folder: Path,
    facts: Facts,
    folders: Mapping[str, Sequence[str]],
    base: str = "",
    loader: str = "AutoModelForCausalLM",
    servers: Sequence[str] = (),
    plays: bool = False,
) -> None:
    """Writes ``README.md``: base, task, team, metrics and how peft, transformers and vLLM load it.

    Args:
        folder: the folder of the export.
        folders: folder of an adapter or model, to the names of its agents.
        base: where the loader of the adapters finds the base; "" for merged models.
        loader: the class of transformers that loads the base.
        servers: commands that serve the agents, the first with this package.
        plays: ``client.py`` lies beside them.
    """
    config, adapted, team, profiles = facts.config, bool(base), facts.team, facts.blueprint.agents
    shown = [x.prompt if team is None else team.system_of(i) for i, x in enumerate(profiles)]
    data = ModelCardData(
        library_name="peft" if adapted else "transformers",
        base_model=facts.base if _HUB_ID.fullmatch(facts.base) else None,  # else the hub refuses it
        tags=["marft", "multi-agent", *(["lora"] if adapted else [])],
    )
    card = ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("card.md")),
        facts=facts,
        config=config,
        profiles=profiles,
        shown=shown,
        lacks=[] if team is None else lacking(team, plays),
        tools=[[t.name for t in team.tools[i].tools] if team else [] for i in range(len(shown))],
        loader=loader,
        workflow=config.team.workflow or facts.blueprint.workflow,
        data=[_portable(source) for source in config.env.data],
        metrics=metrics_at(Path(facts.run), facts.step, config.algo.recorded),
        folders=folders,
        adapted=adapted,
        base=base,
        servers=servers,
        plays=plays,
        quote=lambda prompt: json.dumps(prompt, ensure_ascii=False),
    )
    card.save(folder / "README.md")


def lacking(team: Team, plays: bool) -> list[str]:
    """Names what agents were trained with and other programs do not give them.

    Args:
        plays: ``client.py`` plays them, which asks for their formats.
    """
    lacks = list[str]()
    for agent, profile in enumerate(team.profiles):
        if names := [tool.name for tool in team.tools[agent].tools]:
            lacks.append(f"tools of {profile.name} ({', '.join(names)})")
        if profile.form and not plays:
            lacks.append(f"the format of {profile.name}'s texts (a JSON schema)")
    return lacks


def serve_command(base: str) -> str:
    """Command that serves an exported team with this package, in the folder of the export."""
    return f"python -m marft_jax.serve --base {shlex.quote(base)} --config serve.yaml"


def vllm_command(base: str, template: str, adapters: Mapping[str, str], rank: int) -> str:
    """Command that serves the agents of a base with vLLM.

    Args:
        template: file of the chat template.
        adapters: folder of the adapter of each agent.
    """
    words = ["vllm", "serve", base, "--chat-template", template, "--enable-lora", "--max-loras"]
    words += [str(len(adapters)), "--max-lora-rank", str(max(rank, 8)), "--lora-modules"]
    return shlex.join([*words, *(f"{name}={folder}" for name, folder in adapters.items())])


def metrics_at(run: Path, step: int, recorded: bool = False) -> Mapping[str, float]:
    """Reads the rewards of the step and the newest evaluations up to it from ``metrics.jsonl``.

    ``recorded``: the team learned from demonstrations; then losses take the place of rewards."""

    def counts(name: str) -> bool:
        of_step = name.endswith("loss") if recorded else name in _METRICS
        return of_step or name.startswith("eval/")

    newest = dict[str, Any]()
    for row in jsonlines.objects(run / "metrics.jsonl"):
        if isinstance(at := row.get("step"), int) and at <= step:
            newest |= {k: v for k, v in row.items() if counts(k)}
    return {name: value for name, value in newest.items() if value is not None}


def _portable(source: str) -> str:
    """Hub id of a data set, or the name of its file without its folders."""
    return Path(source).name if Path(source).suffix.lower() in SUFFIXES else source
