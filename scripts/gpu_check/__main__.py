"""Runs stages of cases, in processes of their own: a crash is one failed case, not the end.

What is timed runs alone. What is not, such as compiling whole programs and comparing bits, runs in
several processes before it and after it.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from pathlib import Path

import page
import records

# Part -> its module, and the module's function that makes the cases.
PARTS = {
    "programs": ("speed", "programs"),
    "exactness": ("exactness", "cases"),
    "speed": ("speed", "cases"),
    "accuracy": ("accuracy", "cases"),
    "kernels": ("gates", "cases"),
    "controls": ("exactness", "controls"),
    "products": ("products", "cases"),
    "torch": ("torch_speed", "cases"),
}
CHOICES = {
    "exactness": ("exactness", "controls"),
    "accuracy": ("accuracy",),
    "kernels": ("kernels", "products"),
    "speed": ("programs", "speed", "torch"),
}


@dataclass(frozen=True)
class Stage:
    """Parts whose cases are taken one after the other, until a share of the time is over."""

    parts: tuple[str, ...]
    until: float
    together: bool = False  # in several processes: nothing is timed


# What matters most comes first. A stage that ends early leaves its time to the next.
STAGES = (
    Stage(("programs", "exactness"), 0.28, together=True),
    Stage(("speed",), 0.72),
    Stage(("accuracy", "kernels", "controls"), 0.88, together=True),
    Stage(("products",), 0.94),
    Stage(("torch",), 1.0),
)
_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "flax",
    "numpy",
    "torch",
    "transformers",
    "triton",
)
_GRACE = 20  # seconds that a case may go on after its stage
_SMOKE_PATIENCE = 12  # times as long on a CPU
_RESTARTS = 2  # of each process, after a crash
_WORKERS = 8  # at most
_NO_GPU = 3  # the status of a process that finds none


def main() -> int:
    arguments = _parser().parse_args()
    out = arguments.out or Path("runs") / ("gpu_check_smoke" if arguments.smoke else "gpu_check")
    if arguments.parts:
        return _child(arguments.parts.split(","), out, arguments.smoke, arguments.until)
    only = arguments.only.split(",") if arguments.only else list(CHOICES)
    if unknown := set(only) - set(CHOICES):
        print(f"--only: unknown part {sorted(unknown)[0]!r}; known: {', '.join(CHOICES)}")
        return 2
    parts = [part for name in only for part in CHOICES[name]]
    out.mkdir(parents=True, exist_ok=True)
    check = Check(out, arguments.smoke, time.monotonic(), 60 * arguments.minutes)
    if arguments.again:
        check.ledger.path.unlink(missing_ok=True)
    check.again = check.ledger.forget(parts, records.FAILED, records.RUNNING)
    for stage in STAGES:
        check.run(replace(stage, parts=tuple(part for part in stage.parts if part in parts)))
    text, status = check.write()
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
    parser.add_argument("--minutes", type=float, default=9.0, help="of all together (9)")
    parser.add_argument("--smoke", action="store_true", help="every part on the CPU, small")
    parser.add_argument("--again", action="store_true", help="forget earlier results")
    parser.add_argument("--out", type=Path, help="folder of results (runs/gpu_check)")
    parser.add_argument("--parts", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return parser


@dataclass
class Check:
    """One call: where its results go, and its time."""

    out: Path
    smoke: bool
    start: float  # a reading of `time.monotonic`
    seconds: float
    again: Collection[str] = ()  # parts of which an earlier call has a case to try again

    def __post_init__(self) -> None:
        self.seconds *= _SMOKE_PATIENCE if self.smoke else 1
        self.ledger = records.Ledger(self.out / "ledger.jsonl")

    def run(self, stage: Stage) -> None:
        """Runs a stage's processes, and again those that crashed; ends them at their time.

        The page is written meanwhile: the machine may be taken away.
        """
        until = self.start + stage.until * self.seconds - _GRACE
        if not stage.parts or time.monotonic() > until or self._is_done(stage.parts):
            return
        print(f"--- {', '.join(stage.parts)}", flush=True)
        count = max(1, min(_WORKERS, (os.cpu_count() or 1) // 2)) if stage.together else 1
        running = [self._begin(stage, until) for _ in range(count)]
        restarts = _RESTARTS * count
        while running:
            time.sleep(0.2 if self.smoke else 1)
            self.write()
            for process in list(running):
                if process.poll() is None and time.monotonic() > until + _GRACE:
                    process.kill()
                    process.wait()
                    reason = "stopped: its stage's time was over"
                    self.ledger.close(process.pid, records.LEFT, reason)
                    running.remove(process)
                elif process.poll() is not None:
                    running.remove(process)
                    if self._is_to_be_begun_again(process, stage.parts) and restarts:
                        restarts -= 1
                        running.append(self._begin(stage, until))

    def _is_done(self, parts: tuple[str, ...]) -> bool:
        """Whether an earlier call has a result of every case of these parts."""
        found = [r for r in self.ledger.records().values() if r.part in parts]
        named = {record.part for record in found} == set(parts)
        left = any(record.status == records.LEFT for record in found)
        return named and not left and set(parts).isdisjoint(self.again)

    def _begin(self, stage: Stage, until: float) -> subprocess.Popen:
        command = [sys.executable, str(Path(__file__).parent), "--parts", ",".join(stage.parts)]
        command += ["--out", str(self.out), "--until", str(until)] + ["--smoke"] * self.smoke
        memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}  # for the one that is alone
        if stage.together or "torch" in stage.parts:
            memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        return subprocess.Popen(command, env={**memory, **os.environ})

    def _is_to_be_begun_again(self, process: subprocess.Popen, parts: tuple[str, ...]) -> bool:
        """Records what a process that crashed was doing; whether others cases may go better."""
        if process.returncode == 0:
            return False
        reason = f"the process ended with status {process.returncode} while it ran"
        if self.ledger.close(process.pid, records.FAILED, reason):
            return process.returncode != _NO_GPU
        name = "the process itself"
        reason = f"status {process.returncode}, before any case"
        self.ledger.put(records.Record(parts[0], name, records.FAILED, reason=reason))
        return False

    def write(self) -> tuple[str, int]:
        """Writes the page of all parts that have results; its text, and 0 if all is well."""
        machine = self.out / "machine.json"
        known = json.loads(machine.read_text()) if machine.exists() else {"smoke": self.smoke}
        found = sorted(self.ledger.records().values(), key=lambda r: list(PARTS).index(r.part))
        text = page.write(self.out, known, found)
        return text, int(not found or any(r.status == records.FAILED for r in found))


def _child(parts: list[str], out: Path, smoke: bool, until: float) -> int:
    import jax
    from setting import Setting

    jax.config.update("jax_compilation_cache_dir", str(_programs(out)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    device = jax.devices()[0]
    _describe(device, out, smoke)
    if device.platform != "gpu" and not smoke and parts != ["torch"]:
        print(f"no GPU: jax sees {device.platform}; use --smoke on a CPU")
        return _NO_GPU
    cases = []
    for part in parts:
        module, function = PARTS[part]
        made = getattr(import_module(module), function)(Setting(smoke, out))
        cases += [replace(case, part=part) for case in made]
    ledger = records.Ledger(out / "ledger.jsonl")
    for record in records.run_cases(cases, ledger, until=until):
        print(records.line(record), flush=True)
    return 0


def _describe(device, out: Path, smoke: bool) -> None:
    """Writes what the figures were measured on, and by."""
    machine = {
        "device": device.device_kind,
        "platform": device.platform,
        "driver": page.driver(),
        "python": platform.python_version(),
        "ptxas": page.ptxas(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "none"),
        "date": time.strftime("%Y-%m-%d"),
        "tree": _tree(),
        **{name: _version(name) for name in _PACKAGES},
        "smoke": smoke,
    }
    partial = out / f"machine.{os.getpid()}"
    partial.write_text(json.dumps(machine))
    partial.replace(out / "machine.json")


def _tree() -> str:
    """The commit, if git knows it."""
    command = ["git", "describe", "--always", "--dirty"]
    here = Path(__file__).parent
    try:
        found = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    sys.exit(main())
