"""The supervisor of the embedded stack on a disk that is full, or broken: it stays, and so do its services."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.disks import MIB, SmallDisk, small_disk
from tests.worker.processes import is_alive, wait_for
from worker.stack.home import Stack, prepare_home
from worker.stack.services import RunningService
from worker.stack.supervisor import valkey_service

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("valkey", "web", "reconciler", "worker")
SUPERVISOR = f"""
import sys
from pathlib import Path
from worker.stack import supervisor
from worker.stack.home import Stack
from worker.stack.services import Service
code = "import logging, time; logging.warning('x' * 4096); time.sleep(600)"
supervisor.services_of = lambda stack: [
    Service(name=name, command=[sys.executable, "-c", code], stop_s=5) for name in {NAMES}
]
supervisor.supervise(Stack(home=Path(sys.argv[1]), port=8400), with_parent=False)
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as made:
        yield made


@pytest.fixture
def place(disk: SmallDisk, monkeypatch: pytest.MonkeyPatch) -> Stack:
    monkeypatch.setattr("worker.stack.home.LEAST_FREE_BYTES", MIB)
    made = Stack(home=disk.folder, port=8400)
    prepare_home(made)
    return made


@pytest.fixture
def supervisor(place: Stack) -> Iterator["subprocess.Popen[bytes]"]:
    """The real supervisor over stand-ins for the four services, each of which logs when it starts."""
    with (place.log_folder / "stack.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, str(place.home)], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
    wait_for(lambda: set(services_of(place)) == set(NAMES) and all(services_of(place).values()), what="four services")
    yield process
    process.terminate()
    process.wait(timeout=60)


def services_of(place: Stack) -> dict[str, int]:
    return {row["name"]: row["pid"] for row in place.read_state().get("services", [])}


def children_of(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if is_alive(int(child))}


def kill_and_wait(supervisor: "subprocess.Popen[bytes]", pid: int) -> None:
    """Until there are as many services as before, and this process is none of them."""
    os.kill(pid, signal.SIGKILL)

    def is_replaced() -> bool:
        assert supervisor.poll() is None, "the supervisor has ended"
        now = children_of(supervisor.pid)
        return len(now) == len(NAMES) and pid not in now

    wait_for(is_replaced, what="another process in its place")


@pytest.mark.parametrize("name", NAMES)
def test_on_a_full_disk_a_service_that_dies_is_started_again_and_the_state_is_written_once_there_is_room(
    place: Stack, disk: SmallDisk, supervisor: "subprocess.Popen[bytes]", name: str
) -> None:
    before = services_of(place)
    disk.fill()
    kill_and_wait(supervisor, before[name])
    assert set(before.values()) - {before[name]} < children_of(supervisor.pid)
    assert services_of(place) == before  # there was no room for another state
    disk.make_room()
    wait_for(lambda: set(services_of(place).values()) == children_of(supervisor.pid), what="the state of what runs")


def test_what_runs_is_in_the_log_again_once_there_is_room(
    place: Stack, disk: SmallDisk, supervisor: "subprocess.Popen[bytes]"
) -> None:
    disk.fill()
    kill_and_wait(supervisor, services_of(place)["web"])
    disk.make_room()
    stack_log = place.log_folder / "stack.log"
    wait_for(lambda: f"web={services_of(place)['web']}" in stack_log.read_text().splitlines()[-1], what="its line")


def test_a_log_that_cannot_be_opened_keeps_no_service_from_running(
    place: Stack, supervisor: "subprocess.Popen[bytes]"
) -> None:
    log_file = place.log_folder / "web.log"
    log_file.unlink()
    log_file.mkdir()
    kill_and_wait(supervisor, services_of(place)["web"])


def test_a_broken_disk_ends_neither_the_supervisor_nor_a_service(
    place: Stack, disk: SmallDisk, supervisor: "subprocess.Popen[bytes]"
) -> None:
    web = services_of(place)["web"]
    disk.break_down()
    kill_and_wait(supervisor, web)


def test_valkey_begins_anew_where_a_full_disk_left_a_hole_in_its_file(home: Path) -> None:
    place = Stack(home=home, port=8400)
    prepare_home(place)
    running = RunningService(
        service=valkey_service(place), environment=dict(os.environ), folder=home, log_file=home / "valkey.log"
    )
    client = redis.Redis(unix_socket_path=str(place.valkey_socket))
    try:
        _tend_until_answered(running, client)
        for number in range(100):
            client.set(f"key {number}", "x" * 100)
        running.ask_to_stop()
        running.wait_stopped(time.monotonic() + 10)
        file = next((home / "valkey" / "appendonlydir").glob("*.incr.aof"))
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 3] + whole[len(whole) // 2 :])
        _tend_until_answered(running, client)
        assert client.dbsize() == 0
        assert list((home / "valkey" / "broken").glob("*.incr.aof"))
    finally:
        client.close()
        running.ask_to_stop()
        running.wait_stopped(time.monotonic() + 10)


def _tend_until_answered(running: RunningService, client: redis.Redis) -> None:
    def is_answered() -> bool:
        running.tend(time.monotonic())
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False

    wait_for(is_answered, what="Valkey to answer", timeout_s=60)
