"""The supervisor's threads in a worker: what a failing disk and a failing machine do to them."""

import errno
import logging
import os
import threading
from pathlib import Path

import pytest

from tests.disks import small_disk
from tests.webapp.conftest import make_bench
from tests.worker.claims import claim_new_job, make_jobs
from tests.worker.processes import wait_for
from webapp.catalog.actions import heartbeat_machine
from webapp.jobs.models import Job
from webapp.jobs.queue import why_it_waits
from worker.alive import alive_file
from worker.config import WorkerConfig
from worker.machine import device_meters
from worker.run.child import DeviceLock
from worker.run.watch.faults import MAX_JOBS
from worker.run.watch.worker_lock import WorkerLock
from worker.supervisor import Slot, Supervisor


@pytest.mark.django_db(transaction=True)
def test_a_worker_shows_that_it_is_alive_again_once_its_disk_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        config = WorkerConfig(home=disk.folder, host="bench", process_id=1, lease_s=1, poll_s=0.05)
        supervisor = Supervisor(config)
        supervisor._machine = make_bench()
        disk.break_down()
        thread = threading.Thread(target=supervisor._keep_machine)
        with caplog.at_level(logging.WARNING):
            thread.start()
            try:
                wait_for(lambda: "will try again" in caplog.text or "could not be measured" in caplog.text, what="its word")
                disk.mend()
                wait_for(alive_file(disk.folder, worker="bench").exists, what="the file that it touches")
            finally:
                supervisor.drain()
                thread.join()


@pytest.mark.django_db(transaction=True)
def test_a_machine_that_starts_no_process_leaves_most_of_the_queue_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = Supervisor(WorkerConfig(home=tmp_path, host="bench", process_id=1))
    machine = supervisor._machine = make_bench()
    supervisor._cards = device_meters(machine)
    make_jobs(MAX_JOBS + 3)

    def refuse(*arguments: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("worker.run.child.subprocess.Popen", refuse)  # no limit of processes binds root
    lock = DeviceLock(tmp_path / "lock")
    num_run = 0
    while supervisor._run_next(Slot(name="0"), lock=lock, meters=supervisor._cards):
        num_run += 1
    assert num_run == MAX_JOBS
    assert not Job.objects.exclude(state="queued").exists()
    assert Job.objects.filter(reason="machine_fault", not_before__isnull=False).count() == MAX_JOBS
    assert f"{MAX_JOBS} jobs met a fault of the machine on device 0, and none ended well since" in caplog.text
    heartbeat_machine(machine, used_bytes=supervisor._used_bytes())
    assert "The devices of bench take no job at present" in why_it_waits(Job.objects.filter(not_before__isnull=True).first())


@pytest.mark.django_db(transaction=True)
def test_a_worker_gives_back_what_the_one_held_in_whose_place_it_was_started(tmp_path: Path) -> None:
    attempt = claim_new_job()
    before = WorkerLock(tmp_path, worker=attempt.worker)
    before.begin()
    supervisor = Supervisor(WorkerConfig(home=tmp_path, host="w", process_id=2))
    supervisor._machine = attempt.machine
    supervisor._register_or_touch()
    assert Job.objects.get().state == "starting"
    os.close(before.fds[0])  # as the kernel does for one that was killed
    supervisor._register_or_touch()
    job = Job.objects.get()
    assert (job.state, job.message) == ("queued", "the worker was lost: its process died, and another one was started")
    assert job.failed_attempts == 0
