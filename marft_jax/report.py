"""Writes a page about runs: ``python -m marft_jax.report --run DIR --out FILE.html``."""

from functools import partial

from marft_jax.plugins import run_command

main = partial(run_command, "report")

if __name__ == "__main__":
    main()
