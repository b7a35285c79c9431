"""One machine's part of an attempt, with a real process in the place of its ranks: how it ends, and what is written of it."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError

from tests.webapp.attempts.attempts import DONE, run
from tests.webapp.attempts.claims.test_gangs import make_host
from tests.webapp.conftest import MACHINE_DOCUMENT, make_spec, make_text, make_tiny_model
from tests.worker.processes import is_alive, wait_for
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.reconciling import expire_members
from webapp.attempts.records import renew_lease
from webapp.catalog.models import Machine
from webapp.jobs.actions import create_job
from webapp.jobs.devices.members import take_member
from webapp.jobs.models import Attempt, Job, Member
from worker.config import WorkerConfig
from worker.members import member as module
from worker.members import serving
from worker.members.serving import Members, lock_files
from worker.run.brief import job_folder
from worker.run.child import Child, DeviceLock
from worker.run.ranks.part import Part
from worker.supervisor import Supervisor

SLEEP = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(60)"
Serve = Callable[..., "Served"]


@pytest.fixture
def attempt(transactional_db: None) -> Attempt:
    """The leading part of a job over two machines, whose other part waits to be taken."""
    home, _ = make_host(1, kind="cpu", name="home"), make_host(1, kind="cpu", name="office")
    model, dataset = make_tiny_model(), make_text()
    ranks = [{"device": f"{MACHINE_DOCUMENT['device']['name']}@{name}"} for name in ("home", "office")]
    create_job(
        owner=None,
        spec=make_spec(model, dataset, machines=["home", "office"]),
        model=model,
        dataset=dataset,
        plan={"layout": {"num_devices": 2, "ranks": ranks}},
        prediction=None,
        machine=home,
        actor="user:test",
    )
    return run(home)


class Served:
    """The parts that a worker of the office takes, until ``end``."""

    def __init__(self, home: Path, *, grace_s: float) -> None:
        config = WorkerConfig(home=home, host="office", process_id=7, lease_s=1, grace_s=grace_s)
        self._draining = threading.Event()
        members, office = Members(config, draining=self._draining), Machine.objects.get(name="office")
        self._thread = threading.Thread(
            target=members.serve, args=(lambda: office,), kwargs={"rest": lambda: self._draining.wait(0.05) and None}
        )
        self._thread.start()

    def drain(self) -> None:
        self._draining.set()

    def end(self) -> None:
        self.drain()
        self._thread.join()


@pytest.fixture
def serve(attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Begin to serve with this program in the place of the part's leader."""
    served: list[Served] = []

    def serve(program: str, *, grace_s: float = 60) -> Served:
        monkeypatch.setattr(module, "isolated_command", lambda *_: [sys.executable, "-c", program])
        served.append(Served(tmp_path, grace_s=grace_s))
        return served[-1]

    yield serve
    for each in served:
        each.end()


def part() -> Member:
    return Member.objects.get()


def wait_for_process(home: Path) -> int:
    wait_for(lambda: any(file.read_text() for file in home.glob("jobs/*/attempts/1/members/*/pid")), what="the part's process")
    return int(next(home.glob("jobs/*/attempts/1/members/*/pid")).read_text())


def test_a_part_that_ends_by_itself_is_ended_and_says_no_more(attempt: Attempt, serve: Serve, tmp_path: Path) -> None:
    serve("print(open('attempt.json').read())")
    wait_for(lambda: part().ended_at, what="its end")
    assert (part().worker, part().trouble) == ("office:7", "")
    assert expire_members() == []
    (log,) = tmp_path.glob("jobs/*/attempts/1/members/*/log.txt")
    assert '"devices": [\n  "",\n  "cpu"\n ]' in log.read_text()


def test_its_processes_are_ended_once_the_attempt_is_over(attempt: Attempt, serve: Serve, tmp_path: Path) -> None:
    serve(SLEEP)
    pid = wait_for_process(tmp_path)
    assert finish_attempt(attempt, result=DONE, exit_code=0) == "succeeded"
    wait_for(lambda: part().ended_at, what="its end", timeout_s=10)
    assert not is_alive(pid)
    assert not part().is_lost


def test_one_whose_process_is_killed_gives_the_whole_job_back_with_its_name(
    attempt: Attempt, serve: Serve, tmp_path: Path
) -> None:
    serve("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    wait_for(lambda: part().trouble, what="its trouble")
    assert expire_members() == [attempt.job_id]
    message = "office gave up its part of the job: its process was ended by signal 9"
    assert Job.objects.get().message == message


def test_one_that_ends_because_the_worker_that_leads_is_halted_gives_the_job_back_for_it(
    attempt: Attempt, serve: Serve, tmp_path: Path
) -> None:
    serve(f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(1)); {SLEEP}")
    pid = wait_for_process(tmp_path)
    home = {"devices": ["cpu", ""], "machines": ["home", "office"]}
    Part.read(home, job_folder(tmp_path, attempt.job_id) / "attempts" / "1").report_halt()
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: Job.objects.get().state == "queued", what="the job to be given back")
    assert Job.objects.get().message == "the worker of home was lost: it was halted"
    attempt.refresh_from_db()
    assert (attempt.outcome, attempt.exit_code) == ("worker_lost", None)


