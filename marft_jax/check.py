"""Tries an environment of yours, or shows the tasks of data: ``python -m marft_jax.check``."""

from collections.abc import Sequence

from marft_jax.plugins import load_extra


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command of ``extras/check``."""
    load_extra("command.check")(argv)


if __name__ == "__main__":
    main()
