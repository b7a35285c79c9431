"""``python -m benchmarks.accuracy``: see command.py."""

import sys

from benchmarks.accuracy.command import main

if __name__ == "__main__":
    sys.exit(main())
