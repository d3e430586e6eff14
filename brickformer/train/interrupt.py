"""Ctrl-C as a wish, not as an explosion: the step in progress is finished, then the run is saved.

The first SIGINT, SIGTERM or SIGHUP (the terminal is gone) is noted; the second SIGINT raises KeyboardInterrupt at once,
without saving.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, final

_ASKING: Final = [s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGHUP")]  # no SIGHUP on Windows


@final
class Interrupt:
    """Whether somebody asked the run to stop."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Inside, the signals that ask to stop set `.asked`; afterwards they do what they did before.

    A signal that is ignored stays so (`nohup`, a job in the background of a script). In other threads: nothing.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    heeded = [number for number in _ASKING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
