"""``python -m benchmarks.load``: see command.py."""

import sys

from benchmarks.load.command import main

if __name__ == "__main__":
    sys.exit(main())
