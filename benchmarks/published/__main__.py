"""``python -m benchmarks.published``: see command.py."""

from benchmarks.published.command import main

if __name__ == "__main__":
    main()
