"""Measures this machine, its disk where jobs have theirs: ``python -m worker.probing``, JSON on standard output."""

import json
import sys
from pathlib import Path

from optimizer.hardware.probe.probe import probe_machine


def main() -> None:
    json.dump(probe_machine(scratch=Path.cwd()).to_json(), sys.stdout)


if __name__ == "__main__":
    main()
