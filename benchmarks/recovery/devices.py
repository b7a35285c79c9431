"""Jobs over two machines that lose something in mid-step or in mid-checkpoint, round after round, on the real service.

Two workers in network namespaces of their own play the machines; each has one rank of a job, which the CPU computes. Leases,
polls and retries are the service's defaults. A round strikes once, and waits until the job was given back, its processes are
gone, and an attempt after it has done a step; dead workers are started again at once, as a service manager would. In the end the
weights must be those of a run that nobody disturbed. The database is PostgreSQL: on SQLite a worker that is halted within a
write keeps out all others. *Not here*: more devices than two, NCCL, and resuming in another layout.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.common.record import GoalEntry, Row, at_most, failure, goal, none_of
from benchmarks.parallel.links.namespaces import INTERFACE, LinkProfile, Namespaces, joined_namespaces
from benchmarks.recovery import strikes
from benchmarks.recovery.strikes import Strike, Struck
from optimizer.base.errors import HeadroomError
from tests.end_to_end.devices.test_two_machines import MACHINES, PLAN_OVER_TWO, JoinedJobs
from tests.end_to_end.site.stack import running_stack
from tests.end_to_end.test_survival import CHECKPOINT_EVERY, ROOMY_BYTES, WORKLOAD
from tests.postgresql import running_postgresql
from tests.webapp.conftest import MACHINE_DOCUMENT
from tests.worker.processes import is_alive

ROUNDS: Final = 50
RESTART_GOAL_S: Final = 45.0
ORPHAN_GOAL_S: Final = 10.0
NOTICED_WITHIN_S: Final = 90.0
"""A strike that nobody noticed for so long is undone, and counts as one that was not noticed."""
NUM_STEPS: Final = 200
_LINK: Final = LinkProfile(name="bridge")
DEFAULTS: Final = {
    "HEADROOM_LEASE_S": "30",
    "HEADROOM_POLL_S": "5",
    "HEADROOM_RECONCILE_S": "5",
    "HEADROOM_RETRY_BASE_S": "10",
}
"""Instead of the short times of the stack for tests."""
_LONGEST_S: Final = 420.0
_POLL_S: Final = 0.05


def lose_parts(*, rounds: int, seed: int, limit_s: float = float("inf")) -> Iterator[Row]:
    """One row for each round; every kind of strike in turn, in mid-step and then in mid-checkpoint, in an order of chance.

    limit_s: begin no round after so many seconds.
    """
    chance, start_s = random.Random(seed), time.monotonic()
    with ExitStack() as stack:
        spaces = stack.enter_context(joined_namespaces(len(MACHINES), _LINK))
        url = stack.enter_context(running_postgresql())
        service = stack.enter_context(running_stack(database_url=url, machine=MACHINE_DOCUMENT, has_worker=False, **DEFAULTS))
        jobs = _Jobs(service, spaces)
        for machine in MACHINES:
            jobs.start_worker_of(machine)
        _wait(lambda: service.ask("num_machines") == len(MACHINES), "both machines")
        whole, began_s = jobs.start_joined(), time.monotonic()
        undisturbed = jobs.end_of(whole)
        yield {"what": "undisturbed", "job_s": round(time.monotonic() - began_s, 1)}
        for number, (strike, moment) in enumerate(_list_rounds(rounds, chance)):
            if time.monotonic() - start_s > limit_s:
                return
            try:
                yield {"what": "devices", "round": number, **_strike(jobs, strike, moment, chance, undisturbed)}
            except Exception as error:
                yield failure(f"round {number}: {strike.words}", error)
                jobs.start_over()


def _list_rounds(rounds: int, chance: random.Random) -> list[tuple[Strike, str]]:
    found: list[tuple[Strike, str]] = []
    while len(found) < rounds:
        both = [(strike, moment) for strike in strikes.ALL for moment in ("step", "checkpoint")]
        chance.shuffle(both)
        found += both
    return found[:rounds]


class _Jobs(JoinedJobs):
    """Jobs whose workers are in networks of their own."""

    def __init__(self, stack: Any, spaces: Namespaces) -> None:
        super().__init__(stack)
        self.spaces = spaces
        self._started: list[str] = []

    def start_worker_of(self, machine: str) -> None:
        prefix = self.spaces.prefix(MACHINES.index(machine))
        own = {"HEADROOM_WORKER_NAME": machine, "HEADROOM_RANK_INTERFACE": INTERFACE}
        self.stack.start_worker(machine, prefix=prefix, **own)

    def start_joined(self) -> str:
        job: str = self.stack.ask(
            "create_job",
            model=self.model,
            dataset=self.dataset,
            workload={**WORKLOAD, "num_steps": NUM_STEPS, "sample_tokens": 0},
            plan=PLAN_OVER_TWO,
            machines=MACHINES,
            budget_bytes=ROOMY_BYTES,
            kind="train",
        )
        self._started.append(job)
        return job

    def end_of(self, job: str) -> Row:
        """The weights it ended with. Raises HeadroomError where it did not succeed."""
        _wait(lambda: self.show(job)["is_terminal"], f"the end of {job}")
        row = self.show(job)
        if row["state"] != "succeeded":
            raise HeadroomError(f"{job} {row['state']}: {row['message']}")
        return {"weights_sha256": row["summary"]["weights_sha256"], "steps": self.steps(job)}

    def num_steps_of(self, job: str, *, after_attempt: int) -> int:
        """Steps that attempts after this one have reported."""
        return sum(row["attempt"] > after_attempt for row in self.stack.ask("samples", job=job, kind="step"))

    def has_moved_on(self, job: str, attempt: int) -> bool:
        """Report whether the job is no longer this attempt's."""
        row = self.show(job)
        return bool(row["attempt"] != attempt or row["state"] == "queued" or row["is_terminal"])

    def checkpoints_folder(self, job: str) -> Path:
        return self.stack.home / "jobs" / job / "checkpoints"

    def start_over(self) -> None:
        """After a round that broke down: cancel its job, and have two workers that are awake."""
        for job in self._started[-1:]:
            if not self.show(job)["is_terminal"]:
                self.stack.ask("cancel", job=job, mode="discard")
        for machine in MACHINES:
            self.stack.kill(machine)
            self.start_worker_of(machine)


