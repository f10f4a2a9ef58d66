"""Writes the team of a checkpoint for other programs."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
import yaml
from rich.console import Console
from safetensors import SafetensorError

from marft_jax.errors import BadInput, RunFailed, printable, reason
from marft_jax.extras.export import card, huggingface, turns
from marft_jax.interop import peft
from marft_jax.learning.checking import check_team
from marft_jax.models import lora
from marft_jax.run.manifest import DRAFT
from marft_jax.run.models import TeamModels, open_models
from marft_jax.run.reporters import Progress
from marft_jax.run.states import restore_state
from marft_jax.settings import config as config_lib
from marft_jax.team.bases import folder_of
from marft_jax.team.team_files import dump_team


def export(
    run: str, step: str, config: config_lib.Config, out: Path, form: str, agent: str | None
) -> int:
    """Writes the team of a checkpoint below ``out``, all of it or nothing; returns its step.

    Raises:
        BadInput: no such run, step or agent, or a folder that holds something already.
        RunFailed: the folder cannot be written.
    """
    blueprint = check_team(config)
    names = [profile.name for profile in blueprint.agents]
    if agent is not None and (form != "merged" or agent not in names):
        raise BadInput(f"--agent {agent}: expected --format merged and one of {', '.join(names)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"--out {out}: expected a new or empty folder")
    with open_models(config, blueprint) as models:
        return _write(models, run, step, out, form, agent)


def _write(models: TeamModels, run: str, step: str, out: Path, form: str, agent: str | None) -> int:
    _check(models, form)
    state = restore_state(models, run, step)
    sources = ", ".join(_portable(base.source) for base in models.bases.values())
    facts = card.Facts(run, int(state.step), models.config, models.blueprint, sources, models.team)
    adapters = jax.tree.map(lambda x: np.asarray(jax.device_get(x)), state.adapters)
    console = Console(highlight=False, soft_wrap=True)
    with _all_or_nothing(out) as draft:
        if form == "peft":
            _as_peft(draft, models, adapters, facts)
        else:
            with Progress("exporting tensors", console) as progress:
                _as_merged(draft, models, adapters, facts, agent, progress)
    written = sorted(path for path in out.iterdir() if path.name != "base")
    text = f"{run}, step {int(state.step)}: {', '.join(map(str, written))}"
    console.print(printable(text), markup=False)
    plays = form == "peft" and turns.is_static(models.team)
    remarks = list[str]()
    if lacks := card.lacking(models.team, plays):
        remarks.append(_LACKS.format("; ".join(lacks)))
    if form == "peft" and not plays:
        serve = card.serve_command(_portable(models.config.model.base))
        remarks.append(f"only marft_jax plays this team: in {out}, {serve}")
    if form == "peft" and "experts" in models.config.lora.targets:
        remarks.append(_EXPERTS)
    for line in remarks:
        console.print(printable(line), markup=False)
    console.print("how to play them: marft_jax/README.md#export-and-serve")
    return facts.step


def _check(models: TeamModels, form: str) -> None:
    """Raises BadInput where a file cannot hold what was adapted, or peft's loaders lack it."""
    targets = models.config.lora.targets
    for base in models.bases.values():
        if form == "merged" and lora.UNEMBED in targets and base.config.tie_embeddings:
            raise BadInput(
                f"--format merged: {base.source} has one matrix for embeddings and logits, and the "
                "adapters are of logits alone; use --format peft"
            )
        if form == "peft" and (names := peft.unnamed(base.config.files, targets)):
            raise BadInput(
                f"--format peft: the checkpoint of {base.source} has other matrices than "
                f"{', '.join(names)}, so that peft cannot name them; use --format merged"
            )


_EXPERTS = (
    "adapters on experts: peft 0.18 with transformers 5 loads them; SGLang, and for most bases "
    f"vLLM, wants those in {peft.EACH} inside them, with tensors of each expert"
)


_LACKS = (
    "not exported: {}; other programs run these agents without, the team.yaml of --format peft has "
    "them for marft_jax"
)


