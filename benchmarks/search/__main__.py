"""``python -m benchmarks.search``: see command.py."""

import sys

from benchmarks.search.command import main

if __name__ == "__main__":
    sys.exit(main())
