"""Measures how soon the service notices what it has lost, and goes on.

    python -m benchmarks.recovery [--quick] [--only PART] [--database NAME] [--rounds N] [--limit-s T] [--json FILE]

service: workers and leading reconcilers that are killed. devices: jobs over two machines that lose a part.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from benchmarks.common.record import GoalEntry, Record, describe_machine
from benchmarks.recovery import service

PARTS = ("service", "devices")
NUM_QUICK = 4


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"40 jobs, 3 leaders, {NUM_QUICK} lost parts: a few minutes")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite", help="of the part service")
    parser.add_argument("--rounds", type=int, default=50, help="of the part devices")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no round after so many seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    record = Record(file=options.json, machine=describe_machine(), is_quick=options.quick)
    goals: dict[str, GoalEntry] = {}
    if options.only in (None, "service"):
        rows = service.lose_parts(database=options.database, is_quick=options.quick, seed=options.seed)
        record.add_all("service", rows)
        goals |= service.summarize(record.rows)
    if options.only in (None, "devices"):
        devices = _import_devices()
        rounds = NUM_QUICK if options.quick else options.rounds
        record.add_all("devices", devices.lose_parts(rounds=rounds, seed=options.seed, limit_s=options.limit_s))
        goals |= devices.summarize(record.rows)
    return record.finish(goals)


def _import_devices() -> ModuleType:
    """The part whose modules read Django's settings when they are imported, which the part before it decides."""
    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
    django.setup()
    from benchmarks.recovery import devices

    return devices


if __name__ == "__main__":
    sys.exit(main())
