"""Leads the ranks of an attempt on several devices: starts a process for each, and ends all of them when one is lost.

The leader is the attempt's process as its supervisor knows it: it holds the lifeline, hears TERM and leaves ``result.json``. It
imports no torch and computes nothing, so that nothing delays it. Its ranks are in its process group, which is killed as a whole,
and each asks the kernel to be killed with the leader: no process is left once it is gone, however it went. Each also reads by
itself until when the supervisor lets it work, so that a leader that is halted together with its supervisor keeps none at work.

Each rank sees its own card alone, as ``cuda:0``, and gets its part of the machine's threads. The pipe goes to rank 0.

Where the ranks are on several machines each machine has a leader of its own ranks (``part.py``). The one of rank 0 judges all;
the others say how theirs ended, and leave the stopping to it. Where such a leader finds its own worker halted, and left so, it
ends its ranks and says so in the shared folder: the other machines would wait for that worker's lease. The worker of a job on one
machine has that lease to wake in, since nobody waits for it.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from optimizer.runtime.ranks.interface import INTERFACE_VARIABLE, LOOPBACK
from worker.gpu import visible_card
from worker.run.child import child_environment, isolated_command
from worker.run.exit_codes import EXIT_DONE, EXIT_DRAINED, EXIT_FAILED, EXIT_OK
from worker.run.ranks.part import Part
from worker.run.ranks.rank import LEADER_VARIABLE
from worker.run.ranks.verdict import RankEnd, Verdict, is_own_fault, judge_ranks
from worker.run.reporter import leave_result
from worker.run.watch.halted import HaltWatch
from worker.run.watch.host_kills import HostKills
from worker.telemetry import read_last_step

POLL_S: Final = 0.05
LISTEN_S: Final = 0.5
AFTER_FAULT_S: Final = 2.0
"""Time that the others get to end by themselves after a rank that ended by an error of its own."""
AFTER_LOSS_S: Final = 5.0
"""The same after a rank that only lost another: the lost one's own error may still be on its way."""
AFTER_FIRST_S: Final = 20.0
"""The same after rank 0 ended well."""


def lead_ranks(
    attempt: Mapping[str, Any],
    *,
    folder: Path,
    should_stop: Callable[[], bool],
    command: Callable[[int], list[str]] | None = None,
) -> int:
    """Carry the attempt out by its ranks and leave ``result.json``; the exit code of the attempt.

    Where a rank was killed from outside it does not return: it ends by the same signal, as the attempt of one process would.
    command: the program of a rank; the runner's unless given.
    """
    part = Part.read(attempt, folder)
    gang = _Gang(part, folder=folder, command=command or _runner(folder))
    try:
        gang.start()
        ends = gang.watch(should_stop if part.judges else _never)
        if gang.is_abandoned:
            gang.kill()
            return _leave_to_others(part, folder)
        if not part.judges:
            return EXIT_DONE if all(end.exit_code in EXIT_OK for end in ends) else EXIT_FAILED
        verdict = judge_ranks(
            ends,
            devices=part.labels,
            was_asked_to_stop=should_stop(),
            absent=gang.wait_for_others(),
            halted=part.halted_machines(),
            last_step=read_last_step(part.folder / "samples.jsonl"),
        )
    finally:
        gang.kill()
    return _leave(verdict, folder)


def rank_environment(
    environment: Mapping[str, str], *, device: str, num_ranks: int, folder: Path, num_cores: int
) -> dict[str, str]:
    """The scrubbed environment of one rank. device: torch's name of it among the cards that the leader sees. num_ranks: of this
    leader, whose machine's threads they share.
    """
    own = child_environment(environment, folder=folder)
    kind, _, index = device.partition(":")
    num_threads = max(1, int(environment.get("HEADROOM_NUM_THREADS") or num_cores) // num_ranks)
    own["HEADROOM_NUM_THREADS"] = str(num_threads)
    if kind == "cuda":
        own["CUDA_VISIBLE_DEVICES"] = str(visible_card(int(index), visible=environment.get("CUDA_VISIBLE_DEVICES", "")))
        own.setdefault("OMP_NUM_THREADS", str(num_threads))
        # NCCL takes its memory as ranks connect, and not with the first sum, when torch may have taken it.
        own.setdefault("NCCL_RUNTIME_CONNECT", "0")
        interface = environment.get(INTERFACE_VARIABLE, "")
        if interface not in ("", LOOPBACK):
            # The sign has NCCL take this one, and not all whose names begin so.
            own.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    return own


def _runner(folder: Path) -> Callable[[int], list[str]]:
    return lambda rank: isolated_command("worker.run.runner", str(folder), str(rank))


def _never() -> bool:
    return False


def _leave_to_others(part: Part, folder: Path) -> int:
    """The end of ranks whose worker is halted; all of them are gone. Should it wake before others have given the job back, it
    finds a result that costs the job nothing.
    """
    if part.judges:
        message = "The worker was halted, so the job's processes stopped."
        leave_result({"outcome": "drained", "message": message}, folder)
    part.report_halt()
    print("the worker was halted, so its ranks were ended", flush=True)
    return EXIT_DRAINED if part.judges else EXIT_FAILED


def _leave(verdict: Verdict, folder: Path) -> int:
    if verdict.result is not None:
        leave_result(verdict.result, folder)
    if verdict.exit_code < 0:
        # a signal that is blocked or ignored here would leave this process alive
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-verdict.exit_code])
        with contextlib.suppress(OSError):  # KILL has no disposition to change
            signal.signal(-verdict.exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -verdict.exit_code)
    return verdict.exit_code


