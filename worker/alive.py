"""Shows other processes of the same container that the worker is at work: a file that it touches while the database answers.

    python -m worker.alive

exits with 0 if the file was touched within the last minute, else with 1 and a sentence. Imports neither Django nor torch, since a
container asks every half minute.
"""

import os
import socket
import sys
import time
from pathlib import Path
from urllib.parse import quote

STALE_AFTER_S = 60.0


def alive_file(home: Path, *, worker: str) -> Path:
    return home / "run" / f"alive-{quote(worker, safe='')}"


def mark_alive(home: Path, *, worker: str) -> None:
    path = alive_file(home, worker=worker)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch()


def main() -> int:
    worker = os.environ.get("HEADROOM_WORKER_NAME") or socket.gethostname()
    path = alive_file(Path(os.environ.get("HEADROOM_HOME", ".headroom")), worker=worker)
    try:
        age_s = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        sys.stderr.write(f"the worker {worker} has never been at work\n")
        return 1
    if age_s > STALE_AFTER_S:
        sys.stderr.write(f"the worker {worker} last reached its database {age_s:.0f} s ago\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
