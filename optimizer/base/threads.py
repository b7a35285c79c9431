"""How the threads of one torch operation wait for each other on the processor (``docs/decisions/0027``)."""

import os
from collections.abc import Mapping
from typing import Final

WAIT_POLICY: Final[Mapping[str, str]] = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
"""They look for the others some 20 microseconds, then sleep. The second is for torch's own OpenMP library, the first for others.

OpenMP's own choice, to look for milliseconds, is many times slower where somebody else wants a core: the thread that is waited
for may be the one without. To sleep at once is up to twice as slow where a core that has nothing to do takes long to wake.
"""


def wait_policy(given: Mapping[str, str]) -> dict[str, str]:
    """Of a process with this environment, which has its say."""
    return {} if any(name in given for name in WAIT_POLICY) else dict(WAIT_POLICY)


def sleep_while_waiting() -> None:
    """For this process, before it imports torch, which reads it once."""
    os.environ.update(wait_policy(os.environ))
