"""`python -m tim_jax`, for environments whose scripts are not on the path."""

from tim_jax.app.cli import run_and_exit

if __name__ == "__main__":
    run_and_exit()
