"""Runs the parts, each in a process of its own: a crash is one failed case, not the end."""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import import_module, metadata
from pathlib import Path

import page
import records

# Part -> (module, seconds of its budget). "torch" belongs to "speed".
PARTS = {
    "exactness": ("exactness", 140),
    "accuracy": ("accuracy", 50),
    "kernels": ("gates", 90),
    "speed": ("speed", 210),
    "torch": ("torch_speed", 50),
}
CHOICES = ("exactness", "accuracy", "kernels", "speed")
_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "flax",
    "numpy",
    "torch",
)
_GRACE = 30  # seconds that the last case of a part may run over
_WHOLE = 570  # seconds of all parts, whatever their budgets
_SMOKE_PATIENCE = 12  # times as long on a CPU
_RESTARTS = 3


def main() -> int:
    arguments = _parser().parse_args()
    out = arguments.out or Path("runs") / ("gpu_check_smoke" if arguments.smoke else "gpu_check")
    if arguments.part:
        return _child(arguments.part, out, arguments.smoke)
    only = arguments.only.split(",") if arguments.only else list(CHOICES)
    if unknown := set(only) - set(CHOICES):
        print(f"--only: unknown part {sorted(unknown)[0]!r}; known: {', '.join(CHOICES)}")
        return 2
    parts = [name for name in PARTS if name in only or (name == "torch" and "speed" in only)]
    out.mkdir(parents=True, exist_ok=True)
    if arguments.again:
        for name in parts:
            (out / f"{name}.json").unlink(missing_ok=True)
    end = time.monotonic() + _WHOLE * (_SMOKE_PATIENCE if arguments.smoke else 1)
    for name in parts:
        records.Ledger(out / f"{name}.json").forget(records.FAILED)
        _run_part(name, out, arguments.smoke, end)
    text, status = _write_page(out, arguments.smoke)
    print(text)
    if arguments.smoke:
        shutil.rmtree(_programs(out), ignore_errors=True)
    return status


def _programs(out: Path) -> Path:
    """Where compiled programs are kept: beside the results, which are a few files to take along."""
    return out.absolute().with_name(f"{out.absolute().name}_programs")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__)
    parser.add_argument("--only", help=f"parts, by commas: {','.join(CHOICES)}")
    parser.add_argument("--smoke", action="store_true", help="every part on the CPU, small")
    parser.add_argument("--again", action="store_true", help="forget earlier results")
    parser.add_argument("--out", type=Path, help="folder of results (runs/gpu_check)")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    return parser


def _run_part(name: str, out: Path, smoke: bool, latest: float) -> None:
    """Runs a part's process, again after a crash: the case that crashed counts as failed."""
    budget = PARTS[name][1] * (_SMOKE_PATIENCE if smoke else 1)
    end = min(time.monotonic() + budget + _GRACE, latest)
    print(f"--- {name}", flush=True)
    command = [sys.executable, str(Path(__file__).parent), "--part", name, "--out", str(out)]
    for _ in range(_RESTARTS):
        remaining = end - time.monotonic()
        if remaining <= 0:
            break
        environment = {**os.environ, "GPU_CHECK_SECONDS": str(max(5.0, remaining - _GRACE))}
        if name == "torch":
            environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the memory is for torch
        try:
            status = subprocess.run(
                command + ["--smoke"] * smoke, env=environment, timeout=remaining, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
        ledger = records.Ledger(out / f"{name}.json")
        dead = ledger.bury_the_dead()
        if status == 0:
            return
        if not dead:
            ledger.put(
                records.Record(f"the part {name} itself", records.FAILED, reason=f"status {status}")
            )
            return


def _child(name: str, out: Path, smoke: bool) -> int:
    import jax
    from setting import Setting

    jax.config.update("jax_compilation_cache_dir", str(_programs(out)))
    device = jax.devices()[0]
    machine = {
        "device": device.device_kind,
        "platform": device.platform,
        "driver": page.driver(),
        "python": platform.python_version(),
        "ptxas": page.ptxas(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "none"),
        **{name: _version(name) for name in _PACKAGES},
        "smoke": smoke,
    }
    (out / "machine.json").write_text(json.dumps(machine))
    if device.platform != "gpu" and not smoke and name != "torch":
        print(f"no GPU: jax sees {device.platform}; use --smoke on a CPU")
        return 2
    cases = import_module(PARTS[name][0]).cases(Setting(smoke, out))
    ledger = records.Ledger(out / f"{name}.json")
    seconds = float(os.environ["GPU_CHECK_SECONDS"])
    for record in records.run_cases(cases, ledger, seconds=seconds):
        print(records.line(record), flush=True)
        _write_page(out, smoke)  # after every case: the machine may be taken away
    return 0


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _write_page(out: Path, smoke: bool) -> tuple[str, int]:
    """Writes the page of all parts that have results; its text, and 0 if all is well."""
    found = {name: out / f"{name}.json" for name in PARTS}
    parts = {
        name: list(records.Ledger(path).records.values())
        for name, path in found.items()
        if path.exists()
    }
    machine = out / "machine.json"
    known = json.loads(machine.read_text()) if machine.exists() else {"smoke": smoke}
    text = page.write(out, known, parts)
    everything = [record for part in parts.values() for record in part]
    return text, int(not everything or any(r.status == records.FAILED for r in everything))


if __name__ == "__main__":
    sys.exit(main())
