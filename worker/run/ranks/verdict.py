"""The result of an attempt from the ends of its ranks: of the rank that failed by itself, not of those that lost it. Pure."""

import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from worker.run.exit_codes import EXIT_DRAINED, EXIT_FAILED, EXIT_NO_ROOM, EXIT_OK
from worker.run.watch.host_kills import killed_by_host

RANK_LOST: Final = "rank_lost"
"""Code of the error of a rank whose others are gone."""
WORKER_HALTED: Final = "its worker was halted"
_LOST: Final[dict[str, Any]] = {"outcome": "failed", "reason": "worker_lost", "error": None}


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """One rank's process, ended."""

    rank: int
    exit_code: int
    """Negative for a signal."""
    result: dict[str, Any] | None
    """Its ``result.json``; None where it left none."""
    was_killed_by_leader: bool = False
    killed_in: str = ""
    """The group in which the kernel counted a process that its out-of-memory killer ended (``HostKills``); empty for none."""
    is_elsewhere: bool = False
    """True for a rank of another machine, whose leader reported it."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The end of the whole attempt."""

    result: dict[str, Any] | None
    """The attempt's ``result.json``; None for none."""
    exit_code: int
    """Negative: the attempt ends by this signal."""


def judge_ranks(
    ends: Sequence[RankEnd],
    *,
    devices: Sequence[str],
    was_asked_to_stop: bool,
    absent: Mapping[int, str] = MappingProxyType({}),
    halted: Collection[str] = (),
    last_step: Mapping[str, Any] = MappingProxyType({}),
) -> Verdict:
    """ends: of all ranks, in the order in which they ended. devices: by rank, for messages. absent: ranks of other machines of
    whose end nothing was reported, with the names of these. halted: machines whose worker is halted. last_step: record of
    the last step that was counted.
    """
    first = next(end for end in ends if end.rank == 0)
    if first.exit_code in EXIT_OK and first.result is not None:
        return Verdict(result=first.result, exit_code=first.exit_code)
    if was_asked_to_stop and first.exit_code == -signal.SIGTERM:  # before it listened
        return Verdict(result=None, exit_code=EXIT_DRAINED)
    own = next((end for end in ends if is_own_fault(end) and not end.was_killed_by_leader), None)
    if own is not None:
        has_word = own.result is not None or own.is_elsewhere
        named = _named(own, devices, last_step) if has_word else None
        return Verdict(result=named, exit_code=EXIT_FAILED if named else own.exit_code)
    lost = next((end for end in ends if end.result is not None and end.exit_code not in EXIT_OK), None)
    named = _named(lost, devices, last_step) if lost else None
    if absent:
        rank, machine = next(iter(absent.items()))
        message = f"{machine}, which has rank {rank} of {len(devices)}, was lost"
        named = {**(named or _LOST), "message": message, "lost_machine": machine}
        if machine in halted:
            named |= {"message": f"{message}: {WORKER_HALTED}", "trouble": WORKER_HALTED}
    return Verdict(result=named, exit_code=EXIT_FAILED)


def is_own_fault(end: RankEnd) -> bool:
    """False for a rank that ended well, or only because others were gone."""
    if end.exit_code in EXIT_OK:
        return False
    return (_error_of(end) or {}).get("code") != RANK_LOST


def _named(end: RankEnd, devices: Sequence[str], last_step: Mapping[str, Any]) -> dict[str, Any]:
    """The rank's result, with its place in the message and among the error's fields."""
    result = dict(end.result or _without_word(end, last_step))
    result["message"] = f"rank {end.rank} of {len(devices)}, on {devices[end.rank]}: {result.get('message', '')}"
    error = result.get("error")
    if error is not None:
        fields = {**error.get("fields", {}), "rank": end.rank, "num_ranks": len(devices)}
        result["error"] = {**error, "message": result["message"], "fields": fields}
    return result


def _without_word(end: RankEnd, last_step: Mapping[str, Any]) -> dict[str, Any]:
    """A result for a rank of another machine that left none, as this machine's leader cannot end by its signal."""
    if end.exit_code == -signal.SIGKILL and end.killed_in:
        return killed_by_host(end.killed_in, last_step=last_step)
    if end.exit_code == EXIT_NO_ROOM:
        return {"outcome": "failed", "reason": "disk_full", "message": "the disk is full: no room for the result", "error": None}
    how = f"was ended by signal {-end.exit_code}" if end.exit_code < 0 else f"ended with exit code {end.exit_code}"
    return {**_LOST, "message": f"its process {how} and left no result"}


def _error_of(end: RankEnd) -> dict[str, Any] | None:
    return (end.result or {}).get("error")
