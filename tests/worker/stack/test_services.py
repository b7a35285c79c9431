"""The supervisor of child processes, with real processes."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.worker.processes import is_alive, wait_for
from worker.run.watch import halted
from worker.stack import answering, services
from worker.stack.answering import AnswerWatch
from worker.stack.services import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, RunningService, Service, stop_services

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def make_service(tmp_path: Path) -> Iterator[Callable[..., RunningService]]:
    made = []

    def make(code: str, *, name: str = "child", stop_s: float = 5.0) -> RunningService:
        service = Service(name=name, command=[sys.executable, "-c", textwrap.dedent(code)], stop_s=stop_s)
        running = RunningService(
            service=service, environment=dict(os.environ), folder=tmp_path, log_file=tmp_path / f"{name}.log"
        )
        made.append(running)
        return running

    yield make
    for running in made:
        if running.process is not None and running.process.poll() is None:
            running.process.kill()
            running.process.wait()


def test_what_a_service_prints_goes_to_its_log(make_service: Callable[..., RunningService]) -> None:
    running = make_service("print('hello')")
    assert running.tend(0.0) == "started"
    running.process.wait()
    assert running.log_file.read_text() == "hello\n"


def test_a_log_that_grows_long_is_set_aside_while_its_service_runs(
    make_service: Callable[..., RunningService], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "LARGEST_LOG_BYTES", 1000)
    code = """
        import time
        print("x" * 2000, flush=True)
        while True:
            time.sleep(0.05)
            print("and on", flush=True)
        """
    running = make_service(code)
    running.tend(0.0)
    wait_for(lambda: running.log_file.stat().st_size > 2000, what="a long log")
    assert running.tend(1.0) == ""
    old = running.log_file.with_suffix(".log.1")
    assert old.read_text().startswith("x" * 2000)
    wait_for(lambda: running.log_file.read_text().startswith("and on"), what="the service to write on")
    assert running.log_file.stat().st_size < 1000


def test_a_service_that_was_halted_is_ended_and_started_again(
    make_service: Callable[..., RunningService], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(halted, "HALTED_S", 0.2)
    monkeypatch.setattr(halted, "_LOOK_S", 0.05)
    running = make_service("import time; time.sleep(300)")
    running.tend(0.0)
    first = running.process.pid
    os.kill(first, signal.SIGSTOP)
    wait_for(lambda: running.tend(100.0) == "died", what="the end of the halted service")
    assert running.tend(100.0 + FIRST_BACKOFF_S) == "started"
    assert running.process.pid != first
    assert f"child ({first}) was halted, and is ended" in capfd.readouterr().out


STUCK_SERVER = """
    import signal, sys, time
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(400)
            self.end_headers()

    def get_stuck(*_):
        time.sleep(300)

    signal.signal(signal.SIGUSR1, get_stuck)
    server = HTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
    """


def test_a_web_server_that_answers_nobody_is_ended_with_its_last_words_and_started_again(
    make_service: Callable[..., RunningService], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(answering, "ASK_EVERY_S", 1.0)
    running = make_service(STUCK_SERVER)
    running.service = replace(
        running.service, command=[sys.executable, "-X", "faulthandler", *running.service.command[1:]]
    )
    running.tend(0.0)
    port = int(wait_for(lambda: running.log_file.read_text(), what="its port"))
    running.answers = AnswerWatch(host="127.0.0.1", port=port)
    now = 0.0

    def tend() -> str:
        nonlocal now
        now += 1.0
        return running.tend(now)

    def has_answered() -> bool:
        assert tend() == ""
        return running.answers._silent_s == 0.0

    wait_for(has_answered, what="an answer")
    # Far longer than it may be silent, while it answers.
    for _ in range(3):
        running.answers._silent_s = 0.9 * answering.SILENT_S
        wait_for(has_answered, what="another answer")
    first = running.process.pid
    os.kill(first, signal.SIGUSR1)
    wait_for(lambda: tend() == "died", what="the end of the server")
    assert f"child ({first}) has answered nobody for 120 s, and is ended" in capfd.readouterr().out
    assert "get_stuck" in running.log_file.read_text()
    now += FIRST_BACKOFF_S
    assert tend() == "started"


def test_a_server_that_has_yet_to_begin_and_a_supervisor_that_was_halted_are_no_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        watch = AnswerWatch(host="127.0.0.1", port=listening.getsockname()[1])
        assert not any(watch.is_silent(float(now)) for now in range(1000))
        watch._silent_s = 0.0
        assert not watch.is_silent(5000.0)
        assert not watch.is_silent(5000.0 + 100 * answering.SILENT_S)
        assert any(watch.is_silent(20_000.0 + now) for now in range(200))
        watch.close()


def test_a_service_that_was_halted_hears_that_it_is_to_stop(make_service: Callable[..., RunningService]) -> None:
    code = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        print("listens", flush=True)
        time.sleep(300)
        """
    running = make_service(code, stop_s=60.0)
    running.tend(0.0)
    wait_for(lambda: running.log_file.read_text() == "listens\n", what="the service to listen")
    os.kill(running.process.pid, signal.SIGSTOP)
    stop_services([running])
    assert running.process.returncode == 7


def test_a_dead_service_is_started_again_after_its_back_off(make_service: Callable[..., RunningService]) -> None:
    running = make_service("")
    running.tend(100.0)
    running.process.wait()
    assert running.tend(101.0) == "died"
    assert running.tend(101.0 + FIRST_BACKOFF_S / 2) == ""
    assert running.tend(101.0 + FIRST_BACKOFF_S) == "started"
    running.process.wait()
    assert running.num_restarts == 1


