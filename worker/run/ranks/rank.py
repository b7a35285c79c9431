"""The side of one rank: how it finds its place, ends with its leader, and leaves its result for it.

Rank 0 has the attempt's folder and pipe as any attempt has. The others say nothing; only their errors are read. None of them
writes the attempt's ``result.json``: which rank's end is the attempt's is for the leader to say.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from worker.run.pipe import PipeWriter
from worker.run.reporter import Reporter
from worker.run.watch.lifeline import die_with_parent_thread

LEADER_VARIABLE = "HEADROOM_LEADER_PID"
_FOLDER = "ranks"
_MEETING_FOLDER = "meeting"


def shared_folder(attempt: Mapping[str, Any], folder: Path) -> Path:
    """The attempt's folder, which the leaders of several machines share. folder: the leader's own."""
    return Path(attempt.get("attempt_folder", folder))


def rank_folder(attempt_folder: Path, rank: int) -> Path:
    """The folder for the rank's ``result.json``."""
    return attempt_folder / _FOLDER / str(rank)


def die_with_leader() -> None:
    """Called first thing. The leader starts its ranks from the thread that it ends with, so the kernel's signal is the leader's
    end; one that was gone before the kernel was asked is seen by the parent that this process has instead.
    """
    leader = int(os.environ[LEADER_VARIABLE])
    die_with_parent_thread()
    if os.getppid() != leader:
        sys.exit("the leader of the ranks ended before this one had started")


def leave_stopping_to_first(rank: int) -> None:
    """All ranks stop at the step at which the first does. TERM may come to all, where a whole service is stopped."""
    if rank > 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def brief_of_rank(attempt: dict[str, Any], *, folder: Path, rank: int) -> dict[str, Any]:
    """The attempt as one rank sees it: its own device, and its place among all."""
    is_cuda = attempt["devices"][rank].startswith("cuda")
    meeting = shared_folder(attempt, folder) / _FOLDER / _MEETING_FOLDER
    place = {"rank": rank, "num_ranks": len(attempt["devices"]), "folder": str(meeting)}
    if machines := attempt.get("machines"):
        place["machine"] = machines[rank]
    # the others' cards are hidden from it
    return {**attempt, "device": "cuda:0" if is_cuda else "cpu", "ranks": place}


def reporter_of_rank(
    folder: Path, *, rank: int, pipe: PipeWriter | None, check_lease: Callable[[], object] | None = None
) -> Reporter:
    own = rank_folder(folder, rank)
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    if rank == 0:
        return Reporter(folder, pipe=pipe, result_folder=own, check_lease=check_lease)
    return Reporter(own, pipe=None, is_silent=True, check_lease=check_lease)
