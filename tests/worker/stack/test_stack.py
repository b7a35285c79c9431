"""The embedded stack: what is refused before anything starts, and one real start to finish."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.breadth import WHOLE_STACK
from tests.worker.machines import give_measured_machines
from tests.worker.processes import is_alive, wait_for
from worker.stack import stack
from worker.stack import supervisor as stack_supervisor
from worker.stack.home import LONGEST_SOCKET_PATH, Stack, StackError, check_port, prepare_home, write_private
from worker.stack.stack import find_running, main, read_credentials, tail
from worker.stack.supervisor import services_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def place(home: Path, monkeypatch: pytest.MonkeyPatch, free_port: int) -> Stack:
    monkeypatch.setenv("HEADROOM_PORT", str(free_port))
    for name in ("REDIS_URL", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    return Stack.from_environment()


@pytest.mark.parametrize("port", ["0", "65536", "http", "-1"])
def test_a_port_that_is_none_is_refused_by_name(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADROOM_PORT", port)
    with pytest.raises(StackError, match=f"HEADROOM_PORT is '{port}'; allowed: a number from 1 to 65535"):
        Stack.from_environment()


def test_the_home_is_for_its_user_alone(place: Stack) -> None:
    place.home.chmod(0o755)
    prepare_home(place)
    for folder in (place.home, place.run_folder, place.log_folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_busy_port_is_said_in_one_line(place: Stack) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", place.port))
        other.listen()
        with pytest.raises(StackError, match=f"port {place.port} on 127.0.0.1 is in use") as raised:
            check_port(place)
    assert raised.value.hint == "Set HEADROOM_PORT to a free one, for example 8401."


def test_a_full_disk_is_said_in_one_line(place: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(place.home)._replace(free=10 * 1024**2)
    monkeypatch.setattr("worker.stack.home.shutil.disk_usage", lambda _: usage)
    with pytest.raises(StackError, match=r"only 10.0 MiB of disk are free under .*; at least 1.00 GiB are needed"):
        prepare_home(place)


def test_a_path_too_long_for_a_socket_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    long = Stack(home=tmp_path / ("x" * LONGEST_SOCKET_PATH), port=8400)
    with pytest.raises(StackError, match="too long for a socket"):
        prepare_home(long)
    assert not long.home.exists()


def test_a_home_that_cannot_be_made_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StackError, match="cannot be used: Not a directory"):
        prepare_home(Stack(home=tmp_path / "file" / "home", port=8400))


def test_a_stale_state_file_without_its_lock_means_not_running(place: Stack) -> None:
    prepare_home(place)
    place.state_file.write_text(json.dumps({"pid": 1, "url": "http://127.0.0.1:1"}))
    place.lock_file.touch()
    assert find_running(place) is None


@pytest.fixture
def running_place(place: Stack) -> Iterator[Stack]:
    prepare_home(place)
    place.state_file.write_text(json.dumps({"pid": 4321, "url": "http://127.0.0.1:8399"}))
    with place.lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield place


def test_a_second_up_says_that_it_is_running_and_where(
    running_place: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up"]) == 0
    assert "already running at http://127.0.0.1:8399 (process 4321" in capsys.readouterr().out
    assert main(["up", "--if-needed"]) == 0
    assert capsys.readouterr().out == "Headroom runs at http://127.0.0.1:8399\n"


@pytest.mark.parametrize(("command", "code"), [("up", 1), ("down", 0), ("status", 1)])
def test_a_file_in_the_place_of_the_home_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, code: int
) -> None:
    (tmp_path / "home").write_text("not a folder")
    monkeypatch.setenv("HEADROOM_HOME", str(tmp_path / "home"))
    assert main([command]) == code
    said = capsys.readouterr()
    assert len((said.out + said.err).splitlines()) == 1


def test_a_second_up_in_the_foreground_is_refused(running_place: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--foreground"]) == 1
    assert "make down" in capsys.readouterr().err


def test_down_without_a_stack_says_so_and_succeeds(place: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["down"]) == 0
    assert capsys.readouterr().out == "Headroom is not running\n"


def test_status_without_a_stack_ends_with_one(place: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 1
    assert "is not running" in capsys.readouterr().out


def test_the_embedded_broker_listens_on_a_private_socket_only(place: Stack) -> None:
    valkey = services_of(place)[0]
    options = dict(zip(valkey.command[1::2], valkey.command[2::2], strict=True))
    assert valkey.name == "valkey"
    assert options["--port"] == "0"
    assert options["--unixsocketperm"] == "700"
    assert options["--appendonly"] == "yes"
    assert options["--maxmemory-policy"] == "noeviction"


def test_the_stack_opens_its_user_s_own_folders_unless_others_are_named(
    place: Stack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("HEADROOM_MODEL_ROOTS", raising=False)
    roots = place.environment()["HEADROOM_MODEL_ROOTS"].split(":")
    assert roots[:2] == [str(tmp_path), str(tmp_path / ".cache" / "huggingface")]
    monkeypatch.setenv("HEADROOM_MODEL_ROOTS", "")
    assert place.environment()["HEADROOM_MODEL_ROOTS"] == ""


def test_a_broker_named_by_the_environment_is_used_not_started(place: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:6379/0")
    assert [service.name for service in services_of(place)] == ["web", "reconciler", "worker"]


def test_the_worker_gets_longer_to_stop_than_its_jobs_get_to_save(
    place: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADROOM_GRACE_S", "7")
    worker = services_of(place)[-1]
    assert worker.stop_s == 7 + stack_supervisor.WORKER_SAVE_S


def test_secrets_are_written_for_their_user_alone(tmp_path: Path) -> None:
    write_private(tmp_path / "cli.json", "{}")
    write_private(tmp_path / "cli.json", '{"token": "t"}')
    assert stat.S_IMODE((tmp_path / "cli.json").stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["cli.json"]


def test_credentials_are_read_from_the_line_of_json() -> None:
    made = {"user": "admin", "password": "p", "token": "t"}
    assert read_credentials("Migrating\n" + json.dumps(made) + "\n") == made
    assert read_credentials("{}\n") == {}


def test_a_failed_start_shows_the_end_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "web.log").write_text("\n".join(str(number) for number in range(100)))
    assert tail(tmp_path / "web.log", num_lines=2) == "98\n99"
    assert tail(tmp_path / "none.log") == ""


def test_a_failing_manage_command_is_reported_by_its_last_line(place: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_home(place)
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{place.home}/none/database")
    with pytest.raises(StackError, match="manage.py migrate failed: .*unable to open database file"):
        stack.run_manage(place, "migrate")
    assert "Traceback" in (place.log_folder / "manage.log").read_text()


def run_stack(*arguments: Any, **environment: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "worker.stack", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def pids_of(place: Stack) -> dict[str, int]:
    return {row["name"]: row["pid"] for row in place.read_state().get("services", [])}


@pytest.fixture
def started(place: Stack) -> Iterator[subprocess.CompletedProcess[str]]:
    give_measured_machines(place.home)
    first = run_stack("up")
    yield first
    pid = place.read_state().get("pid")
    run_stack("down")
    with contextlib.suppress(ProcessLookupError, TypeError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.breadth(WHOLE_STACK)
@pytest.mark.slow
def test_a_whole_stack_starts_restarts_what_dies_and_leaves_no_orphan(
    place: Stack, started: subprocess.CompletedProcess[str]
) -> None:
    assert started.returncode == 0, started.stderr
    assert f"Headroom runs at {place.url}" in started.stdout
    assert "password" in started.stdout
    assert stat.S_IMODE(place.credentials_file.stat().st_mode) == 0o600
    known = json.loads(place.credentials_file.read_text())
    headers = {"Authorization": f"Bearer {known['token']}"}
    assert httpx.get(f"{place.url}/api/v1/me", headers=headers, trust_env=False).json()["user"] == "admin"

    before = pids_of(place)
    assert set(before) == {"valkey", "web", "reconciler", "worker"}
    os.kill(before["valkey"], signal.SIGKILL)
    wait_for(lambda: pids_of(place).get("valkey") not in (None, before["valkey"]), what="another Valkey", timeout_s=90)

    children = [pid for pid in pids_of(place).values() if pid]
    os.kill(place.read_state()["pid"], signal.SIGKILL)
    wait_for(lambda: not any(is_alive(pid) for pid in children), what="the end of its children", timeout_s=90)

    second = run_stack("up")
    assert second.returncode == 0, second.stderr
    assert "password" not in second.stdout
    assert run_stack("status").returncode == 0
    children = [pid for pid in pids_of(place).values() if pid]
    assert run_stack("down").stdout.splitlines()[-1] == "stopped"
    assert not any(is_alive(pid) for pid in children)


@pytest.mark.breadth(WHOLE_STACK)
@pytest.mark.slow
def test_in_the_foreground_ctrl_c_ends_everything(place: Stack) -> None:
    give_measured_machines(place.home)
    process = subprocess.Popen([sys.executable, "-m", "worker.stack", "up", "--foreground"], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: len([pid for pid in pids_of(place).values() if pid]) == 4, what="four processes", timeout_s=90)
        children = list(pids_of(place).values())
        wait_for(lambda: _answers(place), what="the web to answer", timeout_s=90)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=150)
        wait_for(lambda: not any(is_alive(pid) for pid in children), what="the end of its children", timeout_s=90)
    finally:
        process.kill()
        process.wait()


def _answers(place: Stack) -> bool:
    try:
        return httpx.get(f"{place.url}/readyz", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
