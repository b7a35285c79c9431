"""Copies an attempt's telemetry from its file to the database, then mirrors it to the wire.

The file is the source: the attempt's process writes a line there before it says anything on the pipe, so nothing is lost when
the pipe is full, the database is away, or the worker is killed. The row is written before the wire is sent it, so that a page
which reads rows first and follows the wire from then on misses nothing.
"""

import itertools
import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.4
"""At up to two samples a second each goes on at once; faster ones share a transaction and a round trip, whose cost would else be
more than all else that telemetry takes from a run on the same cores."""
PROGRESS_INTERVAL_S = 2.0
"""The job's row is what lists show; who watches a run hears every sample."""
BATCH_RECORDS = 100
_TAIL_BYTES = 1 << 18
"""Read of a file of samples to find its last step."""
KINDS = ("step", "eval", "timeline", "generate")

Records = list[dict[str, Any]]


class SampleCopier:
    """Reads ``samples.jsonl`` from where it stopped; what a write refused is read again the next time."""

    def __init__(
        self,
        path: Path,
        *,
        attempt_number: int,
        record: Callable[[Records], object],
        mirror: Callable[[Records], object] = lambda records: None,
        read_gpu: Callable[[], dict[str, Any]] = dict,
        num_known: int = 0,
    ) -> None:
        """num_known: how many of the file's first records are in the database already; they are not read again."""
        self._path = path
        self._attempt_number = attempt_number
        self._record = record
        self._mirror = mirror
        self._read_gpu = read_gpu
        self._offset_bytes = _skip_lines(path, num_known)
        self._copied_at = float("-inf")

    def copy_if_due(self) -> Records:
        """At most once in FLUSH_INTERVAL_S; the records that were copied. A look that finds nothing new does not count: a sample
        that comes right after it would wait for the next turn.
        """
        if time.monotonic() - self._copied_at < FLUSH_INTERVAL_S:
            return []
        if copied := self.copy():
            self._copied_at = time.monotonic()
        return copied

    def copy(self) -> Records:
        """All whole lines that are there now, in batches. Raises the database's error; what was written stays copied."""
        copied: Records = []
        while batch := self._read_batch():
            records, end_bytes = batch
            if records:
                self._add_gpu(records[-1])
                self._record(records)
            self._offset_bytes = end_bytes
            if records:
                self._mirror(records)
            copied += records
        return copied

    def _read_batch(self) -> tuple[Records, int] | None:
        """Up to BATCH_RECORDS records and where they end; None at the end of the file. A torn last line waits for its end."""
        records: Records = []
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return None
        with file:
            file.seek(self._offset_bytes)
            end_bytes = self._offset_bytes
            while len(records) < BATCH_RECORDS and (line := file.readline()).endswith(b"\n"):
                end_bytes += len(line)
                if (record := self._parse(line)) is not None:
                    records.append(record)
        return (records, end_bytes) if end_bytes > self._offset_bytes else None

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        is_known = isinstance(record, dict) and record.get("kind") in KINDS and isinstance(record.get("step"), int)
        if not is_known:
            logger.warning("a line of %s is not a telemetry record; left out", self._path)
            return None
        return {**record, "attempt": self._attempt_number}

    def _add_gpu(self, record: dict[str, Any]) -> None:
        if record["kind"] in ("step", "generate") and (facts := self._read_gpu()):
            record["gpu"] = facts


def read_last_step(path: Path) -> dict[str, Any]:
    """The last step's record near the end of a file of samples; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # torn at either end
        if isinstance(record, dict) and record.get("kind") == "step":
            return record
    return {}


def _skip_lines(path: Path, num_lines: int) -> int:
    """Offset of the line after the first ``num_lines``; the end of the file when it has fewer."""
    if not num_lines:
        return 0
    try:
        with path.open("rb") as file:
            return sum(len(line) for line in itertools.islice(file, num_lines))
    except FileNotFoundError:
        return 0


class Progress:
    """The values that the job's row shows between two snapshots: the step, the time left, the latest numbers."""

    _WINDOW_STEPS = 20

    def __init__(self, *, num_steps: int) -> None:
        self._num_steps = num_steps
        self._times: list[tuple[int, float]] = []
        self._shown_at = float("-inf")
        self._is_news = False
        self.step = 0
        self.num_tokens = 0
        """Generated, of a generate job."""
        self.summary: dict[str, Any] = {}

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        for record in records:
            if record["kind"] == "step":
                self._add_step(record)
            elif record["kind"] == "eval":
                self._add_eval(record)
            elif record["kind"] == "generate":
                self._add_generated(record)

    def take_if_due(self) -> bool:
        """True at most once in PROGRESS_INTERVAL_S, when something is new; the caller then writes it."""
        if not self._is_news or time.monotonic() - self._shown_at < PROGRESS_INTERVAL_S:
            return False
        self._shown_at, self._is_news = time.monotonic(), False
        return True

    @property
    def eta_s(self) -> float | None:
        """Steps left, each at the median time between the latest ones; unknown before the third step."""
        if len(self._times) < 3:
            return None
        pauses = [
            (later - earlier) / max(1, step - before)
            for (before, earlier), (step, later) in zip(self._times, self._times[1:], strict=False)
        ]
        return max(0.0, statistics.median(pauses)) * max(0, self._num_steps - self.step)

    def _add_step(self, record: dict[str, Any]) -> None:
        self._add(record, step=record["step"], shown=("loss", "tokens_per_s", "step_ms"))

    def _add_generated(self, record: dict[str, Any]) -> None:
        """The job's step is the number of its prompts that are done; the record's counts tokens."""
        self.num_tokens = max(self.num_tokens, record["step"])
        shown = ("tokens_per_s", "num_errors", "prefill_ms", "decode_ms")
        self._add(record, step=int(record.get("prompts_done") or 0), shown=shown)

    def _add(self, record: dict[str, Any], *, step: int, shown: tuple[str, ...]) -> None:
        self._is_news = True
        is_later = step > self.step or not self._times
        self.step = max(self.step, step)
        if is_later and isinstance(record.get("time_s"), int | float):
            self._times = [*self._times, (step, float(record["time_s"]))][-self._WINDOW_STEPS :]
        for name in shown:
            if record.get(name) is not None:
                self.summary[name] = record[name]
        ranks = [int(size) for size in record.get("rank_peak_bytes") or ()]
        if ranks:
            known = self.summary.get("rank_peak_bytes", ranks)
            self.summary["rank_peak_bytes"] = [max(pair) for pair in zip(ranks, known, strict=True)]
        self.summary["device_peak_bytes"] = max(
            self.summary.get("device_peak_bytes", 0), record.get("device_peak_bytes") or 0, *ranks
        )

    def _add_eval(self, record: dict[str, Any]) -> None:
        self._is_news = True
        self.summary["validation_loss"] = record.get("validation_loss")
        if record["step"] == 0:
            self.summary["validation_loss_start"] = record.get("validation_loss")