def test_the_back_off_doubles_to_its_limit_and_starts_over_after_a_steady_run(
    make_service: Callable[..., RunningService]
) -> None:
    running = make_service("")
    now, waits = 0.0, []
    for _ in range(7):
        running.tend(now)
        running.process.wait()
        running.tend(now)
        waits.append(running.start_again_at - now)
        now = running.start_again_at
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, LONGEST_BACKOFF_S, LONGEST_BACKOFF_S]
    running.tend(now)
    running.process.wait()
    running.tend(now + 31.0)
    assert running.start_again_at == now + 31.0 + FIRST_BACKOFF_S


def test_what_a_service_keeps_is_set_aside_at_the_third_death_in_its_youth(
    make_service: Callable[..., RunningService]
) -> None:
    calls: list[float] = []
    running = make_service("")
    running.service = replace(running.service, set_aside=lambda: calls.append(now))
    now = 0.0
    for lived_s in (1.0, 1.0, 10.0, 1.0, 1.0, 1.0, 1.0):  # the one that lived longer begins the count anew
        running.tend(now)
        running.process.wait()
        now += lived_s
        running.tend(now)
        now = running.start_again_at
    assert len(calls) == 1
    assert running.num_young_deaths == 1


def test_a_program_that_cannot_be_started_is_tried_again_after_growing_delays(tmp_path: Path) -> None:
    service = Service(name="child", command=[str(tmp_path / "none")], stop_s=1.0)
    running = RunningService(service=service, environment={}, folder=tmp_path, log_file=tmp_path / "child.log")
    assert running.tend(10.0) == "died"
    assert running.start_again_at == 10.0 + FIRST_BACKOFF_S
    assert running.tend(running.start_again_at) == "died"
    assert running.start_again_at == 10.0 + 3 * FIRST_BACKOFF_S


def test_a_service_that_ignores_term_is_killed_at_its_deadline(make_service: Callable[..., RunningService]) -> None:
    running = make_service(
        """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep(60)
        """,
        stop_s=0.2,
    )
    running.tend(0.0)
    wait_for(lambda: running.log_file.exists() and running.log_file.read_text(), what="what it prints")
    stop_services([running])
    assert running.process.returncode == -signal.SIGKILL


def has_printed(running: RunningService) -> bool:
    return running.log_file.exists() and bool(running.log_file.read_text())


def test_services_end_last_to_first_each_before_the_next_is_asked(
    make_service: Callable[..., RunningService], tmp_path: Path
) -> None:
    code = """
        import pathlib, signal, sys, time
        def leave(*_):
            with open("order", "a") as order:
                order.write("{name} ")
            sys.exit()
        signal.signal(signal.SIGTERM, leave)
        print("ready", flush=True)
        time.sleep(60)
        """
    services = [make_service(code.replace("{name}", name), name=name) for name in ("first", "second", "third")]
    for running in services:
        running.tend(0.0)
        wait_for(partial(has_printed, running), what="what it prints")
    stop_services(services)
    assert (tmp_path / "order").read_text() == "third second first "


SUPERVISOR = """
import os, sys
from pathlib import Path
from worker.stack.services import RunningService, Service, run_services
folder = Path(sys.argv[1])
services = [
    RunningService(
        service=Service(name=name, command=[sys.executable, "-c", "import time; time.sleep(60)"], stop_s=5),
        environment=dict(os.environ), folder=folder, log_file=folder / f"{name}.log",
    )
    for name in ("a", "b")
]
def tell(services):
    pids = [str(running.process.pid) for running in services if running.process]
    staged = folder / "staged"
    staged.write_text(" ".join(pids))
    staged.rename(folder / "pids")
run_services(services, on_change=tell)
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[Any], Callable[..., Any]]]:
    process = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path)], cwd=ROOT)
    yield process, lambda: [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    process.kill()
    process.wait()


def test_no_child_outlives_a_supervisor_that_is_killed(
    supervisor: tuple[subprocess.Popen[Any], Callable[..., Any]], tmp_path: Path
) -> None:
    process, pids_of = supervisor
    wait_for(lambda: (tmp_path / "pids").exists() and len(pids_of()) == 2, what="its two children")
    children = pids_of()
    process.kill()
    process.wait()
    wait_for(lambda: not any(is_alive(pid) for pid in children), what="the end of its children")


def test_term_ends_the_supervisor_and_its_children(
    supervisor: tuple[subprocess.Popen[Any], Callable[..., Any]], tmp_path: Path
) -> None:
    process, pids_of = supervisor
    wait_for(lambda: (tmp_path / "pids").exists() and len(pids_of()) == 2, what="its two children")
    children = pids_of()
    process.terminate()
    assert process.wait(timeout=20) == 0
    assert not any(is_alive(pid) for pid in children)


def test_a_killed_child_is_replaced_by_another(
    supervisor: tuple[subprocess.Popen[Any], Callable[..., Any]], tmp_path: Path
) -> None:
    _, pids_of = supervisor
    wait_for(lambda: (tmp_path / "pids").exists() and len(pids_of()) == 2, what="its two children")
    first, second = pids_of()
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: len(pids_of()) == 2 and first not in pids_of(), what="children in place of those killed")
    assert second in pids_of()
