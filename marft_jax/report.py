"""Writes a page about runs: ``python -m marft_jax.report --run DIR --out FILE.html``."""

from collections.abc import Sequence

from marft_jax.plugins import load_extra


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command of ``extras/report``."""
    load_extra("command.report")(argv)


if __name__ == "__main__":
    main()
