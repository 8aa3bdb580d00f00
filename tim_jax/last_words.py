"""A line for the user when C++ ends the process, where no `except` of Python runs.

JAX's coordination client aborts a process whose peers are gone as soon as it hears of it, which may
be before the transport's own error reaches Python, and takes no callback that Python can give
(jaxlib 0.12: the callback's argument has no Python type). What does run then is faulthandler's
signal handler; it writes into a pipe, and who reads the pipe outlives the process.
"""

import faulthandler
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
