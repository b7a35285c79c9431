"""Compares what processes hold once all has come to rest: files, threads, memory, processes and sessions that nobody closed."""

import contextlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psycopg

from tests.chaos.world import SERVICES, World
from tests.postgresql import postgresql_folder

MORE_FILES, MORE_THREADS = 30, 80
"""Pools grow under the first load, and stay, and SQLite keeps the file of a closed connection for the next. A request's thread
goes with the garbage, which a web process at rest leaves."""
MORE_BYTES = 200 << 20
MOST_SESSIONS = 60
_MOST_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Counts of what one process holds."""

    num_files: int
    num_threads: int
    resident_bytes: int


def look_at(pid: int) -> Holding:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return Holding(
        num_files=sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
        num_threads=int(status["Threads"]),
        resident_bytes=int(status["VmRSS"].split()[0]) * 1024,
    )


def look_at_all(world: World) -> dict[str, Holding]:
    return {name: look_at(world.pid(name)) for name in SERVICES if world.is_running(name)}


def find_leaks(world: World, before: dict[str, Holding]) -> list[str]:
    """Sentences on whatever is held beyond what was held before the first fault. Nothing may be at work."""
    found = [f"a process is left: {stranger}" for stranger in world.strangers()]
    for name, now in look_at_all(world).items():
        then = before[name]
        if now.num_files > then.num_files + MORE_FILES:
            names = name_most_open(world.pid(name))
            found.append(f"{name} has {now.num_files} files open, and had {then.num_files}; most often {names}")
        if now.num_threads > then.num_threads + MORE_THREADS:
            found.append(f"{name} has {now.num_threads} threads, and had {then.num_threads}")
        if now.resident_bytes > then.resident_bytes + MORE_BYTES:
            found.append(f"{name} holds {now.resident_bytes >> 20} MiB, and held {then.resident_bytes >> 20}")
    if world.postgresql_url and (num := _num_sessions(world.postgresql_url)) > MOST_SESSIONS:
        found.append(f"{num} sessions are open in PostgreSQL")
    return found


def name_most_open(pid: int) -> str:
    """The files that a process has open most often, sockets and pipes each as one."""
    names: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names[str(entry.readlink()).partition(":[")[0]] += 1
    return ", ".join(f"{name} ({num})" for name, num in names.most_common(_MOST_NAMED))


def _num_sessions(url: str) -> int:
    with psycopg.connect(host=str(postgresql_folder(url)), user="headroom", dbname="postgres") as session:
        row = session.execute("SELECT COUNT(*) FROM pg_stat_activity WHERE backend_type = 'client backend'").fetchone()
    return int(row[0]) if row else 0
