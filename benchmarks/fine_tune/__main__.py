"""Measures a real fine-tune: ``python -m benchmarks.fine_tune [--only large] [--quick] [--json FILE]``."""

import sys

from benchmarks.common.parts import run_parts
from benchmarks.fine_tune.large import PART as LARGE
from benchmarks.fine_tune.losses import PART as LOSSES
from benchmarks.fine_tune.packed import PART as PACKED

if __name__ == "__main__":
    sys.exit(run_parts((LARGE, LOSSES, PACKED), prog="benchmarks.fine_tune", description=__doc__))
