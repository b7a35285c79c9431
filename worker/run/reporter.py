"""The attempt's voice: telemetry to ``samples.jsonl``, everything else to the supervisor's pipe. Torch-free."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker.run.log_lines import LogLines
from worker.run.pipe import PipeWriter, encode_line


class Reporter:
    """Call it with the messages of docs/attempt.md. Not thread-safe; the training loop is its only caller."""

    def __init__(
        self,
        folder: Path,
        *,
        pipe: PipeWriter | None,
        result_folder: Path | None = None,
        is_silent: bool = False,
        check_lease: Callable[[], object] | None = None,
    ) -> None:
        """result_folder: for ``result.json``, where it is not the attempt's. is_silent: only the result is kept.
        check_lease: called before each writing; it ends the process if another may have the job by now.
        """
        self.folder = folder
        """The attempt's own."""
        self.is_silent = is_silent
        self._result_folder = result_folder or folder
        self._pipe = pipe
        self._check_lease = check_lease
        self._samples = (folder / "samples.jsonl").open("ab")
        self._log = LogLines()
        self.step = 0
        """The latest step that was reported."""

    def __call__(self, message: dict[str, Any]) -> None:
        self.require_lease()
        if self.is_silent:
            return
        self._log.write(message)
        if message["type"] == "sample":
            self._keep({key: value for key, value in message.items() if key != "type"})
            message = {"type": "sample"}  # the supervisor reads the file; this is what wakes it
        self._send(message)

    def phase(self, phase: str, message: str = "") -> None:
        self({"type": "phase", "phase": phase, "message": message})

    def result(self, result: dict[str, Any]) -> None:
        """``result.json``, whole or not at all; then the pipe gets a moment to be read."""
        self.require_lease()
        leave_result(result, self._result_folder)
        self._send({"type": "result", **result})
        if self._pipe is not None:
            self._pipe.drain(timeout_s=5)

    def require_lease(self) -> None:
        """End the process if another may have the job by now; for what is written beside the reports."""
        if self._check_lease is not None:
            self._check_lease()

    def close(self) -> None:
        self._samples.close()

    def _keep(self, record: dict[str, Any]) -> None:
        self.step = max(self.step, int(record["step"]))
        self._samples.write(encode_line(record))
        self._samples.flush()

    def _send(self, message: dict[str, Any]) -> None:
        if self._pipe is not None:
            self._pipe.send(message, droppable=message["type"] == "sample")


def leave_result(result: dict[str, Any], folder: Path) -> None:
    """``result.json``, whole or not at all."""
    leave_json(result, folder / "result.json")


def leave_json(document: dict[str, Any], path: Path) -> None:
    """A file that is there whole or not at all. Makes its folder."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}")
    with staged.open("wb") as file:
        file.write(encode_line(document))
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_bytes())
    return document