@contextlib.contextmanager
def _all_or_nothing(out: Path) -> Iterator[Path]:
    """Gives a folder to write in, which becomes ``out`` when it is complete, or else goes.

    Raises:
        RunFailed: the disk is full, read-only or gone.
    """
    draft = out.absolute().with_name(f"{DRAFT}{out.absolute().name}-{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        yield draft
        _for_everyone(draft)
        os.replace(draft, out)  # also where an empty folder is there
    except Exception as error:  # safetensors and tokenizers have no OSError for a full disk
        if isinstance(error, OSError | SafetensorError) or "os error" in str(error):
            raise RunFailed(f"--out {out}: cannot be written ({reason(error)})") from error
        raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _for_everyone(folder: Path) -> None:
    """Gives files the modes of an ordinary program; safetensors lets only the owner read its."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    for path in folder.rglob("*"):
        path.chmod(mode if path.is_dir() else mode & 0o666)


def _portable(source: str) -> str:
    """Names a base for elsewhere: its hub id, or the name of its file or folder alone."""
    path = Path(source)
    return path.resolve().name if source != "tiny" and path.exists() else source


def _of(n: int, adapters: lora.Adapters) -> peft.Factors:
    return jax.tree.map(lambda x: x[n], adapters)


def _as_peft(
    out: Path, models: TeamModels, adapters: Mapping[str, lora.Adapters], facts: card.Facts
) -> None:
    """Writes a folder per adapter and the team's file; what they name lies beside them. With
    several bases there is a folder for the adapters of each."""
    team, blueprint = models.team, facts.blueprint
    places = [*zip(team.bases, team.owners, strict=True)]
    folders: dict[str, list[str]] = {}
    loaded = list[tuple[str, str]]()  # where a loader finds each base, and which loader
    for on, model in models.bases.items():
        inside, source = peft.layers_in(model.source), _portable(model.source)
        if model.source == "tiny":  # nobody else has it
            source = "base"
            huggingface.write_model(out / source, model, {}, 1.0, {})
        loaded.append((source, huggingface.loader_of(model.source)))
        for n in range(team.adapters[on]):
            folder, alpha = team.folder_of(on, n), models.config.lora.alpha
            of_model = inside, model.config.layers_with, dict(model.config.spelling)
            peft.publish(out / folder, _of(n, adapters[on]), alpha, source, *of_model)
            folders[folder] = [team.names[i] for i, x in enumerate(places) if x == (on, n)]
    servers = [card.serve_command(_portable(models.config.model.base))]
    if "experts" not in models.config.lora.targets:
        servers += _vllm_commands(out, models, dict(zip(models.bases, loaded, strict=True)))
    if plays := turns.is_static(team):
        turns.write(out, team, models.config.eval.temperature)
    card.write(out, facts, folders, *loaded[0], servers if plays else servers[:1], plays)
    seeded = tuple(
        dataclasses.replace(profile, init=team.folder_of(*place))
        for profile, place in zip(blueprint.agents, places, strict=True)
    )
    bases = {
        name: dataclasses.replace(base, model=_portable(base.model))
        for name, base in blueprint.bases.items()
    }
    text = dump_team(dataclasses.replace(blueprint, agents=seeded, bases=bases))
    (out / "team.yaml").write_text(text, encoding="utf-8")
    (out / "serve.yaml").write_text(_served(models.config, len(models.bases)), encoding="utf-8")


def _vllm_commands(
    out: Path, models: TeamModels, loaded: Mapping[str, tuple[str, str]]
) -> list[str]:
    """Writes the chat template of each base; the command with which vLLM serves its agents."""
    commands, team = list[str](), models.team
    for on, (source, _) in loaded.items():
        if source.lower().endswith(".gguf"):
            continue
        agents = [agent for agent, base in enumerate(team.bases) if base == on]
        adapters = {team.names[i]: team.folder_of(on, team.owners[i]) for i in agents}
        template = folder_of("chat_template.jinja", on, several=len(loaded) > 1)
        (out / template).write_text(team.tokenizers[agents[0]].template(), encoding="utf-8")
        commands.append(card.vllm_command(source, template, adapters, models.config.lora.rank))
    return commands


def _served(config: config_lib.Config, bases: int) -> str:
    """Settings with which this package plays the team of ``team.yaml``, for ``--config``."""
    sections = yaml.safe_load(config_lib.dump(config, several=bases > 1))
    del sections["model"]["base"]
    plain = {name: sections[name] for name in ("model", "team", "lora")}
    plain["team"]["file"], plain["lora"]["init"] = "team.yaml", None
    plain["eval"] = {"temperature": config.eval.temperature}
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def _as_merged(
    out: Path,
    models: TeamModels,
    adapters: Mapping[str, lora.Adapters],
    facts: card.Facts,
    agent: str | None,
    progress: Progress,
) -> None:
    """Writes a whole model per agent."""
    team, settings = models.team, models.config.lora
    members = zip(team.names, team.bases, team.owners, team.sampling, strict=True)
    wanted = [member for member in members if agent in (None, member[0])]
    total = sum(len(jax.tree.leaves(models.bases[on].params)) for _, on, _, _ in wanted)
    done = itertools.count(1)
    for name, on, owner, sampling in wanted:
        drawn = {"do_sample": sampling.temperature > 0, "max_new_tokens": sampling.max_new_tokens}
        if sampling.temperature > 0:
            drawn |= {k: getattr(sampling, k) for k in ("temperature", "top_p", "top_k", "min_p")}
        huggingface.write_model(
            out / name, models.bases[on], _of(owner, adapters[on]), settings.alpha / settings.rank,
            drawn, report=lambda: progress(next(done), total),
        )  # fmt: skip
    card.write(out, facts, {name: [name] for name, *_ in wanted})