def _strike(jobs: _Jobs, strike: Strike, moment: str, chance: random.Random, undisturbed: Row) -> Row:
    job = jobs.start_joined()
    found = jobs.wait_until_at_work(job, step=CHECKPOINT_EVERY)
    runners = {pid: _started_at(pid) for machine in MACHINES for pid in found[machine]}
    struck = Struck(jobs=jobs, spaces=jobs.spaces, strike=strike, runners=found[strike.machine])
    first = jobs.attempts(job)[-1]["number"]
    _wait_for_moment(jobs, job, moment, chance)
    struck.begin()
    struck_s = time.monotonic()
    if (strike.who, strike.how) == ("worker", "kill"):
        jobs.start_worker_of(strike.machine)
    is_over = _comes(lambda: jobs.has_moved_on(job, first), NOTICED_WITHIN_S)
    is_noticed = is_over and not jobs.show(job)["is_terminal"]
    noticed_s = time.monotonic()
    left = _comes(lambda: not _alive(runners), ORPHAN_GOAL_S) if is_noticed else True
    gone_s = time.monotonic() - noticed_s
    orphans = len(_alive(runners)) if not left else 0
    struck.end()
    restart_s = None
    if is_noticed:
        _wait(lambda: jobs.num_steps_of(job, after_attempt=first) > 0, "a step of the next attempt")
        restart_s = time.monotonic() - struck_s
    ended = jobs.end_of(job)
    return {
        "strike": strike.words,
        "ended_first": is_over and not is_noticed,
        "moment": moment,
        "noticed_s": round(noticed_s - struck_s, 2) if is_noticed else None,
        "gone_s": round(gone_s, 2) if is_noticed else None,
        "restart_s": None if restart_s is None else round(restart_s, 2),
        "orphans": orphans,
        "same_bits": ended["weights_sha256"] == undisturbed["weights_sha256"],
        "all_steps": ended["steps"] == undisturbed["steps"],
        "attempts": [attempt["outcome"] for attempt in jobs.attempts(job)],
    }


def _wait_for_moment(jobs: _Jobs, job: str, moment: str, chance: random.Random) -> None:
    """Any moment of some steps, or until files of a checkpoint are there that is not complete."""
    if moment == "step":
        time.sleep(chance.uniform(0, 0.5))
        return
    folder = jobs.checkpoints_folder(job)
    until_s = time.monotonic() + 10
    while not any(folder.glob(".tmp-*")) and time.monotonic() < until_s:
        time.sleep(0.0005)


def _alive(runners: dict[int, str]) -> list[int]:
    """Those that are still the same processes."""
    return [pid for pid, started in runners.items() if is_alive(pid) and _started_at(pid) == started]


def _started_at(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""


def _comes(condition: Callable[[], bool], limit_s: float) -> bool:
    until_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(_POLL_S)
    return True


def _wait(condition: Callable[[], bool], what: str) -> None:
    if not _comes(condition, _LONGEST_S):
        raise HeadroomError(f"waited {_LONGEST_S:.0f} s for {what}")


def summarize(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    """Goals of all rounds but those whose job ended before anything could be noticed, and what each strike came to."""
    found = [row for row in rows if row["what"] == "devices" and not row["ended_first"]]
    failed = [row for row in rows if row["what"] == "failed"]
    restarts = sorted(row["restart_s"] for row in found if row["restart_s"] is not None)
    unnoticed = [f"{row['strike']} in mid-{row['moment']}" for row in found if row["noticed_s"] is None]
    by_strike = defaultdict(list)
    for row in found:
        by_strike[row["strike"]].append(row["restart_s"])
    p99 = restarts[min(len(restarts) - 1, round(0.99 * (len(restarts) - 1)))] if restarts else None
    return {
        "rounds of lost parts": goal(len(found), f">= {ROUNDS}", met=len(found) >= ROUNDS, needs="all cases"),
        "rounds that broke down": none_of(len(failed), rows),
        "rounds that ended with other bits or steps": none_of(
            sum(not (row["same_bits"] and row["all_steps"]) for row in found), found
        ),
        "processes left 10 s after the job was given back": none_of(sum(row["orphans"] for row in found), found),
        "strikes that nobody noticed": goal(unnoticed if found else None, "none", met=not unnoticed),
        "strike to a step of the next attempt, p99 (s)": at_most(p99, RESTART_GOAL_S),
        "seconds by strike": goal(dict(sorted(by_strike.items())), "none: reported", met=True),
    }
