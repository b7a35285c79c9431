"""Writes a job's telemetry of all attempts as one TensorBoard event file among the artifacts. Torch-free."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optimizer.runtime.job.export.place import artifacts_place
from worker.mirrors.scalars import read_record, scalars_of
from worker.run.tensorboard.event_file import FILE_NAME_START, write_event_file

FOLDER = "tensorboard"


def leave_event_file(attempt_folder: Path, *, attempt_number: int, fence: int) -> list[dict[str, Any]]:
    """The artifact's row for ``result.json``; none where nothing was measured.

    A step that two attempts measured is taken from the later one, as on the charts. Each attempt leaves a file of its own, and
    its end takes those of earlier ones away: until then their rows hold.
    """
    job_folder = attempt_folder.parent.parent
    records = _records(job_folder, last_attempt=attempt_number)
    if not records:
        return []
    name = f"{FILE_NAME_START}{int(records[0]['time_s'])}.headroom.{attempt_number}"
    place = f"{artifacts_place(fence)}/{FOLDER}/{name}"
    file = job_folder / place
    file.parent.mkdir(parents=True, exist_ok=True)
    write_event_file(file, map(scalars_of, records))
    return [
        {
            "kind": FOLDER,
            "name": f"{FOLDER}/{name}",
            "file": place,
            "num_bytes": file.stat().st_size,
            "sha256": _sha256(file),
        }
    ]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _records(job_folder: Path, *, last_attempt: int) -> list[dict[str, Any]]:
    by_step: dict[tuple[str, int], dict[str, Any]] = {}
    for number in range(1, last_attempt + 1):
        for record in _lines(job_folder / "attempts" / str(number) / "samples.jsonl"):
            by_step[record["kind"], record["step"]] = record
    return sorted(by_step.values(), key=lambda record: (record["step"], record["kind"] != "step"))


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Whole records; a line that was cut short by a kill is left out."""
    if not file.exists():
        return
    with file.open("rb") as stream:
        for line in stream:
            if (record := read_record(line)) is not None:
                yield record
