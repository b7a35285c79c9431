"""The estimator against what others measured and published: allocated memory and step time of runs nobody here made.

    python -m benchmarks.published [--quick] [--profiles FOLDER] [--json FILE]

Nothing is fitted and nothing calibrated: each row of ``published_rows.csv`` is built as its source describes it and
estimated on the device from the table; the error is printed with the facts that the source leaves open.
``published_rows.py`` has the rule by which rows are taken. The published programs are not ours: other kernels, loss
functions and loops are part of the error. Where a program's source says what it holds of the logits beyond ours,
``allocated_gb, same logits`` is the error with that added.

--quick takes every sixth row. --profiles keeps traced models between runs; tracing them takes minutes.
"""

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.published_rows import GB, PublishedRow, read_rows
from benchmarks.record import Record, Row, goal
from optimizer.errors import HeadroomError
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.training import estimate_training
from optimizer.hardware.devices import find_device, table_machine
from optimizer.profile.profile import Profile
from optimizer.profile.trace import profile_model

QUICK_EVERY = 6
LEAST_ROWS = 40
FIGURES = ("allocated_gb", "allocated_gb, same logits", "step_s")


class Profiles:
    """Traced once for each shape; kept in a folder where one is given."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._held: tuple[str, Profile] | None = None

    def of(self, row: PublishedRow) -> Profile:
        """Rows of one shape stand together in the file, so only the last is held."""
        key = hashlib.sha256(repr((row.shape_key, row.representation, torch.__version__)).encode()).hexdigest()[:16]
        if self._held is None or self._held[0] != key:
            self._held = (key, self._read(key) or self._trace(key, row))
        return self._held[1]

    def _read(self, key: str) -> Profile | None:
        file = self._folder / f"{key}.json" if self._folder else None
        if file is None or not file.exists():
            return None
        try:
            return Profile.from_json(json.loads(file.read_text()))
        except (ValueError, HeadroomError):
            return None

    def _trace(self, key: str, row: PublishedRow) -> Profile:
        print(f"tracing {row.model} ...", file=sys.stderr, flush=True)
        profile = profile_model(row.spec(), adapter=row.workload().adapter)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"{key}.json").write_text(json.dumps(profile.to_json()))
        return profile


def compare(row: PublishedRow, profile: Profile) -> Row:
    """What was published, what is estimated, and the errors: estimated over published, less one."""
    prediction = estimate_training(
        profile,
        plan=row.plan(num_blocks=profile.num_blocks),
        workload=row.workload(),
        machine=table_machine(row.device),
    )
    result: Row = {"name": row.name, "system": row.system, "device": row.device, "generation": _generation(row.device)}
    for figure, published, (estimated, low, high) in _figures(row, prediction):
        result[f"published_{figure}"] = published
        result[f"estimated_{figure}"] = round(estimated, 4)
        result[f"error_{figure}"] = round(estimated / published - 1, 4)
        result[f"in_interval_{figure}"] = low <= published <= high
    return result | {"about": {"source": row.source, "open_facts": row.open_facts}}


def summarize(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """By figure: of all rows, of each device and of each system. Errors are shares of what was published."""
    num_failed = sum("failed" in row for row in rows)
    num_estimated = len(rows) - num_failed
    summary: dict[str, dict[str, Any]] = {
        "rows": goal(num_estimated, f">= {LEAST_ROWS}", met=num_estimated >= LEAST_ROWS),
        "rows that could not be estimated": goal(num_failed, 0, met=num_failed == 0),
    }
    for figure in FIGURES:
        groups: dict[str, list[Row]] = {"all": [row for row in rows if f"error_{figure}" in row]}
        for row in groups["all"]:
            groups.setdefault(row["device"], []).append(row)
            groups.setdefault(row["system"], []).append(row)
        for name, members in groups.items():
            if members:
                summary[f"{figure}, {name}"] = {
                    "value": _describe(members, figure),
                    "goal": "none: reported",
                    "met": True,
                }
    return summary


def list_open_facts(rows: Iterable[PublishedRow]) -> dict[str, str]:
    """By system, what its rows leave open or do otherwise."""
    facts: dict[str, dict[str, None]] = {}
    for row in rows:
        facts.setdefault(row.system, {})[row.open_facts] = None
    return {system: "; or: ".join(found) for system, found in facts.items()}


def _describe(rows: Sequence[Row], figure: str) -> dict[str, Any]:
    errors = [float(row[f"error_{figure}"]) for row in rows]
    worst = max(errors, key=abs)
    return {
        "rows": len(errors),
        "median_error": round(statistics.median(errors), 4),
        "median_absolute_error": round(statistics.median(map(abs, errors)), 4),
        "worst_error": worst,
        "share_under": round(sum(error < 0 for error in errors) / len(errors), 3),
        "share_in_interval": round(sum(bool(row[f"in_interval_{figure}"]) for row in rows) / len(rows), 3),
    }


def _figures(row: PublishedRow, prediction: Prediction) -> Iterator[tuple[str, float, tuple[float, float, float]]]:
    """What both have: published, and estimated with its interval."""
    if row.allocated_gb is not None:
        sizes = (prediction.device_peak_bytes, prediction.device_peak_low_bytes, prediction.device_peak_high_bytes)
        estimated, low, high = (size / GB for size in sizes)
        yield "allocated_gb", row.allocated_gb, (estimated, low, high)
        extra = row.extra_gb
        yield "allocated_gb, same logits", row.allocated_gb, (estimated + extra, low + extra, high + extra)
    if row.step_s is not None and row.compares_time:
        times = (prediction.step_ms, prediction.step_low_ms, prediction.step_high_ms)
        yield "step_s", row.step_s, (times[0] / 1000, times[1] / 1000, times[2] / 1000)


def _generation(device: str) -> str:
    return find_device(device).generation


def run(rows: Iterable[PublishedRow], *, profiles: Profiles, record: Record) -> None:
    for row in rows:
        try:
            record.add(compare(row, profiles.of(row)))
        except HeadroomError as error:
            record.add({"name": row.name, "system": row.system, "device": row.device, "failed": error.message})
    record.summary |= summarize(record.rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="every sixth row")
    parser.add_argument("--profiles", type=Path, help="folder that keeps traced models")
    parser.add_argument("--json", type=Path, help="file for rows and summary")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = read_rows()
    record = Record(file=options.json, machine={"estimated_only": True, "torch": torch.__version__})
    run(rows[::QUICK_EVERY] if options.quick else rows, profiles=Profiles(options.profiles), record=record)
    record.close()
    for system, facts in list_open_facts(rows).items():
        print(f"left open by {system}: {facts}")


if __name__ == "__main__":
    main()
