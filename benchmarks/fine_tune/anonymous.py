"""Samples the anonymous memory of a process: what it has written to and no file backs. Pages of mapped files are left out."""

import threading
import time
from pathlib import Path

EVERY_S = 0.02


class AnonymousMemory:
    """Use as a context manager around the process's life."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.samples: list[tuple[float, int]] = []
        """Time and bytes."""

    def __enter__(self) -> "AnonymousMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def peak_bytes(self, begin_s: float, end_s: float) -> int:
        return max((num_bytes for at_s, num_bytes in self.samples if begin_s <= at_s <= end_s), default=0)

    def _sample(self) -> None:
        while not self._ended.wait(EVERY_S):
            try:
                text = self._status.read_text()
            except OSError:
                return
            line = next((line for line in text.splitlines() if line.startswith("RssAnon:")), "")
            if line:
                self.samples.append((time.time(), int(line.split()[1]) * 1024))
