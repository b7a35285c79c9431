"""``python -m benchmarks.mixes``: see command.py."""

import sys

from benchmarks.mixes.command import main

if __name__ == "__main__":
    sys.exit(main())
