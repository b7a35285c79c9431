"""An attempt is asked to stop, and its end has a meaning."""

import json
import resource
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db.models.functions import Now
from pytest_django import Settings

from tests.worker.claims import claim_new_job
from webapp.attempts import records
from webapp.attempts.claiming import claim_job
from webapp.attempts.reconciling import expire_leases
from webapp.jobs.models import Attempt, Job, Sample
from worker.attempt import EXIT_DRAINED, AttemptPlace, _AttemptRun, judge_end, run_attempt
from worker.config import WorkerConfig
from worker.gpu import GpuMeter
from worker.run.child import DeviceLock, StopOrder
from worker.run.watch.lifeline import boot_s


class RecordingChild:
    """Writes down what is done to it."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def ask_to_stop(self) -> None:
        self.done.append("term")

    def kill_group(self) -> None:
        self.done.append("kill")

    def has_stood_still(self) -> bool:
        return False


def act(order: StopOrder, child: RecordingChild, asked: str = "", *, is_fenced_out: bool = False) -> list[str]:
    order.act(child, asked, is_fenced_out=is_fenced_out)
    return child.done


@pytest.mark.parametrize("asked", ["save", "pause", "drain"])
def test_a_request_to_stop_asks_once_and_gives_time_to_save(asked: str) -> None:
    order, child = StopOrder(grace_s=60), RecordingChild()
    for _ in range(3):
        act(order, child, asked)
    assert child.done == ["term"]
    assert order.is_asked


def test_one_that_does_not_stop_in_time_is_killed() -> None:
    order, child = StopOrder(grace_s=-1), RecordingChild()
    assert act(order, child, "pause") == ["term"]
    assert act(order, child, "pause") == ["term", "kill"]


def test_a_request_taken_back_does_not_take_back_the_stop() -> None:
    order, child = StopOrder(grace_s=-1), RecordingChild()
    act(order, child, "pause")
    assert act(order, child, "") == ["term", "kill"]


def test_discard_kills_at_once_also_after_save_was_asked() -> None:
    order, child = StopOrder(grace_s=60), RecordingChild()
    act(order, child, "save")
    assert act(order, child, "discard") == ["term", "kill"]


def test_an_attempt_that_is_fenced_out_is_killed_at_once() -> None:
    assert act(StopOrder(grace_s=60), RecordingChild(), is_fenced_out=True) == ["kill"]


def test_without_a_request_nothing_is_done() -> None:
    order, child = StopOrder(grace_s=-1), RecordingChild()
    assert act(order, child) == []
    assert not order.is_asked


def test_the_result_that_was_left_counts_whatever_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps({"outcome": "succeeded"}))
    assert judge_end(tmp_path, exit_code=-signal.SIGKILL, was_asked_to_stop=False) == {"outcome": "succeeded"}


def test_a_process_killed_from_outside_leaves_no_verdict(tmp_path: Path) -> None:
    assert judge_end(tmp_path, exit_code=-signal.SIGKILL, was_asked_to_stop=False) is None


@pytest.mark.parametrize("exit_code", [EXIT_DRAINED, -signal.SIGTERM, -signal.SIGKILL])
def test_one_that_was_asked_to_stop_is_drained_and_does_not_count_as_failed(tmp_path: Path, exit_code: int) -> None:
    assert judge_end(tmp_path, exit_code=exit_code, was_asked_to_stop=True)["outcome"] == "drained"


def test_a_process_that_crashed_of_itself_while_stopping_is_not_drained(tmp_path: Path) -> None:
    assert judge_end(tmp_path, exit_code=-signal.SIGSEGV, was_asked_to_stop=True) is None


def test_a_process_that_ends_without_a_word_is_a_fault_of_the_program(tmp_path: Path) -> None:
    result = judge_end(tmp_path, exit_code=1, was_asked_to_stop=False)
    assert (result["outcome"], result["reason"]) == ("failed", "internal")
    assert result["message"] == "The job's process ended with exit code 1 without a result; its log says more."


def test_a_process_that_stopped_itself_because_its_worker_was_halted_is_drained(tmp_path: Path) -> None:
    end = judge_end(tmp_path, exit_code=-signal.SIGKILL, was_asked_to_stop=False, was_silent=True)
    assert end["outcome"] == "drained"
    assert judge_end(tmp_path, exit_code=-signal.SIGSEGV, was_asked_to_stop=False, was_silent=True) is None
def test_one_that_the_hosts_killer_ended_ran_out_of_host_memory_with_the_last_sizes(tmp_path: Path) -> None:
    steps = [{"kind": "step", "step": step, "device_bytes": {"weights": 100 * step}, "host_bytes": 7} for step in (1, 2)]
    (tmp_path / "samples.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in steps) + '{"kind": "st')
    result = judge_end(tmp_path, exit_code=-signal.SIGKILL, was_asked_to_stop=False, killed_in="the machine")
    assert (result["outcome"], result["reason"], result["step"]) == ("failed", "out_of_host_memory", 2)
    assert result["message"] == (
        "The host ran out of memory and ended the job's process after step 2; the kernel counted it in the machine"
    )
    fields = result["error"]["fields"]
    assert (fields["cause"], fields["tier"], fields["bytes_by_category"]) == ("host_killed", "host", {"weights": 200})


def test_a_kill_that_the_kernel_counted_says_nothing_of_another_signal(tmp_path: Path) -> None:
    assert judge_end(tmp_path, exit_code=-signal.SIGSEGV, was_asked_to_stop=False, killed_in="the machine") is None


@pytest.fixture
def lost_attempt(db: None, tmp_path: Path, settings: Settings) -> Attempt:
    """An attempt whose worker fell silent; another may be claimed."""
    settings.REDIS_URL = f"unix://{tmp_path}/none.sock"
    settings.HEADROOM_HOME = tmp_path
    attempt = claim_new_job()
    records.record_started(attempt, pid=1)
    Job.objects.filter(pk=attempt.job_id).update(lease_until=Now() - timedelta(seconds=1))
    assert expire_leases() == [attempt.job_id]
    Job.objects.filter(pk=attempt.job_id).update(not_before=None)
    return attempt


def make_run(attempt: Attempt, home: Path, *, asked_s: float) -> _AttemptRun:
    lock = DeviceLock(home / "lock")
    assert lock.acquire()
    return _AttemptRun(
        attempt,
        config=WorkerConfig(home=home, host="box", process_id=1),
        place=AttemptPlace(devices=["cpu"], cards=None, lock=lock, gpu=GpuMeter(0)),
        asked_s=asked_s,
        draining=threading.Event(),
    )


def test_an_attempt_whose_worker_was_halted_since_the_claim_ends_before_its_first_step(
    lost_attempt: Attempt, tmp_path: Path
) -> None:
    attempt = claim_job(worker="w:2", machine=lost_attempt.machine, lease_s=30)
    run = make_run(attempt, tmp_path, asked_s=boot_s() - 40)  # it may be another's by now, and no renewal has said so
    run.run()
    text = (tmp_path / "jobs" / attempt.job_id / "attempts" / str(attempt.number) / "log.txt").read_text()
    assert "this process ends" in text
    attempt.refresh_from_db()
    assert attempt.outcome == "drained"


def test_a_supervisor_that_can_open_no_file_leaves_the_job_in_the_queue_and_names_the_machine(
    lost_attempt: Attempt, tmp_path: Path
) -> None:
    attempt = claim_job(worker="w:2", machine=lost_attempt.machine, lease_s=60)
    lock = DeviceLock(tmp_path / "lock")
    assert lock.acquire()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        outcome = run_attempt(
            attempt,
            config=WorkerConfig(home=tmp_path, host="box", process_id=1),
            place=AttemptPlace(devices=["cpu"], cards=None, lock=lock, gpu=GpuMeter(0)),
            asked_s=boot_s(),
            draining=threading.Event(),
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert outcome == "machine_fault"
    job = Job.objects.get(pk=attempt.job_id)
    assert (job.state, job.reason, job.failed_attempts) == ("queued", "machine_fault", 0)
    assert job.message == (
        "a fault of box and not of the job: it starts no process or opens no file (Too many open files); look at the limits of "
        "processes and open files, the memory and the folder HEADROOM_HOME there"
    )


def test_what_a_lost_attempt_measured_up_to_the_checkpoint_that_is_resumed_is_kept(
    lost_attempt: Attempt, tmp_path: Path
) -> None:
    """Its process, halted past its lease, may have gone on a little after the next attempt had looked for samples."""
    attempt = claim_job(worker="w:2", machine=lost_attempt.machine, lease_s=60)
    run = make_run(attempt, tmp_path, asked_s=boot_s())
    samples = tmp_path / "jobs" / attempt.job_id / "attempts" / "1" / "samples.jsonl"
    samples.parent.mkdir(parents=True)
    rows = [{"kind": "step", "attempt": 1, "step": step, "time_s": time.time(), "loss": 1.0} for step in (1, 2)]
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run._hear({"type": "started", "resumed_from_step": 2}, pid=7)
    run._write_to_database()
    assert sorted(Sample.objects.filter(job=attempt.job_id).values_list("attempt", "step")) == [(1, 1), (1, 2)]
