"""Runs the planning commands: ``python -m optimizer.cli plan | estimate | profile | probe``."""

import sys

from optimizer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
