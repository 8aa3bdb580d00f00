"""Strict JAX for every test, on eight virtual devices."""

import gc
import itertools
import os
import random
import time
from pathlib import Path

# Before JAX is loaded, as the command line does: jaxlib 0.10.1 logs false errors on AMD processors.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import pytest
from hypothesis import settings

from tim_jax.app import cli
from tim_jax.common import waiting
from tim_jax.instruments import auditing
from tim_jax.model import fitting
from tim_jax.model.execution import forget_programs

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)
# A device that is late at a collective is waited for: eight share two cores with another worker.
_PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
# LLVM would unroll every small loop whole, and tests have small shapes only: a fifth of the time
# that compiling takes. What is computed, and in which order, is the same.
_SHORT = "--xla_backend_extra_options=xla_cpu_disable_loop_unrolling"
# JAX 0.12 has no other way of emitting, and no such flag.
_EMITTED_PLAINLY = "--xla_cpu_use_fusion_emitters=false"
# Workers inherit the flags, and a program's key in the cache knows them: each is set once.
_flags = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([_flags, *(f for f in (_PATIENT, _SHORT) if f not in _flags)])
# Tracing makes millions of objects that live on: looking through them took a twentieth of the time.
gc.set_threshold(50_000, 20, 20)

# Compilation makes the first example slow; a failure prints what reproduces it. The suite draws the
# same examples in every run, so that it fails by what was changed and not by luck. New ones are
# drawn with --hypothesis-profile=explore.
settings.register_profile("explore", deadline=None, print_blob=True)
settings.register_profile("suite", settings.get_profile("explore"), derandomize=True)
settings.load_profile("suite")


# Compiled programs stay here from run to run and for every checkout, those of one kind of
# processor. They may be deleted at any time.
_HERE = Path(__file__).parent
_PROGRAMS = cli._kept_folder() / "tests"


@pytest.fixture(scope="session", autouse=True)
def _compiled_once(tmp_path_factory):
    """A program that was compiled before is not compiled again, by any worker or in any later run.

    Who reads one that another worker has half written is told so by JAX, and compiles it again. The
    programs of child processes are kept for this run alone: one that a killed child leaves half
    written would never be whole.
    """
    jax.config.update("jax_compilation_cache_dir", str(_PROGRAMS))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    with pytest.MonkeyPatch.context() as patch:
        children = tmp_path_factory.getbasetemp() / "compiled_by_children"
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(children))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        yield


# Exactness itself, a CPU's kernels, draws, sampler, scoring and audits are tested as users compile,
# and so is whatever runs with --optimised: in CI, a mesh and the corrections. These modules compare
# programs with others compiled alike, and compile without most of LLVM's optimisations, in three
# quarters of the time.
_UNOPTIMISED = frozenset(
    {
        "app/run/test_folders",
        "app/test_bad_models",
        "app/test_controls",
        "app/test_crossed_runs",
        "app/test_end_to_end",
        "app/test_faults",
        "app/test_fuzz",
        "app/test_lora_runs",
        "app/test_placed_runs",
        "app/test_processes",
        "app/test_untrusted",
        "instruments/auditing/test_ablation",
        "instruments/plan/test_budget",
        "instruments/study/test_report",
        "instruments/study/test_running",
        "policy/test_entropy",
        "policy/test_slots",
        "rl/test_ahead",
        "rl/test_expert_axis",
        "rl/test_learner",
        "rl/test_programs",
        "rl/test_routing",
        "rl/test_sharded",
        "rl/test_micro_batches",
        "rl/test_turns",
        "scripts/test_gpu_check",
        "scripts/test_soak",
    }
)

# Formulas and references within rounding, kernels of other devices, whose operations a CPU computes
# one by one, and what goes around a forward: with --part=plain also without XLA's emitters of
# fusions, in half the time. A forward's bits can then depend on the program (-m slow of
# rl/test_ahead.py and rl/test_learner.py), so no module is listed that proves exactness. A process
# reads XLA's flags once: scripts/test.sh runs them apart.
_PLAIN = frozenset(
    {
        "api/test_api",
        "api/test_learning",
        "app/config/test_verl",
        "app/test_cli",
        "corrections/test_corrections",
        "corrections/test_gradient",
        "corrections/test_modes",
        "corrections/test_recipes",
        "corrections/test_rejecting",
        "instruments/diagnosis/test_parts",
        "instruments/diagnosis/test_recorded_more",
        "instruments/diagnosis/test_shaping",
        "instruments/diagnosis/test_verdict",
        "instruments/study/test_gradient",
        "kernels/test_pallas",
        "mismatch/test_arithmetic",
        "mismatch/test_dial",
        "mismatch/test_mixtures",
        "mismatch/test_training",
        "model/test_adapters",
        "model/test_hf",
        "model/test_transformer",
        "objectives/test_advantages",
        "objectives/test_group_gradients",
        "objectives/test_losses",
        "objectives/test_objective",
        "objectives/test_shaping",
        "rl/test_loop",
        "schedules/test_schedules",
        "scripts/test_parity_table",
        "test_metrics",
        "test_optimizers",
    }
)


