"""Strikes a job over two machines: processes killed or halted, the link cut, each undone once it was noticed.

A strike is a name of who is struck and how, ``kill a rank of office``. Ranks find each other by a file, so there is no process of
a rendezvous; whoever leads a machine's ranks takes its place here.
"""

import os
import signal
from dataclasses import dataclass, field
from itertools import product
from typing import Final, Literal

from benchmarks.parallel.links.namespaces import Namespaces
from optimizer.base.errors import HeadroomError
from tests.end_to_end.devices.test_two_machines import MACHINES, JoinedJobs

Who = Literal["rank", "leader", "worker"]
How = Literal["kill", "halt", "cut"]


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A kind of fault. Where the link is cut, ``machine`` is the one that can then reach nobody."""

    how: How
    machine: str
    who: Who | None = None

    @property
    def words(self) -> str:
        return f"cut the link of {self.machine}" if self.who is None else f"{self.how} the {self.who} of {self.machine}"


_WHO: Final[tuple[Who, ...]] = ("rank", "leader", "worker")
_HOW: Final[tuple[How, ...]] = ("kill", "halt")
ALL: Final = (
    *(Strike(how=how, who=who, machine=machine) for who, how, machine in product(_WHO, _HOW, MACHINES)),
    Strike(how="cut", machine=MACHINES[1]),
)


@dataclass(kw_only=True)
class Struck:
    """A strike that was carried out, until it is undone."""

    jobs: JoinedJobs
    spaces: Namespaces
    strike: Strike
    runners: list[int]
    """Processes of the struck machine's part, the one that leads them first."""
    halted: int | None = field(default=None, init=False)

    def begin(self) -> None:
        """Raises HeadroomError where there is nothing to strike any more."""
        strike, stack = self.strike, self.jobs.stack
        if strike.who is None:
            self.spaces.cut(MACHINES.index(strike.machine))
        elif strike.who == "worker":
            stack.kill(strike.machine) if strike.how == "kill" else stack.halt(strike.machine)
        else:
            pid = self.runners[strike.who == "rank"]
            try:
                os.kill(pid, signal.SIGKILL if strike.how == "kill" else signal.SIGSTOP)
            except ProcessLookupError:
                raise HeadroomError(f"the {strike.who} of {strike.machine} had ended") from None
            self.halted = pid if strike.how == "halt" else None

    def end(self) -> None:
        """Undo it: start again, wake, mend. Of no effect on a process that is gone."""
        strike, stack = self.strike, self.jobs.stack
        if strike.who is None:
            self.spaces.mend(MACHINES.index(strike.machine))
        elif strike.who == "worker" and strike.how == "halt":
            stack.wake(strike.machine)
        elif self.halted is not None:
            try:
                os.kill(self.halted, signal.SIGCONT)
            except ProcessLookupError:
                return
