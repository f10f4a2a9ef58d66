"""Serves a trained team as an OpenAI endpoint: ``python -m marft_jax.serve --run DIR``."""

from collections.abc import Sequence

from marft_jax.plugins import load_extra


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command of ``extras/gateway``."""
    load_extra("command.serve")(argv)


if __name__ == "__main__":
    main()
