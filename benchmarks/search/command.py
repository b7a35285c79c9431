"""Measures the search.

    python -m benchmarks.search [--quick] [--json FILE [--add]] [--only PART] [--of CASE] [--machine FILE] [--seed N]
                                [--device cuda:0]

small     small problems drawn by chance: the answer against trying every plan
times     how long a search takes, and how many plans it prices, from 4 to 120 blocks with every knob open
monotone  a sweep of budgets: more memory never makes a slower plan
sweep     plans at budgets against what torch offers, on real steps
regret    jobs drawn by chance: the chosen plan against the best of real runs

A long part can be measured case by case, into one file: ``--only sweep --of llama --json FILE --add``. Cases of the sweep are
models, those of regret the numbers of jobs, those of small the numbers of families. ``--machine FILE`` keeps the calibrated
machine between them. Part ``peaks`` is what of the sweep needs no quiet machine; ``--only sweep --peaks FILE`` goes on from its
result. On a machine that others load, ``--processor-time`` runs steps in one thread and does not count what others take.

Exit code 1 where a goal is missed. An error in one part becomes a row, and the parts after it still run.
"""

from benchmarks.common.parts import Part, run_parts
from benchmarks.search import monotone, regret, small, sweep, times

PARTS: tuple[Part, ...] = (small.PART, times.PART, monotone.PART, sweep.PART, sweep.PEAKS_PART, regret.PART)


def main() -> int:
    return run_parts(PARTS, prog="python -m benchmarks.search", description=__doc__)
