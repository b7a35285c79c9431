"""``python -m benchmarks.published``: see command.py."""

import sys

from benchmarks.published.command import main

if __name__ == "__main__":
    sys.exit(main())
