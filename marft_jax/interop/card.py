"""The model card of an exported adapter or model: what it is, where it comes from, how to load."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from marft_jax.config import Config
from marft_jax.envs.datasets.rows import SUFFIXES
from marft_jax.formats import foreign
from marft_jax.team.team_files import Blueprint

_TOLD = ("reward/mean", "reward/std", "episode/turns")


class Facts(NamedTuple):
    """What a card tells about the run."""

    run: str
    step: int
    config: Config
    blueprint: Blueprint
    base: str


def write(folder: Path, facts: Facts, agents: Sequence[str], usage: str) -> None:
    """Writes ``README.md``: base, task, team, metrics and how to load it.

    Args:
        folder: of the export.
        agents: whose actions this adapter or model writes.
        usage: a section of the card, in Markdown.
    """
    config, blueprint = facts.config, facts.blueprint
    head = {"library_name": "peft" if "peft" in usage else "transformers"}
    head |= {"base_model": facts.base, "tags": ["marft", "multi-agent", "lora"]}
    own = [profile for profile in blueprint.agents if profile.name in agents]
    others = [profile.name for profile in blueprint.agents if profile.name not in agents]
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False).strip()}\n---",
        f"# {' and '.join(agents)}",
        f"One of the agents of a team that was fine-tuned together by reinforcement learning "
        f"(MARFT, {config.algo.name}) with marft_jax. "
        + (f"It acts together with {', '.join(others)}." if others else "It acts alone."),
        f"- base model: `{facts.base}`\n- task: `{config.env.name}`"
        + (f" ({', '.join(map(_portable, config.env.data))})" if config.env.data else "")
        + f"\n- team: {', '.join(profile.name for profile in blueprint.agents)} "
        f"({config.team.workflow or blueprint.workflow})\n- training steps: {facts.step}\n"
        f"- LoRA: rank {config.lora.rank}, alpha {config.lora.alpha:g}, "
        f"{', '.join(config.lora.targets)}",
        "## Metrics\n\n" + _table(metrics_at(Path(facts.run), facts.step)),
        "## Prompts\n\nIt was trained with these system prompts:\n\n"
        + "\n".join(f"- {p.name}: {json.dumps(p.prompt, ensure_ascii=False)}" for p in own),
        usage,
    ]
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def peft_usage(base: str, adapter: str) -> str:
    """How peft and vLLM load an adapter on this base."""
    gguf = base.endswith(".gguf")
    where = f'".", gguf_file="{base}"' if gguf else f'"{base}"'
    beside = "" if "/" in base or base == "base" else f", with `{base}` beside it"
    lines = [
        f"## Loading\n\nIn the folder that holds this one{beside}:\n",
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"base = AutoModelForCausalLM.from_pretrained({where})",
        f"tokenizer = AutoTokenizer.from_pretrained({where})",
        f'model = PeftModel.from_pretrained(base, "{adapter}")  # this folder',
        "```\n",
    ]
    if gguf:
        lines.append("The base is a GGUF file, which transformers unpacks; `--format merged` "
                     "writes the unpacked model with the adapter added.")  # fmt: skip
    else:
        lines.append(f"With vLLM: `vllm serve {base} --enable-lora --lora-modules "
                     f"{adapter}={adapter}`.")  # fmt: skip
    return "\n".join(lines)


def merged_usage() -> str:
    """How transformers and vLLM load a merged model."""
    return (
        "## Loading\n\nThe folder is a complete model: "
        '`AutoModelForCausalLM.from_pretrained("this folder")`, `vllm serve "this folder"`, or '
        "`--model.base` of marft_jax."
    )


def metrics_at(run: Path, step: int) -> Mapping[str, float]:
    """The rewards of the step and the newest evaluations up to it, from ``metrics.jsonl``."""
    file = run / "metrics.jsonl"
    told: dict[str, Any] = {}
    for line in file.read_text("utf-8").splitlines() if file.is_file() else ():
        row = foreign.loads(line)
        if row["step"] <= step:
            told |= {k: v for k, v in row.items() if k in _TOLD or k.startswith("eval/")}
    return {name: value for name, value in told.items() if value is not None}


def _portable(source: str) -> str:
    """A data set by its hub id, or the name of its file alone."""
    return Path(source).name if Path(source).suffix in SUFFIXES else source


def _table(metrics: Mapping[str, float]) -> str:
    rows = [f"| {name} | {value:.4g} |" for name, value in sorted(metrics.items())]
    return "\n".join(["| metric | value |", "|---|---|", *rows]) if rows else "None were kept."
