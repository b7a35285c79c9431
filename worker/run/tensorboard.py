"""Writes a job's telemetry of all attempts as one TensorBoard event file among the artifacts. Torch-free."""

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from worker.run.event_file import FILE_NAME_START, Scalars, write_event_file

FOLDER = "tensorboard"
_TAGS = {
    "loss": "loss/training",
    "validation_loss": "loss/validation",
    "learning_rate": "optimizer/learning_rate",
    "grad_norm": "optimizer/grad_norm",
    "reward_accuracy": "rewards/accuracy",
    "reward_margin": "rewards/margin",
    "step_ms": "speed/step_ms",
    "tokens_per_s": "speed/tokens_per_s",
    "prompts_done": "progress/prompts_done",
    "device_peak_bytes": "memory/device_peak_bytes",
    "host_bytes": "memory/host_bytes",
}


def leave_event_file(attempt_folder: Path, *, attempt_number: int) -> list[dict[str, Any]]:
    """The artifact's row for ``result.json``; none where nothing was measured.

    Of a step that two attempts measured the later one holds, as on the charts.
    """
    job_folder = attempt_folder.parent.parent
    records = _records(job_folder, last_attempt=attempt_number)
    if not records:
        return []
    name = f"{FILE_NAME_START}{int(records[0]['time_s'])}.headroom"
    folder = job_folder / "artifacts" / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob(f"{FILE_NAME_START}*"):
        earlier.unlink()
    write_event_file(folder / name, map(_scalars, records))
    return [
        {
            "kind": FOLDER,
            "name": f"{FOLDER}/{name}",
            "file": f"artifacts/{FOLDER}/{name}",
            "num_bytes": (folder / name).stat().st_size,
            "sha256": _sha256(folder / name),
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
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and record.get("kind") in ("step", "eval", "generate"):
                yield record


def _scalars(record: dict[str, Any]) -> Scalars:
    found = {tag: record.get(key) for key, tag in _TAGS.items()}
    for category, num_bytes in (record.get("device_bytes") or {}).items():
        found[f"memory/{category}_bytes"] = num_bytes
    values = {
        tag: float(value) for tag, value in found.items() if isinstance(value, int | float) and math.isfinite(value)
    }
    return float(record["time_s"]), int(record["step"]), values
