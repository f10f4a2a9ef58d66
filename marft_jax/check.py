"""Tries an environment of yours, or shows the tasks of data: ``python -m marft_jax.check``."""

from functools import partial

from marft_jax.plugins import run_command

main = partial(run_command, "check")

if __name__ == "__main__":
    main()
