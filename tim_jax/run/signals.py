"""SIGTERM, as schedulers send it before they take a machine away: a run saves and ends.

A line for the user when C++ ends the process, where no `except` of Python runs.

JAX's coordination client aborts a process whose peers are gone as soon as it hears of it, which may
be before the transport's own error reaches Python, and takes no callback that Python can give
(jaxlib 0.12: the callback's argument has no Python type). What does run then is faulthandler's
signal handler; it writes into a pipe, and who reads the pipe outlives the process.

"""

import faulthandler
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Preemption:
    """A context in which SIGTERM sets `asked`; a second one ends the process as it always did.

    Outside of a program's main thread, where no signal can be caught, `asked` stays False.
    """

    def __init__(self):
        self.asked = False
        self._before = None

    def __enter__(self) -> "Preemption":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *_) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._restore()

    def _restore(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            signal.signal(signal.SIGTERM, before)


# Reads to the end of the pipe, which is the process's end, and shows what comes.
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
def if_aborted(line: str) -> Iterator[None]:
    """Has `line` written to standard error, after Python's stack, if this process aborts within."""
    listener = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _LISTENER, line],
        stdin=subprocess.PIPE,
        start_new_session=True,  # or an interrupt from the keyboard would end it first
    )
    assert listener.stdin is not None
    faulthandler.enable(listener.stdin)
    try:
        yield
    finally:
        faulthandler.disable()
        listener.stdin.close()
        listener.kill()  # not by the pipe's end alone: a child that was forked would keep it open
        listener.wait()