def test_a_locked_row_only_delays_that_the_job_is_given_back_for_a_halted_worker(
    attempt: Attempt, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = [OperationalError("canceling statement due to lock timeout")]

    def finish(*args: Any, **options: Any) -> str:
        if locked:
            raise locked.pop()
        return finish_attempt(*args, **options)

    monkeypatch.setattr(module, "finish_attempt", finish)
    home = {"devices": ["cpu", ""], "machines": ["home", "office"]}
    serve("import sys; sys.exit(1)")
    Part.read(home, job_folder(tmp_path, attempt.job_id) / "attempts" / "1").report_halt()
    wait_for(lambda: Job.objects.get().state == "queued", what="the job to be given back")
    assert not locked


def test_one_that_ends_by_an_error_leaves_the_job_to_the_worker_that_leads(
    attempt: Attempt, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HALT_HEARD_S", 0.5)
    serve("import sys; sys.exit(1)")
    wait_for(lambda: part().ended_at, what="its end")
    wait_for(lambda: not any(each.name.startswith("member-") for each in threading.enumerate()), what="the end of its wait")
    assert Job.objects.get().state == "running"


def test_one_that_cannot_begin_says_why(attempt: Attempt, serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("not a folder")
    serve(SLEEP)
    wait_for(lambda: part().trouble, what="its trouble")
    assert part().trouble == "a fault of its worker, whose log says more"


@pytest.mark.parametrize(("own", "left", "begins"), [([1], [0, 1], False), ([0, 1], [1], False), ([1], [0, 2], True)])
def test_one_does_not_begin_on_a_device_on_which_processes_of_an_earlier_part_are_left(
    attempt: Attempt, serve: Serve, tmp_path: Path, own: list[int], left: list[int], *, begins: bool
) -> None:
    member = part()
    earlier = replace_devices(member, left, home=tmp_path)
    assert earlier.acquire()
    leftover = Child([sys.executable, "-c", SLEEP], folder=tmp_path, lock=earlier)
    earlier.release()
    replace_devices(member, own, home=tmp_path)
    try:
        serve("pass")
        wait_for(lambda: part().trouble or part().ended_at, what="its end")
    finally:
        leftover.close()
    assert part().trouble == ("" if begins else "processes of an earlier part are still there")


def replace_devices(member: Member, devices: list[int], *, home: Path) -> DeviceLock:
    """The lock of the part on these."""
    member.devices = devices
    member.save()
    return DeviceLock(*lock_files(member, Machine.objects.get(name="office"), home=home))


def test_a_worker_that_drains_asks_the_leader_to_stop_and_ends_with_it(
    attempt: Attempt, serve: Serve, tmp_path: Path
) -> None:
    served = serve(SLEEP)
    pid = wait_for_process(tmp_path)
    assert not renew_lease(attempt).drains
    served.drain()
    wait_for(lambda: renew_lease(attempt).drains, what="its wish to stop")
    assert is_alive(pid)
    assert finish_attempt(attempt, result={**DONE, "outcome": "drained"}, exit_code=75) == "drained"
    wait_for(lambda: part().ended_at, what="its end", timeout_s=10)
    assert Job.objects.get().message == "the worker of office was asked to stop"


def test_one_whose_leader_does_not_stop_in_time_is_killed(attempt: Attempt, serve: Serve, tmp_path: Path) -> None:
    served = serve(SLEEP, grace_s=0.1)
    pid = wait_for_process(tmp_path)
    served.end()
    assert not is_alive(pid)
    assert part().ended_at


def test_a_part_that_comes_later_is_taken_however_seldom_its_worker_polls(
    attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Member | None] = []

    def look(*arguments: Any, **options: Any) -> Member | None:
        looks.append(take_member(*arguments, **options))
        return looks[-1]

    monkeypatch.setattr(serving, "take_member", look)
    monkeypatch.setattr(module, "isolated_command", lambda *_: [sys.executable, "-c", "pass"])
    Member.objects.update(worker="another")
    supervisor = Supervisor(WorkerConfig(home=tmp_path, host="office", process_id=7, poll_s=600))
    supervisor._machine = Machine.objects.get(name="office")
    supervisor._registered.set()
    thread = threading.Thread(target=supervisor._serve_members)
    thread.start()
    try:
        wait_for(lambda: looks == [None], what="a look in vain")
        Member.objects.update(worker="")
        wait_for(lambda: any(looks), what="the part to be taken")
    finally:
        supervisor.drain()
        thread.join()
