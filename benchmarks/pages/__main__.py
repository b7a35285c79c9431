"""``python -m benchmarks.pages``: see command.py."""

import sys

from benchmarks.pages.command import main

if __name__ == "__main__":
    sys.exit(main())
