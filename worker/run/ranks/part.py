"""The ranks of an attempt that one leader starts: all of them on one machine, some of them on several.

On several machines each has a leader with a folder of its own. All share the attempt's folder, where ranks meet and leave their
results; there each leader says how its ranks ended, for the one that leads rank 0 and so judges the attempt. One that has ended
its ranks because its own worker was halted says so there too, since that worker says nothing.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.run.ranks.rank import rank_folder, shared_folder
from worker.run.ranks.verdict import RankEnd
from worker.run.reporter import leave_json, read_json

_END_FILE = "end.json"
_HALTED_FILE = "halted.json"


@dataclass(frozen=True, kw_only=True)
class Part:
    """The ranks of one leader among all."""

    devices: tuple[str, ...]
    """By rank, torch's names of devices; empty for those of other machines."""
    machines: tuple[str, ...] = ()
    """By rank, the names of the machines; none where one machine has all ranks."""
    kinds: tuple[str, ...] = ()
    """By rank, the names of the kinds of device, where ``machines`` are given."""
    folder: Path
    """The attempt's, which all of its ranks share."""

    @classmethod
    def read(cls, attempt: Mapping[str, Any], folder: Path) -> "Part":
        """attempt: the brief of this leader. folder: its own."""
        names = {name: tuple(attempt.get(name, ())) for name in ("machines", "kinds")}
        return cls(devices=tuple(attempt["devices"]), folder=shared_folder(attempt, folder), **names)

    @property
    def own(self) -> tuple[int, ...]:
        """Ranks that this leader starts."""
        return tuple(rank for rank, device in enumerate(self.devices) if device)

    @property
    def elsewhere(self) -> tuple[int, ...]:
        """Ranks that other machines start."""
        return tuple(rank for rank, device in enumerate(self.devices) if not device)

    @property
    def judges(self) -> bool:
        """True for the leader that leaves the attempt's result."""
        return bool(self.devices[0])

    @property
    def labels(self) -> tuple[str, ...]:
        """Devices by rank, for messages: ``cuda:1``, or ``RTX 3060 of office``."""
        pairs = zip(self.kinds, self.machines, strict=True)
        return tuple(f"{kind} of {machine}" for kind, machine in pairs) if self.machines else self.devices

    def read_end(self, rank: int, *, exit_code: int, was_killed: bool, killed_in: str) -> RankEnd:
        """The end of a rank of this leader, with the result that it left."""
        return RankEnd(
            rank=rank,
            exit_code=exit_code,
            result=self._read(rank, "result.json"),
            was_killed_by_leader=was_killed,
            killed_in=killed_in,
        )

    def report_end(self, end: RankEnd) -> None:
        """For the leader that judges, where that is another. What a full disk does not take it learns by losing the rank."""
        if not self.judges:
            facts = {
                "exit_code": end.exit_code,
                "was_killed_by_leader": end.was_killed_by_leader,
                "killed_in": end.killed_in,
            }
            with suppress(OSError):
                leave_json(facts, rank_folder(self.folder, end.rank) / _END_FILE)

    def reported_end(self, rank: int) -> RankEnd | None:
        """The end of a rank of another machine; None as long as nothing was reported of it."""
        report = self._read(rank, _END_FILE)
        if report is None:
            return None
        return RankEnd(rank=rank, **report, result=self._read(rank, "result.json"), is_elsewhere=True)

    def report_halt(self) -> None:
        """Write that the worker of this machine is halted and that none of its ranks is left; called once that is so."""
        with suppress(OSError):
            leave_json({"machine": self.machines[self.own[0]]}, rank_folder(self.folder, self.own[0]) / _HALTED_FILE)

    def halted_machines(self) -> tuple[str, ...]:
        """Other machines whose worker is halted, and whose ranks have ended for that."""
        found = [self._read(rank, _HALTED_FILE) for rank in self.elsewhere]
        return tuple(str(report["machine"]) for report in found if report is not None)

    def _read(self, rank: int, name: str) -> dict[str, Any] | None:
        try:
            return read_json(rank_folder(self.folder, rank) / name)
        except (OSError, ValueError):
            return None
