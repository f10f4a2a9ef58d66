"""Takes a trained team out of a run: ``python -m marft_jax.export --run DIR --out DIR``."""

from functools import partial

from marft_jax.plugins import run_command

main = partial(run_command, "export")

if __name__ == "__main__":
    main()
