"""Opening what a run directory holds: its settings, its team and the state of any of its steps."""

from __future__ import annotations

from collections.abc import Sequence

from marft_jax import cli
from marft_jax import config as config_lib
from marft_jax.interop.initial import initial_state
from marft_jax.learning.algorithms import find_algorithm
from marft_jax.learning.learner import Learner, TrainState
from marft_jax.run.checkpoints import Checkpoints, Which
from marft_jax.run.identity import identity_of
from marft_jax.run.setup import Session


def arguments(prog: str, description: str | None, *, base: bool = True) -> cli.Parser:
    """A parser that knows which team is meant: ``--run`` with ``--step``, or a bare ``--base``."""
    parser = cli.Parser(prog, description)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run", metavar="DIR", help="a run directory")
    if base:
        which.add_argument("--base", metavar="MODEL", help="a base model, without a run")
    parser.add_argument(
        "--step",
        default="latest",
        metavar="N|best|latest",
        help="the checkpoint to take from a run (latest)",
    )
    return parser


def settings_of(
    run: str | None, base: str | None, flags: Sequence[str], prog: str = "marft_jax.evaluate"
) -> config_lib.Config:
    """The settings of a run, or the defaults on a base, with flags on top.

    Raises:
        BadInput: there is no run in that directory, or a setting is wrong.
    """
    if run is None:
        flags = [*(("--model.base", base) if base else ()), *flags]
    return cli.parse(flags, prog=prog, run=run, evaluating=True)


def restore_team(session: Session, run: str | None, step: str = "latest") -> int:
    """Gives the engine the adapters of ``run``; without a run those that a training begins with.

    Returns:
        The training step they come from; 0 without a run.

    Raises:
        BadInput: the run has no such checkpoint, or it belongs to another base or team.
    """
    state = restore_state(session, run, step)
    session.engine.load(state.adapters)
    return int(state.step)


def restore_state(session: Session, run: str | None, step: str = "latest") -> TrainState:
    """The state after a step of ``run``: a number, ``best`` or ``latest``; without a run the first.

    Raises:
        BadInput: see ``restore_team``.
    """
    which = _which(step)
    config, team = session.config, session.team
    algorithm = find_algorithm(config.algo.name)
    state = Learner(config, session.base, team, algorithm, session.mesh).init()
    if run is None:
        if which != "latest":
            raise config_lib.BadInput(f"--step {step}: only a --run has steps; leave it out")
        return initial_state(config, team, state)
    identity = identity_of(config, session.base, team)
    with Checkpoints(run, identity, config.run.keep) as checkpoints:
        saved = checkpoints.restore(state, which)
        if saved is None:
            there = ", ".join(map(str, checkpoints.steps)) or "none"
            raise config_lib.BadInput(
                f"--run {run} --step {step}: it has no such intact checkpoint; there are: {there}"
            )
    return saved.state


def _which(word: str) -> Which:
    if word == "latest" or word == "best":
        return word
    try:
        return int(word)
    except ValueError:
        raise config_lib.BadInput(
            f"--step: expected a step's number, best or latest, got {word!r}"
        ) from None
