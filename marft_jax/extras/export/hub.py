"""Pushes an exported team to the hub, and fetches a team from it."""

from __future__ import annotations

import re
from pathlib import Path

from marft_jax.errors import BadInput, RunFailed, one_line

PREFIX = "hub:"
_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_FILES = ["*.json", "*.safetensors", "*.yaml"]  # nothing that runs


def repository(name: str, setting: str) -> tuple[str, str | None]:
    """Reads ``owner/name`` or ``owner/name@revision``; raises ``BadInput``."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise BadInput(f"{setting}: expected owner/name, got {name!r:.80}")
    return match["repo"], match["revision"]


def push(folder: Path, name: str, step: int) -> str:
    """Uploads a folder as a repository, which is created as a private one; returns its address.

    Raises:
        BadInput: the name is not valid.
        RunFailed: the hub cannot be reached, or the token is missing or not sufficient.
    """
    from huggingface_hub import HfApi

    api, (repo, revision) = HfApi(), repository(name, "--push")
    try:
        url = api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            revision=revision,
            commit_message=f"Team after step {step}",
        )
    except Exception as error:  # network and hub errors of several libraries
        why = one_line(str(error))
        raise RunFailed(f"--push {repo}: {why}; `hf auth login` gives a token") from error
    return str(url)


def fetch(name: str) -> Path:
    """Downloads the adapters and the team file of ``hub:owner/name[@revision]`` to hub's cache.

    Raises:
        BadInput: there is no such repository, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    repo, revision = repository(name.removeprefix(PREFIX), "--lora.init")
    try:
        return Path(HfApi().snapshot_download(repo, revision=revision, allow_patterns=_FILES))
    except Exception as error:  # as above
        raise BadInput(f"--lora.init {name:.80}: {one_line(str(error))}") from error
