"""Takes a trained team out of a run, for other programs.

    python -m marft_jax.export --run runs/quickstart --out team --format peft
    python -m marft_jax.export --run runs/quickstart --out team --format merged --agent solver

``peft`` writes one folder per adapter, which peft and vLLM load, and ``team.yaml``, which
``--team.file`` and ``--lora.init`` load. ``merged`` writes, per agent, the base with its adapter
added, as a Hugging Face folder. Further flags are those of training.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from rich.console import Console

from marft_jax import cli
from marft_jax import config as config_lib
from marft_jax.durable import explained
from marft_jax.interop import card, huggingface, peft
from marft_jax.session import Session, open_session
from marft_jax.team.files import Blueprint, dump_team, load_team
from marft_jax.trained import arguments, restore_state, settings_of


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Leaves with 0: done; 1: the folder cannot be written; 2: bad configuration or input."""
    parser = arguments("marft_jax.export", __doc__, base=False)
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder to write")
    parser.add_argument("--format", choices=("peft", "merged"), default="peft")
    parser.add_argument("--agent", metavar="NAME", help="merged: only this one")
    with cli.boundary():
        own, rest = parser.parse_known_args(argv)
        config = settings_of(own.run, None, [*rest, *_ANY_MACHINE], prog="marft_jax.export")
        export(own.run, own.step, config, Path(own.out), own.format, own.agent)
    sys.exit(0)


_ANY_MACHINE = ("--mesh.data", "-1", "--mesh.fsdp", "1", "--mesh.tensor", "1")


def export(
    run: str, step: str, config: config_lib.Config, out: Path, form: str, agent: str | None
) -> None:
    """Writes the team of a checkpoint below ``out``.

    Raises:
        BadInput: no such run, step or agent, or a folder that holds something already.
    """
    blueprint = load_team(config.team.file)
    names = [profile.name for profile in blueprint.agents]
    if agent is not None and (form != "merged" or agent not in names):
        raise config_lib.BadInput(
            f"--agent {agent}: expected --format merged and one of {', '.join(names)}"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise config_lib.BadInput(f"--out {out}: expected a new or empty folder")
    session = open_session(config, blueprint)
    state = restore_state(session, run, step)
    facts = card.Facts(run, int(state.step), config, blueprint, session.base.source)
    adapters = jax.tree.map(lambda x: np.asarray(jax.device_get(x)), state.adapters)
    with explained(out):
        if form == "peft":
            written = _as_peft(out, session, adapters, blueprint, facts)
        else:
            written = _as_merged(out, session, adapters, agent, facts)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{run}, step {int(state.step)}: {', '.join(map(str, written))}", markup=False)


def _as_peft(
    out: Path, session: Session, adapters: Any, blueprint: Blueprint, facts: card.Facts
) -> list[Path]:
    team, base = session.team, session.base
    source = base.source
    if source == "tiny":  # nobody else has it
        folder = out / "base"
        huggingface.write_model(folder, base, {}, 1.0, {})
        source = str(folder.absolute())
    elif Path(source).expanduser().exists():
        source = str(Path(source).expanduser().absolute())
    folders = []
    for n, name in enumerate(team.adapter_names):
        own = jax.tree.map(lambda x, n=n: x[n], adapters)
        peft.write(out / name, own, session.config.lora.alpha, source)
        members = [team.names[i] for i, owner in enumerate(team.owners) if owner == n]
        card.write(out / name, facts, members, card.peft_usage(source, name))
        folders.append(out / name)
    seeded = [
        dataclasses.replace(profile, init=str((out / team.adapter_names[owner]).absolute()))
        for profile, owner in zip(blueprint.agents, team.owners, strict=True)
    ]
    text = dump_team(blueprint._replace(agents=tuple(seeded)))
    (out / "team.yaml").write_text(text, encoding="utf-8")
    return [*folders, out / "team.yaml"]


def _as_merged(
    out: Path, session: Session, adapters: Any, agent: str | None, facts: card.Facts
) -> list[Path]:
    team, settings = session.team, session.config.lora
    folders = []
    for name, owner, sampling in zip(team.names, team.owners, team.sampling, strict=True):
        if agent not in (None, name):
            continue
        own = jax.tree.map(lambda x, n=owner: x[n], adapters)
        drawn = {"do_sample": sampling.temperature > 0, "max_new_tokens": sampling.max_new_tokens}
        if sampling.temperature > 0:
            drawn |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
            drawn |= {"top_k": sampling.top_k, "min_p": sampling.min_p}
        scale = settings.alpha / settings.rank
        huggingface.write_model(out / name, session.base, own, scale, drawn)
        card.write(out / name, facts, [name], card.merged_usage())
        folders.append(out / name)
    return folders


if __name__ == "__main__":
    main()
