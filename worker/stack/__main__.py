"""Runs the embedded stack's commands: ``python -m worker.stack up | down | status``."""

import sys

from worker.stack.stack import main

if __name__ == "__main__":
    sys.exit(main())