def pytest_addoption(parser):
    parser.addoption("--optimised", action="store_true", help="compile all tests as users do")
    parser.addoption("--part", choices=["plain", "rest"], help="those compiled in one way alone")
    about = "when all must have ended, in seconds since 1970 (see CONTRIBUTING.md)"
    parser.addoption("--until", type=int, help=about)


def pytest_configure(config):
    if config.getoption("--part") == "plain" and _EMITTED_PLAINLY not in os.environ["XLA_FLAGS"]:
        os.environ["XLA_FLAGS"] += f" {_EMITTED_PLAINLY}"


def pytest_ignore_collect(collection_path, config):
    if collection_path.name.startswith("test_") and _of_the_other_part(config, collection_path):
        return True
    return None


def pytest_collection_modifyitems(config, items):
    """Those compiled in one way are neighbours, so that a process seldom changes."""
    other = [item for item in items if _of_the_other_part(config, item.path)]  # named by their file
    config.hook.pytest_deselected(items=other)
    items[:] = [item for item in items if not _of_the_other_part(config, item.path)]
    drawn = _order_of_modules(config, items)
    items.sort(key=lambda item: (not _unoptimised(config, item.path), drawn.get(item.path)))


def _order_of_modules(config, items) -> dict[Path, int]:
    """With --until: each module's place, drawn by that number, which all workers are given.

    Modules with a test that takes long are first: at the end, other workers would wait for it.
    """
    if config.getoption("--until") is None:
        return {}
    paths = sorted({item.path for item in items})
    random.Random(config.getoption("--until")).shuffle(paths)
    long = {item.path for item in items if _minutes(item) > _MINUTES}
    paths.sort(key=lambda path: path not in long)
    return {path: place for place, path in enumerate(paths)}


# Of a slow test on a slow machine. Some may take longer, and say so: `pytest.mark.slow(minutes=9)`.
_MINUTES = 4


def _minutes(item) -> float:
    mark = item.get_closest_marker("slow")
    return _MINUTES if mark is None else mark.kwargs.get("minutes", _MINUTES)


def pytest_runtest_setup(item):
    until = item.config.getoption("--until")
    if until is not None and time.time() + 60 * _minutes(item) > until:
        pytest.skip("NOT RUN: the time was up (--until)")


def pytest_sessionfinish(session, exitstatus):
    """Nothing to run is no failure of a part: all that was asked for may be in the other one."""
    if session.config.getoption("--part") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def _of_the_other_part(config, path) -> bool:
    part = config.getoption("--part")
    plain = _name(path) in _PLAIN and jax.__version_info__ < (0, 12)
    plain = plain and not config.getoption("--optimised")
    return part is not None and plain != (part == "plain")


def _name(path) -> str:
    return path.relative_to(_HERE).with_suffix("").as_posix()


def _unoptimised(config, path) -> bool:
    return _name(path) in _UNOPTIMISED | _PLAIN and not config.getoption("--optimised")


@pytest.fixture(scope="module", autouse=True)
def _optimised_where_it_matters(request):
    unoptimised = _unoptimised(request.config, request.path)
    if jax.config.read("jax_disable_most_optimizations") != unoptimised:
        jax.clear_caches()  # a program in memory is taken whichever way it was compiled
        jax.config.update("jax_disable_most_optimizations", unoptimised)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", str(int(unoptimised)))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_waits_are_said():
    """How long a busy machine takes is no line of a test's output; who tests them sets it again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "SECONDS", 1e4)
        yield


@pytest.fixture(scope="module")
def traced_once():
    """Runs of a module that compute the same are traced once, see `traced`."""
    import traced  # which needs more than most tests do

    with pytest.MonkeyPatch.context() as patch:
        traced.once(patch)
        yield


@pytest.fixture
def unmeasured(monkeypatch):
    """Tiles are as they are fixed: nothing is measured of this machine."""
    monkeypatch.setattr(fitting, "calibrate", lambda config, numerics, **_: numerics)


@pytest.fixture
def few_cases(monkeypatch):
    """An audit of two cases and one placement, not of dozens: for tests of what is around it."""
    cases, placements = auditing.standard_cases, auditing.placements
    monkeypatch.setattr(auditing, "standard_cases", lambda *given, **_: cases(*given)[:2])
    monkeypatch.setattr(auditing, "placements", lambda *given: placements(*given)[:1])


_tests = itertools.count()


@pytest.fixture(autouse=True)
def _few_mappings():
    """Forgets compiled programs before a compile crashes at the kernel's 65,530 mappings.

    To count them takes milliseconds, so it is not done after every one of thousands of tests.
    """
    yield
    if next(_tests) % 8 == 0:
        forget_programs()
