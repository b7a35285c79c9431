"""The estimator against what others measured and published: memory and time of runs that nobody here made.

    python -m benchmarks.published [--quick] [--only PART] [--profiles FOLDER] [--json FILE]

Nothing is fitted and nothing calibrated: each row of ``rows.csv`` (training) and ``generations.csv`` is
built as its source describes it and estimated on the device from the table; the error is printed with the facts that the
source leaves open. ``rows.py`` and ``generations.py`` have the rules by which rows are taken. The
published programs are not ours: other kernels, loss functions and loops are part of the error. Where a program's source
says what it holds of the logits beyond ours, figures with ``same logits`` are errors with that added.

The part pools has whole systems on eight consumer cards, what fits in them and how long a sequence may be (``pools.py``).

--quick takes every fifteenth row. Traced models are kept between runs; tracing them all takes minutes.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.record import GoalEntry, Record, Row, goal, none_of
from benchmarks.published.generations import PublishedGeneration, read_generations
from benchmarks.published.models import PublishedModel
from benchmarks.published.pools import compare_pools, summarize_pools
from benchmarks.published.profiles import Profiles
from benchmarks.published.rows import GB, PublishedRow, read_rows
from optimizer.base.errors import HeadroomError
from optimizer.base.units import GIB
from optimizer.estimate.card.training_memory import add_memory
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.training import estimate_training
from optimizer.hardware.devices import table_machine
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.profile import Profile

Figure = tuple[str, float, tuple[float, float, float]]
"""Its name, what was published, and what is estimated with the interval's ends."""
HOST_BYTES = 208 * GIB
"""Memory of FlexGen's host; no other row depends on it."""
QUICK_EVERY = 15
LEAST_ROWS = 40
PARTS = ("runs", "pools")
FIGURES = (
    "allocated_gb",
    "allocated_gb, same logits",
    "reserved_gb, same logits",
    "process_gb, same logits",
    "step_s",
    "generating allocated_gb",
    "tokens_per_s",
)


def compare(row: PublishedRow, profile: Profile) -> Row:
    """Make the row of a training run: published, estimated, and the error, which is estimated over published, less one."""
    plan, workload = row.plan(num_blocks=profile.num_blocks), row.workload()
    machine = table_machine(row.device, num_devices=row.num_compared_devices)
    if row.torch_version:
        profile = replace(profile, torch_version=row.torch_version)
    prediction = estimate_training(profile, plan=plan, workload=workload, machine=machine)
    if row.reserved_gb is not None or row.process_gb is not None:
        prediction = add_memory(prediction, profile, plan=plan, workload=workload, machine=machine)
    compared = _compared(row, _training_figures(row, prediction))
    if not row.layout:
        return compared
    return compared | {"layout": row.layout, "run": f"{row.model}, {row.frozen}, {row.device}", "batch": row.global_batch}


def compare_generation(row: PublishedGeneration, profile: GenerationProfile) -> Row:
    """Make the same row of a generation."""
    prediction = estimate_generation(
        profile,
        plan=row.plan(),
        workload=row.workload(),
        machine=table_machine(row.device, host_memory_bytes=HOST_BYTES),
    )
    return _compared(row, _generation_figures(row, prediction))


def _compared(row: PublishedModel, figures: Iterable[Figure]) -> Row:
    result: Row = {"name": row.name, "system": row.system, "device": row.device}
    for figure, published, (estimated, low, high) in figures:
        result[f"published_{figure}"] = published
        result[f"estimated_{figure}"] = round(estimated, 4)
        result[f"error_{figure}"] = round(estimated / published - 1, 4)
        result[f"in_interval_{figure}"] = low <= published <= high
    return result | {"about": {"source": row.source, "open_facts": row.open_facts}}


