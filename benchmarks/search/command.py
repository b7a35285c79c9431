"""Measures the search.

    python -m benchmarks.search [--quick] [--json FILE] [--only PART] [--seed N] [--device cuda:0]

small     small problems drawn by chance: the answer against trying every plan
times     how long a search takes, and how many plans it prices, from 4 to 120 blocks with every knob open
monotone  a sweep of budgets: more memory never makes a slower plan
sweep     plans at budgets against what torch offers, on real steps
regret    jobs drawn by chance: the chosen plan against the best of real runs

Exit code 1 where a goal is missed. What goes wrong in one part is told in a row, and the parts after it still run.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.record import Record, describe_machine, goal
from benchmarks.search import monotone, regret, small, sweep, times
from benchmarks.search.part import Options, Part

PARTS: tuple[Part, ...] = (small.PART, times.PART, monotone.PART, sweep.PART, regret.PART)
SEED = 20261121


def main() -> int:
    by_name = {part.name: part for part in PARTS}
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.search", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller problems; under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here as well, after every row")
    parser.add_argument("--only", choices=list(by_name), action="append", help="these parts alone; may be repeated")
    parser.add_argument("--seed", type=int, default=SEED, help="of everything drawn by chance")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    options = Options(quick=arguments.quick, seed=arguments.seed, device=torch.device(arguments.device))
    record = Record(file=arguments.json, machine=describe_machine(options.device))
    parts = [part for name, part in by_name.items() if name in (arguments.only or by_name)]
    for part in parts:
        record.add_all(part.name, part.measure(options))
    for part in parts:
        record.summary |= part.summarize([row for row in record.rows if row.get("part") == part.name])
    num_failed = sum(row.get("what") == "failed" for row in record.rows)
    record.summary["parts that failed"] = goal(num_failed, 0, met=num_failed == 0)
    record.close()
    return 0 if all(entry["met"] for entry in record.summary.values()) else 1
