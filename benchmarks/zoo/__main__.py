"""``python -m benchmarks.zoo``: see command.py."""

import sys

from benchmarks.zoo.command import main

if __name__ == "__main__":
    sys.exit(main())