def summarize(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    """Errors of each figure over all rows, each device and each system, as shares of the published figures."""
    num_failed = sum("failed" in row for row in rows)
    num_estimated = len(rows) - num_failed
    summary: dict[str, GoalEntry] = {
        "rows": goal(num_estimated, f">= {LEAST_ROWS}", met=num_estimated >= LEAST_ROWS, needs="all cases"),
        "rows that could not be estimated": none_of(num_failed, rows),
    }
    for figure in FIGURES:
        groups: dict[str, list[Row]] = {"all": [row for row in rows if f"error_{figure}" in row]}
        for row in groups["all"]:
            groups.setdefault(row["device"], []).append(row)
            groups.setdefault(row["system"], []).append(row)
        for name, members in groups.items():
            if members:
                summary[f"{figure}, {name}"] = goal(_describe(members, figure), "none: reported", met=True)
    return summary | _judge_layouts(rows)


def _judge_layouts(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    """Memory of runs on several devices, and the order of their layouts by time for each sequence, as published and estimated.

    Of each layout of a run the fastest published row counts; layouts as fast as each other within a hundredth may stand in either
    order.
    """
    known = [row for row in rows if "layout" in row]
    if not known:
        return {}
    errors = [abs(float(row["error_reserved_gb, same logits"])) for row in known]
    median = statistics.median(errors)
    runs: dict[str, dict[str, Row]] = {}
    for row in known:
        best = runs.setdefault(row["run"], {})
        if row["layout"] not in best or _sequence_s(row, "published") < _sequence_s(best[row["layout"]], "published"):
            best[row["layout"]] = row
    compared = {run: list(best.values()) for run, best in runs.items() if len(best) > 1}
    right = [run for run, found in compared.items() if _agrees(found)]
    return {
        "several devices: median error of memory": goal(round(median, 4), "<= 0.06", met=median <= 0.06, needs="all cases"),
        "several devices: orders of layouts that are right": goal(
            {"right": right, "of": list(compared)}, "all", met=len(right) == len(compared), needs="all cases"
        ),
    }


def _sequence_s(row: Row, which: str) -> float:
    return float(row[f"{which}_step_s"]) / int(row["batch"])


def _agrees(rows: Sequence[Row]) -> bool:
    """Report whether no two rows that published clearly different times are estimated the other way round."""
    for first, second in itertools.combinations(rows, 2):
        published = _sequence_s(first, "published") / _sequence_s(second, "published")
        estimated = _sequence_s(first, "estimated") / _sequence_s(second, "estimated")
        if abs(published - 1) > 0.01 and (published < 1) != (estimated < 1):
            return False
    return True


def list_open_facts(rows: Iterable[PublishedModel]) -> dict[str, str]:
    """The facts that each system's rows leave open or have otherwise."""
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


def _training_figures(row: PublishedRow, prediction: Prediction) -> Iterator[Figure]:
    if row.allocated_gb is not None:
        sizes = (prediction.device_peak_bytes, prediction.device_peak_low_bytes, prediction.device_peak_high_bytes)
        estimated, low, high = (size / GB for size in sizes)
        yield "allocated_gb", row.allocated_gb, (estimated, low, high)
        extra = row.extra_gb
        yield "allocated_gb, same logits", row.allocated_gb, (estimated + extra, low + extra, high + extra)
    memory = prediction.memory
    if memory is not None:
        for name, published, found in (
            ("reserved_gb, same logits", row.reserved_gb, memory.reserved),
            ("process_gb, same logits", row.process_gb, memory.process),
        ):
            if published is not None:
                low, high = found.low / GB + row.extra_gb, found.high / GB + row.extra_gb
                yield name, published, (found.value / GB + row.extra_gb, low, high)
    if row.step_s is not None and row.compares_time:
        times = (prediction.step_ms, prediction.step_low_ms, prediction.step_high_ms)
        yield "step_s", row.step_s, (times[0] / 1000, times[1] / 1000, times[2] / 1000)


def _generation_figures(row: PublishedGeneration, prediction: GenerationPrediction) -> Iterator[Figure]:
    if row.allocated_gb is not None:
        sizes = (prediction.device_peak_bytes, prediction.device_peak_low_bytes, prediction.device_peak_high_bytes)
        yield "generating allocated_gb", row.allocated_gb, (sizes[0] / GB, sizes[1] / GB, sizes[2] / GB)
    if row.tokens_per_s is not None:
        num_later = row.num_new_tokens - 1
        num_tokens = row.batch_size * row.num_new_tokens
        slow_ms = prediction.prefill_high_ms + num_later * prediction.decode_high_ms
        fast_ms = prediction.prefill_low_ms + num_later * prediction.decode_low_ms
        interval = (num_tokens / slow_ms * 1000, num_tokens / fast_ms * 1000)
        yield "tokens_per_s", row.tokens_per_s, (prediction.tokens_per_s, *interval)


def run(
    rows: Iterable[PublishedRow],
    generations: Iterable[PublishedGeneration],
    *,
    profiles: Profiles,
    record: Record,
) -> None:
    for row in rows:
        _add(record, row, partial(_training, row, profiles))
    for generation in generations:
        _add(record, generation, partial(_generation, generation, profiles))


def _training(row: PublishedRow, profiles: Profiles) -> Row:
    return compare(row, profiles.training(row))


def _generation(row: PublishedGeneration, profiles: Profiles) -> Row:
    return compare_generation(row, profiles.generation(row))


def _add(record: Record, row: PublishedModel, compared: Callable[[], Row]) -> None:
    """Add a row; one that cannot be estimated is added with its error, and counted."""
    try:
        record.add(compared())
    except HeadroomError as error:
        record.add({"name": row.name, "system": row.system, "device": row.device, "failed": error.message})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="every fifteenth row")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--profiles", type=Path, help="folder that keeps traced models, instead of the user's own")
    parser.add_argument("--json", type=Path, help="file for rows and summary")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    every = QUICK_EVERY if options.quick else 1
    machine = {"estimated_only": True, "torch": torch.__version__}
    record = Record(file=options.json, machine=machine, is_quick=options.quick)
    goals: dict[str, GoalEntry] = {}
    if options.only in (None, "runs"):
        rows, generations = read_rows()[::every], read_generations()[::every]
        run(rows, generations, profiles=Profiles(rows, folder=options.profiles), record=record)
        for system, facts in list_open_facts([*rows, *generations]).items():
            print(f"left open by {system}: {facts}")
        goals |= summarize(record.rows)
    if options.only in (None, "pools"):
        record.add_all("pools", compare_pools(folder=options.profiles, every=every))
        goals |= summarize_pools(record.rows)
    return record.finish(goals)
