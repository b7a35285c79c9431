"""Measures this machine, its disk where jobs have theirs: ``python -m worker.probing``, JSON on standard output.

HEADROOM_DEVICES: devices that the CPU plays, a number or the memory of each; the worker has checked it.
"""

import json
import os
import sys
from pathlib import Path

from optimizer.hardware.machine import Machine
from optimizer.hardware.mixed import play_devices, read_played
from optimizer.hardware.probe.kinds import list_card_kinds, probe_kinds
from optimizer.hardware.probe.probe import probe_machine


def main() -> None:
    json.dump(measure_machine().to_json(), sys.stdout)


def measure_machine() -> Machine:
    """The machine with all of its devices, of whatever kinds."""
    played = read_played(os.environ.get("HEADROOM_DEVICES") or "1")
    kinds = list_card_kinds()
    if len(kinds) > 1:
        return probe_kinds(kinds, probe=lambda device: probe_machine(scratch=Path.cwd(), device=device))
    if isinstance(played, int):
        return probe_machine(scratch=Path.cwd(), num_played=played)
    return play_devices(probe_machine(scratch=Path.cwd(), num_played=len(played)), played)


if __name__ == "__main__":
    main()
