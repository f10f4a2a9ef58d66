"""Plans a run on hardware that is not here: ``python -m marft_jax.plan --topology NAME``."""

from collections.abc import Sequence

from marft_jax.plugins import load_extra


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command of ``extras/planning``."""
    load_extra("command.plan")(argv)


if __name__ == "__main__":
    main()
