"""The process group of one attempt."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optimizer.base.threads import WAIT_POLICY
from tests.worker.processes import is_alive, wait_for
from worker.run.child import ALLOWED_VARIABLES, Child, DeviceLock, child_environment, isolated_command
from worker.run.pipe import PipeReader

ROOT = Path(__file__).resolve().parents[3]

REPORTER = """
import json, os, subprocess, sys
from worker.run.watch.lifeline import die_with_supervisor
die_with_supervisor(int(os.environ["HEADROOM_LIFELINE_FD"]))
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
facts = {"pid": os.getpid(), "grandchild": grandchild.pid, "pgid": os.getpgrp(), "cwd": os.getcwd(),
         "environment": dict(os.environ), "fds": sorted(map(int, os.listdir("/proc/self/fd")))}
os.write(int(os.environ["HEADROOM_PIPE_FD"]), json.dumps(facts).encode() + b"\\n")
import time; time.sleep(300)
"""


def command(source: str) -> list[str]:
    """A program text in place of the runner, with the packages importable as for the runner."""
    program = f"import sys; sys.path.append({str(ROOT)!r}); exec({source!r})"
    return [sys.executable, "-I", "-u", "-c", program]


@pytest.fixture
def reporter(tmp_path: Path) -> Iterator[Child]:
    child = Child(command(REPORTER), folder=tmp_path)
    yield child
    child.close()


def read_facts(child: Child) -> dict[str, Any]:
    reader = PipeReader(child.pipe_fd)
    return wait_for(lambda: reader.read(timeout_s=1), what="the child's report")[0]


def test_the_environment_is_an_allow_list(tmp_path: Path) -> None:
    secrets = {
        "DATABASE_URL": "x",
        "REDIS_URL": "x",
        "HEADROOM_SECRET_KEY": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "PYTHONPATH": "x",
    }
    environment = child_environment({"PATH": "/bin", "LANG": "C", **secrets}, folder=tmp_path)
    assert not secrets.keys() & environment.keys()
    assert environment["PATH"] == "/bin"
    assert environment["HOME"] == str(tmp_path)
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_cards_are_counted_as_the_vendors_library_counts_them_unless_set_otherwise(tmp_path: Path) -> None:
    assert child_environment({}, folder=tmp_path)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    told = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert child_environment(told, folder=tmp_path)["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_a_jobs_threads_sleep_while_they_wait_unless_set_otherwise(tmp_path: Path) -> None:
    assert WAIT_POLICY.items() <= child_environment({}, folder=tmp_path).items()
    told = child_environment({"OMP_WAIT_POLICY": "active"}, folder=tmp_path)
    assert told["OMP_WAIT_POLICY"] == "active"
    assert "GOMP_SPINCOUNT" not in told


def test_a_job_inherits_the_environments_heap_settings(tmp_path: Path) -> None:
    told = {"MALLOC_TRIM_THRESHOLD_": "131072"}
    assert told.items() <= child_environment(told, folder=tmp_path).items()


def test_a_job_inherits_the_settings_of_nccl(tmp_path: Path) -> None:
    told = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5_0"}
    assert told.items() <= child_environment(told, folder=tmp_path).items()


def test_the_child_sees_only_allowed_variables_and_its_own_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://secret")
    monkeypatch.setenv("HEADROOM_SECRET_KEY", "secret")
    child = Child(command(REPORTER), folder=tmp_path)
    try:
        facts = read_facts(child)
    finally:
        child.close()
    known = {*ALLOWED_VARIABLES, "HOME", "HEADROOM_PIPE_FD", "HEADROOM_LIFELINE_FD"}
    given = {name for name in facts["environment"] if not name.startswith(("HF_", "TRANSFORMERS_"))}
    assert given <= known
    assert facts["cwd"] == str(tmp_path)


def test_the_child_leads_its_own_group_and_inherits_no_other_file(reporter: Child, tmp_path: Path) -> None:
    facts = read_facts(reporter)
    assert facts["pid"] == facts["pgid"] == reporter.pid
    passed = {int(facts["environment"][name]) for name in ("HEADROOM_PIPE_FD", "HEADROOM_LIFELINE_FD")}
    listing = 1  # the listing of open files is itself one
    assert len(set(facts["fds"]) - passed - {0, 1, 2}) == listing


def test_killing_the_group_ends_grandchildren_too(reporter: Child) -> None:
    facts = read_facts(reporter)
    reporter.kill_group()
    assert reporter.reap() == -signal.SIGKILL
    wait_for(lambda: not is_alive(facts["grandchild"]), what="the grandchild's end")


def test_what_the_leader_leaves_behind_is_killed_when_it_is_reaped(tmp_path: Path) -> None:
    child = Child(command(REPORTER.replace("time.sleep(300)\n", "sys.exit(3)\n", 1)), folder=tmp_path)
    try:
        grandchild = read_facts(child)["grandchild"]
        wait_for(child.has_ended, what="the leader's end")
        assert child.reap() == 3
        wait_for(lambda: not is_alive(grandchild), what="the grandchild's end")
    finally:
        child.close()


def test_child_and_grandchild_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    supervisor_source = textwrap.dedent("""
        import sys, threading, time
        from pathlib import Path
        from worker.run.child import Child
        def slot():
            child = Child(sys.argv[2:], folder=Path(sys.argv[1]))
            import select, os
            select.select([child.pipe_fd], [], [])
            print(os.read(child.pipe_fd, 65536).decode(), end="", flush=True)
            time.sleep(300)
        threading.Thread(target=slot).start()
    """)
    supervisor = subprocess.Popen(
        [*command(supervisor_source), str(tmp_path), *command(REPORTER)], stdout=subprocess.PIPE, text=True
    )
    with supervisor:
        facts = json.loads(supervisor.stdout.readline())
        assert is_alive(facts["pid"])
        assert is_alive(facts["grandchild"])
        supervisor.kill()
    wait_for(lambda: not is_alive(facts["pid"]), what="the child's end")
    wait_for(lambda: not is_alive(facts["grandchild"]), what="the grandchild's end")


def test_a_child_whose_supervisor_is_gone_before_it_looks_ends_at_once() -> None:
    source = "import os, sys; from worker.run.watch.lifeline import die_with_supervisor; die_with_supervisor(int(sys.argv[1]))"
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    ended = subprocess.run(
        [*command(source), str(read_fd)], pass_fds=[read_fd], start_new_session=True, capture_output=True
    )
    os.close(read_fd)
    assert ended.returncode == 1
    assert b"the supervisor ended before" in ended.stderr


def test_the_device_lock_is_held_until_the_child_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "run" / "device-0.lock"
    lock = DeviceLock(path)
    assert lock.acquire()
    child = Child(command(REPORTER), folder=tmp_path, lock=lock)
    try:
        lock.release()
        assert not DeviceLock(path).acquire(), (
            "a second attempt must not get the device while the first one's process lives"
        )
        child.kill_group()
        child.reap()
        assert DeviceLock(path).acquire()
    finally:
        child.close()


def test_the_lock_is_free_again_when_no_child_was_started(tmp_path: Path) -> None:
    lock = DeviceLock(tmp_path / "device-0.lock")
    assert lock.acquire()
    lock.release()
    with (tmp_path / "device-0.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_of_several_devices_all_are_locked_or_none(tmp_path: Path) -> None:
    paths = [tmp_path / f"device-{index}.lock" for index in range(3)]
    held, lock, first = DeviceLock(*paths[1:]), DeviceLock(*paths[:2]), DeviceLock(paths[0])
    assert held.acquire()
    assert not lock.acquire()
    assert first.acquire()
    first.release()
    held.release()
    assert lock.acquire()
    child = Child(command(REPORTER), folder=tmp_path, lock=lock)
    try:
        lock.release()
        assert [DeviceLock(path).acquire() for path in paths] == [False, False, True]
    finally:
        child.close()


def test_output_of_the_child_goes_to_the_log(tmp_path: Path) -> None:
    child = Child(command("print('hello'); import sys; sys.exit('goodbye')"), folder=tmp_path)
    try:
        wait_for(child.has_ended, what="the child's end")
        assert child.reap() == 1
    finally:
        child.close()
    assert (tmp_path / "log.txt").read_text() == "hello\ngoodbye\n"


def test_a_module_is_found_without_help_from_the_working_directory(tmp_path: Path) -> None:
    ended = subprocess.run(isolated_command("worker.run.runner"), cwd=tmp_path, env={}, capture_output=True, text=True)
    assert "usage" in ended.stderr.lower()
    assert ended.returncode == 2


def test_a_process_that_is_given_cards_sees_those_alone(tmp_path: Path) -> None:
    child = Child(command(REPORTER), folder=tmp_path, cards="3,5")
    try:
        assert read_facts(child)["environment"]["CUDA_VISIBLE_DEVICES"] == "3,5"
    finally:
        child.close()
