"""A worker's settings, from the environment; the defaults are the ones the reference figures were measured with.

Tests shorten the times; nobody else should need to.
"""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings

from optimizer.hardware.mixed import read_played


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Everything the supervisor and the reconciler may be given from outside."""

    home: Path
    """HEADROOM_HOME: jobs, caches, locks."""
    host: str
    """Name of the machine, as the list of machines shows it."""
    process_id: int
    token: str = ""
    """A word that no other process of the same host and number has, as those of a container that starts again else would."""
    num_slots: int = 4
    """Attempts at once on each device, as far as their bytes fit."""
    num_played: int = 1
    """Devices that the CPU plays; cards are counted."""
    shares_if_faster: bool = True
    """A job joins those that run only if more is done by all together; False where the number of slots was given."""
    poll_s: float = 5.0
    """Seconds that an idle slot waits for a hint before it looks for work itself; jobs start this late with the broker down."""
    lease_s: int = 30
    """A claim that is not renewed for this long may be given to another worker."""
    grace_s: float = 120.0
    """From asking an attempt to checkpoint and stop to killing it."""
    outage_s: float = 900.0
    """Seconds that an attempt goes on without the database; on one machine nobody else can claim meanwhile."""
    reconcile_s: float = 5.0
    """Pause between two passes of the reconciler."""

    @property
    def name(self) -> str:
        """Written on claims and events; a worker that was started again is another one."""
        return ":".join([self.host, str(self.process_id), *([self.token] if self.token else [])])

    @property
    def heartbeat_s(self) -> float:
        """Six renewals fit into one lease, so that one or two may fail."""
        return self.lease_s / 6

    @classmethod
    def from_environment(cls) -> "WorkerConfig":
        """Raises ValueError that names the variable when a number is not one or is out of range."""
        return cls(
            home=Path(settings.HEADROOM_HOME),
            host=os.environ.get("HEADROOM_WORKER_NAME") or socket.gethostname(),
            process_id=os.getpid(),
            num_slots=int(_number("HEADROOM_SLOTS", cls.num_slots, low=1, high=64)),
            num_played=_num_played(),
            shares_if_faster=not os.environ.get("HEADROOM_SLOTS"),
            poll_s=_number("HEADROOM_POLL_S", cls.poll_s, low=0.05, high=600),
            lease_s=int(_number("HEADROOM_LEASE_S", cls.lease_s, low=1, high=3600)),
            grace_s=_number("HEADROOM_GRACE_S", cls.grace_s, low=0, high=3600),
            outage_s=_number("HEADROOM_OUTAGE_S", cls.outage_s, low=0, high=86_400),
            reconcile_s=_number("HEADROOM_RECONCILE_S", cls.reconcile_s, low=0.05, high=600),
        )


def _num_played() -> int:
    text = os.environ.get("HEADROOM_DEVICES") or "1"
    try:
        played = read_played(text)
    except ValueError as error:
        raise ValueError(f"HEADROOM_DEVICES is {error}") from error
    return played if isinstance(played, int) else len(played)


def _number(variable: str, default: float, *, low: float, high: float) -> float:
    text = os.environ.get(variable, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise ValueError(f"{variable} is {text!r}; allowed: a number from {low:g} to {high:g}")
    return value
