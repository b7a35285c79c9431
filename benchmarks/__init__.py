"""Measures what the tests may not: accuracy, speed, scale. Each module is a command: ``python -m benchmarks.NAME``."""

from optimizer.base.heap import keep_freed_memory
from optimizer.base.threads import sleep_while_waiting

# As the worker's jobs do, or it would measure something else.
sleep_while_waiting()
keep_freed_memory()
