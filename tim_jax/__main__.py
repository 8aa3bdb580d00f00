"""`python -m tim_jax`, for environments whose scripts are not on the path."""

from tim_jax.app.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
