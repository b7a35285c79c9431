"""A group whose supervisor is silent ends itself, and only then."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker.processes import is_alive, wait_for
from worker.run.watch.lifeline import Beats, boot_s

ROOT = Path(__file__).resolve().parents[4]
SUPERVISOR = textwrap.dedent("""
    import os, select, sys, time
    from pathlib import Path
    from worker.run.child import Child
    from worker.run.watch.lifeline import Beats, boot_s
    lease_s = float(sys.argv[1])
    beats = Beats(lambda: boot_s() + lease_s, interval_s=lease_s / 30)
    child = Child(sys.argv[2:], folder=Path.cwd(), beat_fd=beats.child_fd)
    beats.start()
    select.select([child.pipe_fd], [], [])
    print(os.read(child.pipe_fd, 65536).decode(), end="", flush=True)
    while True:
        if child.has_ended():
            print(child.reap(), beats.has_lapsed, flush=True)
            break
        time.sleep(0.01)
""")
WORKER = textwrap.dedent("""
    import json, os, subprocess, sys, time
    from worker.run.watch.lifeline import die_with_supervisor, end_when_silent
    die_with_supervisor(int(os.environ["HEADROOM_LIFELINE_FD"]))
    end_when_silent(int(os.environ["HEADROOM_BEAT_FD"]))
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    os.write(int(os.environ["HEADROOM_PIPE_FD"]), json.dumps([os.getpid(), grandchild.pid]).encode() + b"\\n")
    while True:
        with open("written", "a") as file:
            file.write(f"{time.clock_gettime(time.CLOCK_BOOTTIME)}\\n")
        time.sleep(0.01)
""")


def command(source: str) -> list[str]:
    return [sys.executable, "-I", "-u", "-c", f"import sys; sys.path.append({str(ROOT)!r}); exec({source!r})"]


class Supervised:
    """A supervisor and its group, in processes of their own."""

    def __init__(self, folder: Path, *, lease_s: float) -> None:
        self.written = folder / "written"
        self.supervisor = subprocess.Popen(
            [*command(SUPERVISOR), str(lease_s), *command(WORKER)], cwd=folder, stdout=subprocess.PIPE, text=True
        )
        self.pid, self.grandchild = json.loads(self.supervisor.stdout.readline())
        wait_for(self.written.exists, what="the first of what is written")
        wait_for(self.times, what="the first of what is written")

    def send(self, number: signal.Signals) -> None:
        self.supervisor.send_signal(number)

    def times(self) -> list[float]:
        whole = self.written.read_text().rpartition("\n")[0]
        return [float(line) for line in whole.splitlines()]

    def end(self) -> None:
        self.supervisor.kill()
        self.supervisor.communicate()


@pytest.fixture
def supervised(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Supervised]:
    started = Supervised(tmp_path, lease_s=request.param)
    yield started
    started.end()


@pytest.mark.parametrize("supervised", [1.5], indirect=True)
def test_a_group_whose_supervisor_is_stopped_ends_within_the_lease_and_writes_nothing_after(supervised: Supervised) -> None:
    supervised.send(signal.SIGSTOP)
    stopped_s = boot_s()
    wait_for(lambda: not is_alive(supervised.pid), what="the end of the job's process")
    wait_for(lambda: not is_alive(supervised.grandchild), what="the grandchild's end")
    times = supervised.times()
    assert times[-1] <= stopped_s + 1.5
    supervised.send(signal.SIGCONT)
    assert supervised.supervisor.stdout.readline() == "-9 True\n"
    assert supervised.times() == times


@pytest.mark.parametrize("supervised", [1.5], indirect=True)
def test_a_group_whose_supervisor_lives_outlives_many_leases(supervised: Supervised) -> None:
    wait_for(lambda: supervised.times()[-1] - supervised.times()[0] > 4, what="work for more than two leases")
    supervised.send(signal.SIGSTOP)
    supervised.send(signal.SIGCONT)
    before_s = boot_s()
    wait_for(lambda: supervised.times()[-1] > before_s + 1, what="work after a short stop")


@pytest.mark.parametrize("supervised", [60], indirect=True)
def test_a_group_that_was_halted_itself_goes_on_with_the_beats_that_came_meanwhile(supervised: Supervised) -> None:
    os.kill(supervised.pid, signal.SIGSTOP)
    halted_s = boot_s()
    wait_for(lambda: boot_s() > halted_s + 2.5, what="a beat more than is read at once")
    os.kill(supervised.pid, signal.SIGCONT)
    wait_for(lambda: supervised.times()[-1] > boot_s() - 0.5, what="work")


def test_a_group_that_lost_its_job_ends_though_its_supervisor_lives(tmp_path: Path) -> None:
    until: Any = {"s": boot_s() + 600}
    beats = Beats(lambda: until["s"], interval_s=0.02)
    source = "import sys, time; from worker.run.watch.lifeline import end_when_silent; "
    source += "end_when_silent(int(sys.argv[1])); time.sleep(300)"
    process = subprocess.Popen(
        [*command(source), str(beats.child_fd)],
        pass_fds=[beats.child_fd],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        beats.start()
        time.sleep(0.2)
        assert process.poll() is None
        assert not beats.has_lapsed
        until["s"] = 0.0
        assert "the supervisor is silent" in process.communicate(timeout=30)[1]
        assert process.returncode == -signal.SIGKILL
        assert beats.has_lapsed
    finally:
        process.kill()
        process.wait()
        beats.close()


HALTED = textwrap.dedent("""
    import os, sys, threading, time
    from worker.run.watch import lifeline
    threading.Thread.start = lambda thread: None  # as if it were the last to get a turn after a halt
    check = lifeline.end_when_silent(int(sys.argv[1]))
    for line in sys.stdin:
        check()
        print("works", flush=True)
""")


def test_the_thread_that_works_ends_a_group_whose_time_is_over_before_it_writes_anything() -> None:
    until: Any = {"s": boot_s() + 600}
    beats = Beats(lambda: until["s"], interval_s=0.02)
    process = subprocess.Popen(
        [*command(HALTED), str(beats.child_fd)],
        pass_fds=[beats.child_fd],
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        process.stdin.write("step\n")
        process.stdin.flush()
        assert process.stdout.readline() == "works\n"
        until["s"] = boot_s() + 0.1
        beats._beat()
        process.stdin.write("step\n")
        process.stdin.flush()
        process.stdout.readline()
        wait_for(lambda: boot_s() > until["s"], what="the end of the lease")
        output, errors = process.communicate("step\n", timeout=30)
        assert (output, process.returncode) == ("", -signal.SIGKILL)
        assert "the supervisor is silent" in errors
    finally:
        process.kill()
        process.wait()
        beats.close()
