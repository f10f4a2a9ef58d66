"""Takes a trained team out of a run: ``python -m marft_jax.export --run DIR --out DIR``."""

from collections.abc import Sequence

from marft_jax.plugins import load_extra


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command of ``extras/export``."""
    load_extra("command.export")(argv)


if __name__ == "__main__":
    main()
