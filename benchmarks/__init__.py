"""Measures what the tests may not: accuracy, speed, scale. Each module is a command: ``python -m benchmarks.NAME``."""

from optimizer.threads import sleep_while_waiting

sleep_while_waiting()  # as the worker's jobs do, or it would measure something else
