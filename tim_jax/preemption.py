"""SIGTERM, as schedulers send it before they take a machine away: a run saves and ends."""

import signal
import threading
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
