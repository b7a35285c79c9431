import sys

from benchmarks.inference.command import main

if __name__ == "__main__":
    sys.exit(main())
