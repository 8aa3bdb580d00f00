"""The machine that runs this: its processor, by which XLA chooses kernels, and signals of its end.

Schedulers send SIGTERM before they take a machine away; a run then saves and ends (`Preemption`).

JAX's coordination client aborts a process whose peers are gone as soon as it learns of it. That may
be before the transport's own error reaches Python, and no `except` runs then; nor does the client
take a callback of Python (jaxlib 0.12: the callback's argument has no Python type). But
faulthandler's signal handler does run. So `print_if_aborted` lets it write into a pipe, which is
read by a process that outlives this one.
"""

import faulthandler
import hashlib
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_TOGETHER = 10.0  # seconds


def processor() -> list[str]:
    """The processor's name and instructions, as Linux lists them; nothing elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})


def kind() -> str:
    """Twelve hexadecimal digits that name the kind of processor."""
    known = repr((platform.machine(), platform.processor(), processor()))
    return hashlib.sha256(known.encode()).hexdigest()[:12]


class Preemption:
    """A context in which SIGTERM sets `asked`; one that comes much later has its usual effect.

    Within `_TOGETHER` they are one: a scheduler may signal every process, and a study its runs too.
    Outside of a program's main thread, where no signal can be caught, `asked` stays False.
    """

    def __init__(self):
        self.asked = False
        self._asked_at = 0.0
        self._before = None

    def __enter__(self) -> "Preemption":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *_) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked, self._asked_at = True, time.monotonic()
        elif time.monotonic() - self._asked_at > _TOGETHER:
            self._restore()
            signal.raise_signal(signal.SIGTERM)

    def _restore(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            signal.signal(signal.SIGTERM, before)


# Copies the pipe to standard error up to its end, which comes with the end of the process.
_LISTENER = """
import sys
aborted = False
for text in sys.stdin:
    sys.stderr.write(text)
    aborted |= text.startswith("Fatal Python error: Aborted")
if aborted:
    sys.stderr.write(sys.argv[1] + "\\n")
"""


@contextmanager
def print_if_aborted(line: str) -> Iterator[None]:
    """A context in which an abort of this process prints `line` to standard error.

    It comes after the stack that Python prints.
    """
    listener = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _LISTENER, line],
        stdin=subprocess.PIPE,
        start_new_session=True,  # otherwise an interrupt from the keyboard would end it first
    )
    assert listener.stdin is not None
    faulthandler.enable(listener.stdin)
    try:
        yield
    finally:
        faulthandler.disable()
        listener.stdin.close()
        listener.kill()  # a forked child may still have the pipe open, so that it would not end
        listener.wait()
