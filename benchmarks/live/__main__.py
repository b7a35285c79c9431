"""``python -m benchmarks.live``: see command.py."""

import sys

from benchmarks.live.command import main

if __name__ == "__main__":
    sys.exit(main())
