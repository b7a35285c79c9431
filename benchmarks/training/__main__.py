"""``python -m benchmarks.training``: see command.py."""

import sys

from benchmarks.training.command import main

if __name__ == "__main__":
    sys.exit(main())
