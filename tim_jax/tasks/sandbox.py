"""Python code of the policy's in a process that the operating system isolates.

The process has Linux namespaces of its own, which an ordinary user may make: no network, no other
processes, and a file system of the interpreter's own files, read-only, with an empty scratch folder
that is gone afterwards. Limits of CPU time, memory, files and processes are the kernel's
(setrlimit(2)), that of the clock is the parent's. Where the machine does not allow such namespaces,
`check` says so and nothing is run.

This file is run as a script by its path, as `worker.py` is, so that it imports nothing of the
package there. The namespaces are those of user_namespaces(7), mount_namespaces(7) and
pid_namespaces(7), entered as `unshare(1)` and bubblewrap do.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Numbers of <sched.h>, <sys/mount.h>, <sys/prctl.h>.
NEW_MOUNTS, NEW_NAMES, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SETUID, NO_DEVICES, REMOUNT = 1, 2, 4, 32
BIND, RECURSIVE, PRIVATE, DETACH = 4096, 16384, 1 << 18, 2
DEATH_SIGNAL, NO_NEW_PRIVILEGES = 1, 38

NOBODY = 65534
SYSTEM = ("/usr", "/lib", "/lib64", "/bin")  # what an interpreter is linked with
SCRATCH_BYTES, FILE_BYTES = 64 << 20, 16 << 20
OUTPUT_BYTES = 1 << 20  # that are read of what is printed
PROCESSES = 16
# Beyond the CPU's, by the clock: many programs may share a core, and a turn has 30 seconds.
CLOCK_EXTRA = 20.0
REFUSED = 120  # exit code of this script where namespaces cannot be made

SCRIPT = Path(__file__)
# A library would start a thread for each of the machine's cores.
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONHASHSEED": "0", **ONE_THREAD}
# The code may import what is installed here.
PACKAGES = os.path.realpath(sysconfig.get_path("purelib"))


@dataclass(frozen=True)
class Ran:
    """What a piece of code did.

    Attributes:
      output: what it printed, errors too.
      end: how it ended, empty for well.
    """

    output: str
    end: str = ""


_KILLED = "it was killed by signal {}"
_TERMINATED = _KILLED.format(signal.SIGTERM.value)


def run(code: str, *, seconds: float = 5.0, memory: int = 512 << 20) -> Ran:
    """Runs Python code, isolated.

    A scheduler may send SIGTERM to all processes of a job, the code's among them. What it ended is
    run once more, so that the signal changes no reply: nothing is left of the first time.

    Args:
      seconds: of CPU time.
      memory: bytes of its address space.

    Raises:
      OSError: this machine does not allow the namespaces, with the reason.
    """
    ran = _run_once(code, seconds, memory)
    return _run_once(code, seconds, memory) if ran.end == _TERMINATED else ran


def _run_once(code: str, seconds: float, memory: int) -> Ran:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as source:
        source.write(code.encode(errors="replace"))
        source.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(SCRIPT), str(seconds), str(memory), PACKAGES],
            stdin=source,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**ENVIRONMENT, "PYTHONPATH": PACKAGES},
            start_new_session=True,
        )
        try:
            status = process.wait(seconds + CLOCK_EXTRA)
            end = _end(status, seconds)
        except subprocess.TimeoutExpired:
            end = f"it took longer than {seconds + CLOCK_EXTRA:g} s by the clock"
        finally:
            process.kill()  # with it dies the first process of the namespace, and so all of them
            process.wait()
        text = os.pread(output.fileno(), OUTPUT_BYTES, 0).decode(errors="replace")
    if process.returncode == REFUSED:
        raise OSError(text.strip().rpartition("\n")[2] or "no namespaces")
    return Ran(text, end)


def check() -> str:
    """Says why code cannot be isolated on this machine; nothing if it can."""
    if sys.platform != "linux":
        return f"it needs Linux's namespaces, this is {sys.platform}"
    try:
        ran = run("print('isolated')")
    except OSError as error:
        return str(error)
    return "" if ran.output == "isolated\n" else (ran.end or ran.output.strip() or "no output")


def _end(status: int, seconds: float) -> str:
    status = 128 - status if status < 0 else status  # the outermost process was killed
    if status in (128 + signal.SIGXCPU, 128 + signal.SIGKILL):
        return f"it took longer than {seconds:g} s"
    if status > 128:
        return _KILLED.format(status - 128)
    return f"it ended with exit status {status}" if status else ""


# What follows runs in the process that becomes isolated.


def _call(name: str, *arguments: object) -> None:
    """Calls a function of the C library.

    Raises:
      OSError: it failed.
    """
    library = ctypes.CDLL(None, use_errno=True)
    given = [x.encode() if isinstance(x, str) else x for x in arguments]
    if getattr(library, name)(*given) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    _call("mount", source, target, kind, ctypes.c_ulong(flags), data)


def _enter(folders: Sequence[str]) -> None:
    """Moves this process into namespaces of its own, with these folders to read.

    Root needs no namespace of users to do so, and becomes nobody afterwards.
    """
    user, group = os.getuid(), os.getgid()
    own = NEW_MOUNTS | NEW_NAMES | NEW_IPC | NEW_PROCESSES | NEW_NETWORK
    _call("unshare", own | (NEW_USER if user else 0))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{NOBODY} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{NOBODY} {group} 1")
    _mount("none", "/", None, RECURSIVE | PRIVATE)
    _build_root("/tmp", folders)
    os.chdir("/tmp")
    _call("syscall", _PIVOT_ROOT[os.uname().machine], b".", b".")
    _call("umount2", ".", DETACH)
    os.chdir("/tmp")
    if not user:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        with suppress(OSError):  # in which its processes are counted apart from others
            _call("unshare", NEW_USER)


def _build_root(root: str, folders: Sequence[str]) -> None:
    """Mounts a file system of these folders, read-only, and an empty scratch folder `/tmp`."""
    opened = {folder: os.open(folder, os.O_PATH) for folder in folders}  # which it may hide
    targets = {folder: os.readlink(folder) for folder in folders if os.path.islink(folder)}
    _mount("none", root, "tmpfs", NO_SETUID | NO_DEVICES, "size=1m,mode=755")
    for folder, number in opened.items():
        if folder in targets:
            os.symlink(targets[folder], f"{root}{folder}")
            continue
        os.makedirs(f"{root}{folder}", exist_ok=True)
        _mount(f"/proc/self/fd/{number}", f"{root}{folder}", None, BIND)
        fixed = READ_ONLY | NO_SETUID | NO_DEVICES
        _mount("none", f"{root}{folder}", None, REMOUNT | BIND | fixed)
    os.makedirs(f"{root}/tmp", exist_ok=True)
    size = f"size={SCRATCH_BYTES},mode=777"
    _mount("none", f"{root}/tmp", "tmpfs", NO_SETUID | NO_DEVICES, size)
    for number in opened.values():
        os.close(number)


_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}


def _limit(seconds: float, memory: int) -> None:
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NPROC: PROCESSES,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        resource.setrlimit(kind, (most, most))
    whole = max(1, round(seconds))
    resource.setrlimit(resource.RLIMIT_CPU, (whole, whole + 1))  # SIGXCPU, then SIGKILL


def _folders(packages: str) -> list[str]:
    """Folders that the interpreter and the packages need, none inside another."""
    system = [folder for folder in SYSTEM if Path(folder).exists()]
    # Without `site`, which this script leaves out, `sys.prefix` is no virtual environment's.
    needed = sys.prefix, sys.base_prefix, packages
    chosen = list(system)
    # An outer folder comes before those in it.
    for prefix in sorted({os.path.realpath(prefix) for prefix in needed}):
        if not any(Path(prefix).is_relative_to(folder) for folder in chosen):
            chosen.append(prefix)
    return chosen


def main() -> None:
    """Isolates this process, then runs the Python code of its input in another."""
    seconds, memory = float(sys.argv[1]), int(sys.argv[2])
    python = os.path.realpath(sys.executable)
    try:
        _enter(_folders(sys.argv[3]))
    except (OSError, KeyError) as error:
        print(f"this machine does not allow it: {error}", flush=True)
        os._exit(REFUSED)
    first = os.fork()
    if first:
        status = _status(first)
        os._exit(1 if status == REFUSED else status)
    # The first process of the new namespace, with which all others in it end.
    _call("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    _call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    code = os.fork()
    if code:
        os._exit(_status(code))
    _limit(seconds, memory)
    os.execv(python, [python, "-P", "-s", "-"])


def _status(process: int) -> int:
    """Waits for a process; its exit status as a shell gives it, 128 + n for signal n."""
    while True:
        ended, status = os.wait()
        if ended == process:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()
