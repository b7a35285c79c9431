"""``python -m benchmarks.mixes [--quick] [--only PART ...] [--json FILE]``: jobs that share one device.

- admission: 500 random mixes on three cards and a small CPU device, each submitted to a real database and claimed by the
  service's own code, while time is simulated from the predictions. One in five is also run in two other ways: as many jobs as
  have room, and, as a control that has to fail, by the tensors of a steady step alone.
- measured: pairs of real training processes on the CPU device, alone and beside each other: what one costs the other.

The first part needs no quiet machine; of the second only medians of pairs mean something.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.record import GoalEntry, Record, Row, describe_machine, goal
from benchmarks.mixes.admission import measure_admission
from benchmarks.mixes.subjects import CARDS, CPU

PARTS = ("admission", "measured")
NUM_MIXES, NUM_QUICK = 500, 20
NUM_ROUNDS, NUM_QUICK_ROUNDS = 5, 2
MOST_ERROR = 0.15
MOST_USED, LEAST_SHORTER = 0.90, 0.30


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mixes", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="20 mixes on one card and on the CPU device")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    record = Record(
        file=options.json, machine=describe_machine(), is_quick=options.quick, is_whole=set(options.only) == set(PARTS)
    )
    if "admission" in options.only:
        names = (CARDS[0], CPU) if options.quick else (*CARDS, CPU)
        record.add_all("admission", measure_admission(num_mixes=NUM_QUICK if options.quick else NUM_MIXES, names=names))
    if "measured" in options.only:
        # torch is loaded here alone: admission needs none once models are traced
        from benchmarks.mixes.measured import measure_pairs

        record.add_all("measured", measure_pairs(num_rounds=NUM_QUICK_ROUNDS if options.quick else NUM_ROUNDS))
    return record.finish(summarize(record.rows))


def summarize(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    admitted = [row for row in rows if row["what"] == "admission"]
    goals: dict[str, GoalEntry] = {}
    num_mixes = sum(row["num_mixes"] for row in admitted)
    over = sum(row["num_over_device"] + row["num_over_host"] for row in admitted)
    goals["random mixes"] = goal(num_mixes or None, f">= {NUM_MIXES}", met=num_mixes >= NUM_MIXES, needs="all cases")
    goals["mixes out of memory by packing"] = goal(over if admitted else None, 0, met=over == 0)
    control = sum(row["num_over_by_tensors_alone"] for row in admitted)
    goals["the same by tensors alone (the check can fail)"] = goal(
        control if admitted else None, ">= 1", met=control >= 1, needs="full size"
    )
    waited_s = sum(row["waited_s"] for row in admitted)
    used = sum(row["lane_used"] * row["waited_s"] for row in admitted) / waited_s if waited_s else None
    goals["device used where work waits (busiest lane)"] = share_at_least(used, MOST_USED)
    shorter = [value for row in admitted for value in row["shorter"]]
    goals["makespan against one at a time, shorter by (median)"] = share_at_least(_median(shorter), LEAST_SHORTER)
    # one at a time leaves nothing to gain where every job keeps the same lane busy
    could = [
        value / possible
        for row in admitted
        for value, possible in zip(row["shorter"], row["possible"], strict=True)
        if possible > LEAST_SHORTER
    ]
    goals["gain reached, of the most that any schedule could (median)"] = share_at_least(_median(could), MOST_USED)
    return goals | _of_pairs([row for row in rows if row["what"] == "pair"])


def _of_pairs(pairs: Sequence[Row]) -> dict[str, GoalEntry]:
    """Goals of the pairs that admission lets run together; those that it declines are there to be compared."""
    admitted = [row for row in pairs if row["is_admitted"] and row["error"] is not None]
    errors = [abs(row["error"]) for row in admitted]
    error = _median(errors)
    out_of_memory = sum(row["num_out_of_memory"] for row in pairs)
    shorter = [1 - row["makespan_against_one_at_a_time"] for row in admitted]
    return {
        "real pairs out of memory": goal(out_of_memory if pairs else None, 0, met=out_of_memory == 0),
        "slowdown of admitted real pairs, error (median)": goal(
            None if error is None else f"{100 * error:.1f} %",
            f"<= {100 * MOST_ERROR:.0f} %",
            met=error is not None and error <= MOST_ERROR,
            needs="full size",
        ),
        "makespan of admitted real pairs, shorter by (median)": share_at_least(_median(shorter), LEAST_SHORTER),
    }


def share_at_least(value: float | None, least: float) -> GoalEntry:
    shown = None if value is None else f"{100 * value:.1f} %"
    return goal(shown, f">= {100 * least:.0f} %", met=value is not None and value >= least, needs="full size")


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
