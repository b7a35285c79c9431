"""Sets the way in which threads of one torch operation wait for each other on the processor (``docs/decisions/0027``)."""

import os
from collections.abc import Mapping
from typing import Final

WAIT_POLICY: Final[Mapping[str, str]] = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
"""Threads spin for some 20 microseconds, then sleep. The second setting is for torch's own OpenMP library, the first for others.

OpenMP's default, to spin for milliseconds, is many times slower if another program wants a core: the thread that is waited for
may be the one without. Sleeping at once is up to twice as slow if an idle core takes long to wake.
"""


def wait_policy(given: Mapping[str, str]) -> dict[str, str]:
    """Settings to add to a process's environment; none if it already sets one of them."""
    return {} if any(name in given for name in WAIT_POLICY) else dict(WAIT_POLICY)


def sleep_while_waiting() -> None:
    """Apply ``WAIT_POLICY`` to this process. Call it before torch is imported, which reads the settings once."""
    os.environ.update(wait_policy(os.environ))
