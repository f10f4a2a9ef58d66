"""Plans a run on hardware that is not here: ``python -m marft_jax.plan --topology NAME``."""

from functools import partial

from marft_jax.plugins import run_command

main = partial(run_command, "plan")

if __name__ == "__main__":
    main()
