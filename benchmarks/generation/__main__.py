import sys

from benchmarks.generation.command import main

if __name__ == "__main__":
    sys.exit(main())
