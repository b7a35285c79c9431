"""Measures batch generation.

    python -m benchmarks.generation [--quick] [--json FILE [--add]] [--only PART [--of MODEL]] [--seed N] [--device cuda:0]

throughput  256 prompts at a device budget of a quarter of the weights, against transformers' and accelerate's ways
larger      weights and cache of four times the device's room, from host memory and from the disk
plans       plans drawn by chance: peaks and bytes moved, to the byte
drift       keys and values in 8 and 4 bits over 2,000 tokens: the logits' error, and whether it grows
sweep       plans at budgets run for real: errors of the estimates, and the chosen plan against the best

Exit code 1 where a goal is missed. An error in one part becomes a row, and the parts after it still run.
"""

from benchmarks.common.parts import Part, run_parts
from benchmarks.generation import drift, larger, plans, sweep, throughput

PARTS: tuple[Part, ...] = (throughput.PART, larger.PART, plans.PART, drift.PART, sweep.PART)


def main() -> int:
    return run_parts(PARTS, prog="python -m benchmarks.generation", description=__doc__)
