"""Measures what the tests may not: accuracy, speed, scale. Each module is a command: ``python -m benchmarks.NAME``."""
