"""How the threads of one torch operation wait for each other on the processor (``docs/decisions/0027``)."""

import os

WAIT_POLICY = {"OMP_WAIT_POLICY": "passive"}
"""They sleep. OpenMP's own choice, to spin, is a little quicker where nobody else wants a core and many times slower where
somebody does: the thread that is waited for may be the one without a core."""


def sleep_while_waiting() -> None:
    """For this process, before it imports torch, which reads it once; what the environment says already stands."""
    for name, value in WAIT_POLICY.items():
        os.environ.setdefault(name, value)
