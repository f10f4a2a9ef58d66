"""Serves a trained team as an OpenAI endpoint: ``python -m marft_jax.serve --run DIR``."""

from functools import partial

from marft_jax.plugins import run_command

main = partial(run_command, "serve")

if __name__ == "__main__":
    main()