class _Gang:
    """The processes of all ranks of this leader, and what is reported of others'."""

    def __init__(self, part: Part, *, folder: Path, command: Callable[[int], list[str]]) -> None:
        self._part = part
        self._folder = folder
        self._command = command
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._halted: dict[int, HaltWatch] = {}
        self._ends: list[RankEnd] = []
        self._until_s = float("inf")
        """From then on the rest are killed, and nobody is waited for."""
        self._listened_s = float("-inf")
        self._host_kills = HostKills()
        self._is_stopping = False
        self._worker = HaltWatch(os.getppid()) if part.elsewhere else None
        self.is_abandoned = False
        """The worker of this machine is halted, and others wait for it."""

    def start(self) -> None:
        for rank in self._part.own:
            self._processes[rank] = self._start(rank)
            self._halted[rank] = HaltWatch(self._processes[rank].pid)

    def watch(self, should_stop: Callable[[], bool]) -> list[RankEnd]:
        """The ends that are known, in their order, once all of this leader's ranks have ended or the rest were killed."""
        while not self._known.issuperset(self._processes):
            if should_stop() and not self._is_stopping:
                self._is_stopping = True
                self._processes[0].terminate()
            self._end_halted()
            if self._worker is not None and self._worker.has_stood_still() and not self._ends:
                self.is_abandoned = True
                break
            self._note(self._new_ends())
            self._note(self._ends_elsewhere())
            if time.monotonic() > self._until_s:
                self.kill()
                self._note(self._new_ends(was_killed=True))
                break
            time.sleep(POLL_S)
        return self._ends

    def _end_halted(self) -> None:
        """Kill ranks that something has halted and left so: the others would wait for them."""
        for rank, process in self._processes.items():
            if self._halted[rank].has_stood_still() and process.poll() is None:
                print(f"rank {rank} of {len(self._part.devices)} was halted", flush=True)
                process.kill()

    def wait_for_others(self) -> dict[int, str]:
        """Wait, where ranks of this machine lost others, until the ends of all were reported, or of one that failed by itself, or
        for as long as the rest would get. Returns the ranks of whose end nothing was reported, with their machines.
        """
        has_failed = any(end.exit_code not in EXIT_OK for end in self._ends)
        while has_failed and (absent := self._absent()) and not self._has_fault() and time.monotonic() < self._until_s:
            time.sleep(POLL_S)
            self._note(self._ends_elsewhere())
        return absent if has_failed else {}

    def kill(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        for process in self._processes.values():
            process.wait()

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        environment = rank_environment(
            os.environ,
            device=self._part.devices[rank],
            num_ranks=len(self._part.own),
            folder=self._folder,
            num_cores=len(os.sched_getaffinity(0)),
        )
        environment[LEADER_VARIABLE] = str(os.getpid())
        # the devices' locks are held as long as any process of the group is there, and each ends when the supervisor is silent
        passed = {name: os.environ[name] for name in ("HEADROOM_LOCK_FDS", "HEADROOM_BEAT_FD") if name in os.environ}
        if rank == 0 and "HEADROOM_PIPE_FD" in os.environ:
            passed["HEADROOM_PIPE_FD"] = os.environ["HEADROOM_PIPE_FD"]
        return subprocess.Popen(
            self._command(rank),
            stdin=subprocess.DEVNULL,
            cwd=self._folder,
            env={**environment, **passed},
            pass_fds=[int(fd) for fds in passed.values() for fd in fds.split(",")],
        )

    @property
    def _known(self) -> set[int]:
        return {end.rank for end in self._ends}

    def _absent(self) -> dict[int, str]:
        return {rank: self._part.machines[rank] for rank in self._part.elsewhere if rank not in self._known}

    def _has_fault(self) -> bool:
        return any(is_own_fault(end) and not end.was_killed_by_leader for end in self._ends)

    def _note(self, ends: Iterable[RankEnd]) -> None:
        for end in ends:
            self._ends.append(end)
            self._until_s = min(self._until_s, time.monotonic() + _time_left_after(end))

    def _new_ends(self, *, was_killed: bool = False) -> Iterator[RankEnd]:
        known = self._known
        for rank, process in self._processes.items():
            if rank not in known and (code := process.poll()) is not None:
                killed_in = self._host_kills.find() if code == -signal.SIGKILL and not was_killed else ""
                end = self._part.read_end(rank, exit_code=code, was_killed=was_killed, killed_in=killed_in)
                self._part.report_end(end)
                yield end
                if code not in EXIT_OK:
                    how = f"signal {-code}" if code < 0 else f"exit code {code}"
                    print(f"rank {rank} of {len(self._part.devices)} ended with {how}", flush=True)

    def _ends_elsewhere(self) -> Iterator[RankEnd]:
        """Ends that others reported since; files are looked for twice a second."""
        if not self._part.judges or time.monotonic() < self._listened_s + LISTEN_S:
            return
        self._listened_s = time.monotonic()
        for rank in self._part.elsewhere:
            if rank not in self._known and (end := self._part.reported_end(rank)) is not None:
                yield end
        if self._part.halted_machines():
            self._until_s = time.monotonic()  # of the ranks there nothing more will be heard


def _time_left_after(end: RankEnd) -> float:
    if end.exit_code not in EXIT_OK:
        return AFTER_FAULT_S if is_own_fault(end) else AFTER_LOSS_S
    return AFTER_FIRST_S if end.rank == 0 else float("inf")
