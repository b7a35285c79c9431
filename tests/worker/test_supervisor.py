"""The supervisor's threads in a worker: what a failing disk does to them."""

import logging
import threading
from pathlib import Path

import pytest

from tests.disks import small_disk
from tests.webapp.conftest import make_bench
from tests.worker.processes import wait_for
from worker.alive import alive_file
from worker.config import WorkerConfig
from worker.supervisor import Supervisor


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
