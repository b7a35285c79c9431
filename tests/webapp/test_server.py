"""The web server's process, apart from what its pages and its API answer."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MANY_THREADS = """
import ctypes, threading
from webapp.server import bound_memory
bound_memory()
everybody = threading.Barrier(32)
def work():
    everybody.wait()
    kept = [bytes(2000) for _ in range(200)]
    everybody.wait()
threads = [threading.Thread(target=work) for _ in range(32)]
for thread in threads: thread.start()
for thread in threads: thread.join()
ctypes.CDLL(None).malloc_stats()
"""


def test_a_burst_of_threads_shares_two_heaps() -> None:
    done = subprocess.run([sys.executable, "-c", MANY_THREADS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Arena 0" in done.stderr
    assert done.stderr.count("Arena ") <= 2
