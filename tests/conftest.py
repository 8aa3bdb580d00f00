"""Strict JAX for every test, on eight virtual devices."""

import jax
import pytest
from hypothesis import settings

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)

# Compilation makes the first example slow; a failure prints what reproduces it.
settings.register_profile("suite", deadline=None, print_blob=True)
settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(tmp_path_factory):
    """A program that another test has compiled is not compiled again.

    Each worker has a folder of its own: JAX writes its files in place, where another could read
    half of one.
    """
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.getbasetemp() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _mappings() -> int:
    """Memory mappings of this process (Linux), which every compiled program adds to."""
    try:
        with open("/proc/self/maps") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


@pytest.fixture(autouse=True)
def _few_mappings():
    """Forgets compiled programs before a compile crashes at the kernel's 65,530 mappings."""
    yield
    if _mappings() > 30_000:
        jax.clear_caches()
