"""The attempt's voice: telemetry to ``samples.jsonl`` first, then everything to the supervisor's pipe. Torch-free."""

import json
import os
import time
from pathlib import Path
from typing import IO, Any

from worker.pipe import PipeWriter, encode_line


class Reporter:
    """Writes into one attempt's folder. Not thread-safe; the training loop is its only caller."""

    def __init__(self, folder: Path, *, attempt: int, pipe: PipeWriter | None) -> None:
        self._folder = folder
        self._attempt = attempt
        self._pipe = pipe
        self._samples: IO[bytes] = (folder / "samples.jsonl").open("ab")
        self.step = 0
        """The latest step a record told of."""

    def started(self, *, resumed_from_step: int) -> None:
        self._send({"type": "started", "resumed_from_step": resumed_from_step})

    def phase(self, phase: str, message: str = "") -> None:
        print(f"{phase}: {message}" if message else phase)
        self._send({"type": "phase", "phase": phase, "message": message})

    def log(self, message: str, *, level: str = "info") -> None:
        print(message)
        self._send({"type": "log", "level": level, "message": message})

    def sample(self, record: dict[str, Any]) -> None:
        """One telemetry record; the common fields are filled in where the caller left them out."""
        record = {"attempt": self._attempt, "time_s": round(time.time(), 3), **record}
        self.step = max(self.step, int(record.get("step", 0)))
        self._samples.write(encode_line(record))
        self._samples.flush()
        self._send({"type": "sample", **record}, droppable=True)

    def checkpoint(self, *, step: int, folder: str, manifest_sha256: str, num_bytes: int) -> None:
        self._send(
            {
                "type": "checkpoint",
                "step": step,
                "folder": folder,
                "manifest_sha256": manifest_sha256,
                "num_bytes": num_bytes,
            }
        )

    def result(self, result: dict[str, Any]) -> None:
        """``result.json``, whole or not at all; then the pipe gets a moment to be read."""
        staged = self._folder / ".result.json"
        with staged.open("wb") as file:
            file.write(encode_line(result))
            file.flush()
            os.fsync(file.fileno())
        staged.replace(self._folder / "result.json")
        self._send({"type": "result", **result})
        if self._pipe is not None:
            self._pipe.drain(timeout_s=5)

    def close(self) -> None:
        self._samples.close()

    def _send(self, message: dict[str, Any], *, droppable: bool = False) -> None:
        if self._pipe is not None:
            self._pipe.send(message, droppable=droppable)


def read_json(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_bytes())
    return document
