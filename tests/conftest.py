"""Strict JAX for every test, on eight virtual devices."""

import jax
from hypothesis import settings

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)

# Compilation makes the first example slow; a failure prints what reproduces it.
settings.register_profile("suite", deadline=None, print_blob=True)
settings.load_profile("suite")
