"""Measures this machine, its disk where jobs have theirs: ``python -m worker.probing``, JSON on standard output.

HEADROOM_DEVICES: devices that the CPU plays; the worker has checked it.
"""

import json
import os
import sys
from pathlib import Path

from optimizer.hardware.probe.probe import probe_machine


def main() -> None:
    num_played = int(os.environ.get("HEADROOM_DEVICES") or 1)
    json.dump(probe_machine(scratch=Path.cwd(), num_played=num_played).to_json(), sys.stdout)


if __name__ == "__main__":
    main()
