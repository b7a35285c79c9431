"""Random mixes on each machine: bytes, use, and the time that they take against one job at a time. Rows are sums by machine."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common.record import Row
from benchmarks.mixes.database import add_jobs, add_machine, forget_jobs, reserve_bytes, service_database
from benchmarks.mixes.simulation import (
    Mix,
    Outcome,
    draw_mix,
    is_over,
    least_makespan_s,
    simulate,
    tensor_needs,
)
from benchmarks.mixes.subjects import Subject, machines, price_subjects
from optimizer.hardware.machine import Machine

SEED = 20261126
OTHER_WAYS_EVERY = 5
"""One mix of so many is also run packed and as the control."""


@dataclass(kw_only=True)
class Tally:
    """The mixes of one machine."""

    mixes: list[Mix] = field(default_factory=list)
    shared: list[Outcome] = field(default_factory=list)
    """Claimed as workers do: a job joins where more is done by all together."""
    compared: list[int] = field(default_factory=list)
    """Indices of the mixes that were run in the two other ways as well."""
    packed: list[Outcome] = field(default_factory=list)
    """All jobs that have room, whatever they cost each other."""
    control: list[Outcome] = field(default_factory=list)
    """Shared, by the tensors of a steady step alone."""


def measure_admission(*, num_mixes: int, names: Sequence[str], seed: int = SEED) -> Iterator[Row]:
    """A row for each machine, with an equal part of the mixes."""
    with TemporaryDirectory() as profiles, service_database():
        subjects = price_subjects(Path(profiles), names=tuple(names))
        for index, name in enumerate(names):
            own = [subject for subject in subjects if subject.machine == name]
            count = num_mixes // len(names) + (index < num_mixes % len(names))
            yield _sum_up(name, own, _run_mixes(name, own, num_mixes=count, seed=seed))


def _run_mixes(name: str, subjects: Sequence[Subject], *, num_mixes: int, seed: int) -> Tally:
    machine = machines()[name]
    row, tally = add_machine(machine), Tally()
    for index in range(num_mixes):
        mix = draw_mix(subjects, seed=f"{seed} {name} {index}")
        tally.mixes.append(mix)
        tally.shared.append(_run(mix, row, machine))
        if index % OTHER_WAYS_EVERY == 0:
            tally.compared.append(index)
            tally.packed.append(_run(mix, row, machine, must_gain=False))
            tally.control.append(_run(mix, row, machine, need_bytes=tensor_needs(mix)))
    return tally


def _run(
    mix: Mix, row: Any, machine: Machine, *, must_gain: bool = True, need_bytes: Sequence[int] | None = None
) -> Outcome:
    made = add_jobs(row, mix.subjects, owners=mix.owners)
    if need_bytes is not None:
        reserve_bytes(made, need_bytes)
    found = simulate(mix, made, row=row, machine=machine, must_gain=must_gain)
    forget_jobs(made)
    return found


def _sum_up(name: str, subjects: Sequence[Subject], tally: Tally) -> Row:
    machine = machines()[name]
    alone_s = [sum(mix.times_s) for mix in tally.mixes]
    least_s = [least_makespan_s(mix, machine) for mix in tally.mixes]
    shorter = [1 - found.makespan_s / whole_s for found, whole_s in zip(tally.shared, alone_s, strict=True)]
    possible = [1 - best_s / whole_s for best_s, whole_s in zip(least_s, alone_s, strict=True)]
    compared_alone_s = [alone_s[index] for index in tally.compared]
    best_of_both = [
        tally.shared[index].makespan_s / min(alone_s[index], packed.makespan_s)
        for index, packed in zip(tally.compared, tally.packed, strict=True)
    ]
    waited_s = sum(found.waited_s for found in tally.shared)
    return {
        "what": "admission",
        "machine": name,
        "num_subjects": len(subjects),
        "num_mixes": len(tally.mixes),
        "num_jobs": sum(len(mix.subjects) for mix in tally.mixes),
        "num_over_device": sum(is_over(found, machine)["device"] for found in tally.shared),
        "num_over_host": sum(is_over(found, machine)["host"] for found in tally.shared),
        "num_compared": len(tally.compared),
        "num_over_if_packed": sum(any(is_over(found, machine).values()) for found in tally.packed),
        "num_over_by_tensors_alone": sum(any(is_over(found, machine).values()) for found in tally.control),
        "num_shared": sum(found.most_at_once > 1 for found in tally.shared),
        "lane_used": round(sum(found.lane_s for found in tally.shared) / max(waited_s, 1e-9), 4),
        "bytes_used": round(sum(found.bytes_s for found in tally.shared) / max(waited_s, 1e-9), 4),
        "waited_s": round(waited_s),
        "shorter_median": round(statistics.median(shorter), 4),
        "shorter_by_sum": round(1 - sum(found.makespan_s for found in tally.shared) / sum(alone_s), 4),
        "possible_median": round(statistics.median(possible), 4),
        "possible_by_sum": round(1 - sum(least_s) / sum(alone_s), 4),
        "packed_shorter_by_sum": round(1 - sum(found.makespan_s for found in tally.packed) / sum(compared_alone_s), 4),
        "num_longer_than_alone": sum(value < -1e-6 for value in shorter),
        "against_best_of_both_median": round(statistics.median(best_of_both), 4),
        "shorter": [round(value, 3) for value in shorter],
        "possible": [round(value, 3) for value in possible],
    }
