"""Runs a module on the hostile device of the tests: ``python -m benchmarks.gpu_check.on_hostile_device MODULE ARGUMENTS``.

The CPU device is asynchronous in there, as a card is, so a benchmark of cards meets its own mistakes before it meets a card.
"""

import runpy
import sys

from tests.hostile_device.backend import hostile_device


def main() -> None:
    module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    with hostile_device():
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
