"""``python -m marft_jax.report``."""

from marft_jax.report import main

if __name__ == "__main__":
    main()
