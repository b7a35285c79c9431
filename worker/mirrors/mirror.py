"""A mirror: a service outside of Headroom that shows a copy of a run's measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from worker.mirrors.scalars import Scalars

MAX_VALUE_CHARACTERS = 500
"""MLflow's oldest limit on a parameter's value."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run as a mirror introduces it."""

    id: str
    """The job's; a mirror goes on with the same run after a new attempt."""
    name: str
    url: str
    """Address of the run's page."""
    config: Mapping[str, str | int | float | bool]
    """Workload, goal and prediction with dotted names."""
    folder: Path
    """Place for the files of a mirror's library."""


class Mirror(Protocol):
    """Made with a ``Run``, which opens or goes on with the run there. Each call may raise whatever the library raises."""

    url: str
    """Address of the copy; empty where it has none."""

    def log(self, events: Sequence[Scalars]) -> None:
        """Raises where they were not taken; they then come again."""

    def finish(self, ending: str) -> None:
        """Wait until everything was taken. ending: succeeded, failed or cancelled; empty for a run that goes on later."""


def flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Nested values under dotted names; lists as text, what is not given left out."""
    found: dict[str, str | int | float | bool] = {}
    for key, value in document.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}.")
        elif isinstance(value, bool | int | float):
            found[name] = value
        elif value is not None:
            found[name] = str(value)[:MAX_VALUE_CHARACTERS]
    return found
