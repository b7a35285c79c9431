"""Several devices, held against one: ``python -m benchmarks.parallel [--quick] [--only PART] [--json FILE]``.

right: drawn plans on 2 and 4 ranks of gloo against the same micro-batches on one device, and each rank's peak against its
prediction. network: bytes and times of what ranks exchange over links of three kinds, against counters and clock. slow_link:
steps that ranks take alone, over the slowest of these links, and the loss that they come to. pooled: two devices that work on
weights which stream from the host, against one. planning: seconds of searches over layouts and memory together. joint: their
plans against those whose memory policy was fixed first.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common.record import GoalEntry, Record, describe_machine
from benchmarks.parallel import joint, network, planning, pooled, right, slow_link

PARTS = ("right", "network", "slow_link", "pooled", "planning", "joint")
NUM_QUICK = 10
SEED = 20261126


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{NUM_QUICK} cases")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--cases", type=int, default=right.NUM_CASES, metavar="N")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    num_cases = NUM_QUICK if options.quick else options.cases
    is_whole = options.only is None and num_cases >= right.NUM_CASES
    record = Record(
        file=options.json, machine=describe_machine(torch.device("cpu")), is_quick=options.quick, is_whole=is_whole
    )
    goals: dict[str, GoalEntry] = {}
    if options.only in (None, "right"):
        record.add_all("right", right.compare_all(num_cases, seed=options.seed))
        goals |= right.summarize(record.rows, num_cases=right.NUM_CASES)
    if options.only in (None, "network"):
        record.add_all("network", network.measure_all(is_quick=options.quick))
        goals |= network.summarize(record.rows)
    if options.only in (None, "slow_link"):
        record.add_all("slow_link", slow_link.time_all(is_quick=options.quick))
        record.add_all("slow_link", slow_link.train_all(is_quick=options.quick))
        goals |= slow_link.summarize(record.rows)
    if options.only in (None, "pooled"):
        record.add_all("pooled", pooled.time_all(is_quick=options.quick))
        goals |= pooled.summarize(record.rows)
    if options.only in (None, "planning"):
        record.add_all("planning", planning.time_searches())
        goals |= planning.summarize(record.rows)
    if options.only in (None, "joint"):
        record.add_all("joint", joint.compare_all(is_quick=options.quick))
        goals |= joint.summarize(record.rows)
    return record.finish(goals)


if __name__ == "__main__":
    raise SystemExit(main())
