"""A mirror's process hears of the run's end: a word on its standard input, which the supervisor then closes.

A line that is closed without a word means that the supervisor is gone. From that moment the process has GRACE_S left, whatever
its library waits for.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable

GRACE_S = 60.0
ENDINGS = ("succeeded", "failed", "cancelled")


class Ending:
    """``word`` is one of ENDINGS, or empty: the run goes on later."""

    def __init__(self, *, on_overdue: Callable[[], None]) -> None:
        self.word = ""
        self._is_over = threading.Event()
        self._on_overdue = on_overdue
        threading.Thread(target=self._listen, name="ending", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Report whether the run is over, at most so much later."""
        return self._is_over.wait(timeout_s)

    def _listen(self) -> None:
        heard = sys.stdin.readline().strip()
        self.word = heard if heard in ENDINGS else ""
        self._is_over.set()
        threading.Event().wait(GRACE_S)
        self._on_overdue()
        os.killpg(os.getpgrp(), signal.SIGKILL)
