"""Checks the settings of a training with its team file, before a model is loaded.

Nothing here imports JAX, so that errors come at once.
"""

from __future__ import annotations

from marft_jax.errors import BadInput
from marft_jax.learning.normalizers import find_normalizer
from marft_jax.learning.settings import Distill
from marft_jax.learning.step_rewards import find_step_reward
from marft_jax.settings.config import Algo, Branching, Config, Rollout
from marft_jax.team.profiles import Profile
from marft_jax.team.team_files import Blueprint, load_team
from marft_jax.team.workflows import find_workflow


def check_training(config: Config) -> Blueprint:
    """Reads the team file of a training, and checks it with the settings.

    Raises:
        BadInput: a normaliser, a workflow or a step reward that is not found, and whatever
            ``check_learns`` refuses.
    """
    blueprint = check_team(config)
    check_learns(config, blueprint)
    find_normalizer(config.algo.part(Algo).normalize)
    return blueprint


def check_team(config: Config) -> Blueprint:
    """Reads the team file, and checks that its workflow is found, and that no device is to play
    where the engine does not; else raises ``BadInput``."""
    apart = {"rollout": config.mesh.rollout, "bases": config.mesh.bases}
    if not isinstance(config.rollout, Rollout) and (given := [n for n, x in apart.items() if x]):
        raise BadInput(
            f"--mesh.{given[0]}: devices that play are the engine's, and --rollout.sampler is "
            f"{config.rollout.sampler}; leave it out"
        )
    blueprint = load_team(config.team.file)
    find_workflow(config.team.workflow or blueprint.workflow)
    return blueprint


def check_learns(config: Config, blueprint: Blueprint) -> None:
    """Raises ``BadInput`` for a step reward that is not found, an agent whose samples teach
    nothing, and a length penalty of every action."""
    algo, names = config.algo.part(Algo), [profile.name for profile in blueprint.agents]
    at, learns_from_them = config.algo.part(Branching).branch_at, isinstance(config.algo, Distill)
    if at not in ("random", "every") and not set(at.split(",")) <= set(names):
        raise BadInput(
            f"--algo.branch_at: expected random, every, or agents among {', '.join(names)}, got "
            f"{at!r:.60}"
        )
    if any(blueprint.teachers) != learns_from_them and not config.algo.recorded:
        got = "no agent that learns with one" if learns_from_them else config.algo.name
        raise BadInput(
            f"teacher: expected `teacher:` in the team file together with --algo.name distill, got "
            f"{got}; add or remove one of them"
        )
    for profile in blueprint.agents:
        if profile.learns and not config.algo.recorded:
            _check_samples(config, profile, algo.overlong_buffer)
    for name in (algo.step_reward, *(profile.reward for profile in blueprint.agents)):
        if name is not None:
            find_step_reward(name)


def _check_samples(config: Config, profile: Profile, penalised: int) -> None:
    """Raises ``BadInput`` for an agent that learns from samples which teach nothing."""
    sampling = profile.sampling(config.team)
    if penalised > sampling.max_new_tokens:
        raise BadInput(
            f"--algo.overlong_buffer: expected at most {sampling.max_new_tokens}, the token limit "
            f"of agent {profile.name!r}, got {penalised}, with which every action is penalised; "
            "lower it"
        )
    if sampling.temperature == 0:
        raise BadInput(
            f"agent {profile.name!r}: expected a temperature above 0 in training, got 0: "
            "greedy samples teach nothing; raise --team.temperature, or its own"
        )
