"""Compares what the ranks of a run must have alike where they first meet: the versions that compute and send, and the plan.

Machines of one job are compared when it is submitted; one of them may be updated before the job runs, or runs again.
"""

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from optimizer.base.errors import RanksDiffer
from optimizer.runtime.device.backends import backend_of


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One rank, as the others have to know it before they exchange anything with it."""

    computer: str
    """The same for all ranks of one computer (``read_boot_id``)."""
    machine: str
    """Name for people."""
    alike: Mapping[str, str]
    """Values that all ranks must have alike, by their names for people."""

    @classmethod
    def find(cls, *, computer: str, machine: str, device: torch.device, plan: str) -> "RankFacts":
        """Those of this process. machine: the host's name where it is empty. plan: its fingerprint, empty for none."""
        alike = {"torch": str(torch.__version__), "Headroom": _program_version(), **backend_of(device).exchange_versions}
        if plan:
            alike["plan"] = plan
        return cls(computer=computer, machine=machine or socket.gethostname(), alike=alike)


def exchange_facts(own: RankFacts, *, store: Any, rank: int, num_ranks: int) -> list[RankFacts]:
    """By rank. store: by which the ranks find each other; waits there until all have said theirs."""
    store.set(f"facts of {rank}", json.dumps(asdict(own)))
    return [RankFacts(**json.loads(store.get(f"facts of {other}"))) for other in range(num_ranks)]


def require_alike(facts: Sequence[RankFacts]) -> None:
    """Raise RanksDiffer where one of them has something else than the first. facts: by rank."""
    first = facts[0]
    for rank, other in enumerate(facts):
        for what in sorted({*first.alike, *other.alike}):
            theirs, ours = other.alike.get(what, "none"), first.alike.get(what, "none")
            if theirs != ours:
                raise RanksDiffer(
                    f"rank {rank} on {other.machine} has {what} {theirs}, and rank 0 on {first.machine} has {what} {ours}; "
                    "the ranks of a run need the same",
                    hint="Install the same release of Headroom and the same torch on all of its machines, start their workers "
                    "again, and retry the job.",
                )


def _program_version() -> str:
    try:
        return version("headroom")
    except PackageNotFoundError:  # run from the source tree
        return "of the source tree"
