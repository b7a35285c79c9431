"""``python -m benchmarks.hostile [--cases N] [--seed S] [--limit-s T] [--json FILE]``: hostile uploads without end.

Uploads of every kind are made of valid ones (``tests/hostile/mutate.py``) and checked as the service checks them, in worker
processes with the memory of a check; what is taken must be readable by the libraries that jobs use. Reported: faults (exceptions
that are no refusal: a 5xx or a check without words), wrong allows, crashes that the service's own limits do not contain, the
slowest case and the largest memory.
"""

import argparse
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.record import Record, describe_machine, none_of
from optimizer.base.units import GIB

SILENT_S = 60.0
"""A worker that says nothing for so long hangs in its case."""
_BATCH = 20_000
_BAD = ("fault", "wrong allow", "crash")
_WORKERS = 2
_MEMORY_BYTES = 2 * GIB
"""Limit of a worker, which has everything loaded that the checks and the confirmation need."""


@dataclass(kw_only=True)
class Tally:
    """Counts the outcomes of the cases so far."""

    num_cases: int = 0
    allowed: Counter[str] = field(default_factory=Counter)
    """By kind of the valid upload, as is the next."""
    refused: Counter[str] = field(default_factory=Counter)
    problems: list[dict[str, Any]] = field(default_factory=list)
    num_contained: int = 0
    """Cases that ended their worker, and that the service refuses in a limited process."""
    slowest_s: float = 0.0
    slowest_number: int = -1
    memory_bytes: int = 0

    def take(self, row: dict[str, Any]) -> None:
        self.num_cases += row["cases"]
        self.allowed.update(row["allowed"])
        self.refused.update(row["refused"])
        self.problems += row["problems"]
        self.memory_bytes = max(self.memory_bytes, row["memory_bytes"])
        if row["slowest_s"] > self.slowest_s:
            self.slowest_s, self.slowest_number = row["slowest_s"], row["slowest_number"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="stop after so many seconds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--work", nargs=2, type=int, metavar=("START", "END"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work:
        _work(options.seed, *options.work)
        return 0
    record = Record(file=options.json, machine=describe_machine(), is_quick=options.cases < 1_000_000)
    tally = run_cases(options.cases, seed=options.seed, limit_s=options.limit_s)
    for problem in tally.problems[:50]:
        record.add(problem)
    record.add({"what": "cases", "value": tally.num_cases, "contained": tally.num_contained, "slowest_s": tally.slowest_s,
                "slowest_number": tally.slowest_number, "memory_bytes": tally.memory_bytes,
                "allowed": dict(tally.allowed), "refused": dict(tally.refused)})  # fmt: skip
    counts = Counter(problem["what"] for problem in tally.problems)
    return record.finish({f"{what}: none": none_of(counts[what], range(tally.num_cases)) for what in _BAD})


def run_cases(num_cases: int, *, seed: int, limit_s: float = float("inf")) -> Tally:
    """The cases 0 to num_cases - 1 of a seed, or as many as begin within the time."""
    tally, deadline = Tally(), time.monotonic() + limit_s
    spans = [(start, min(start + _BATCH, num_cases)) for start in range(0, num_cases, _BATCH)]
    with ThreadPoolExecutor(_WORKERS) as pool:
        for rows, contained in pool.map(lambda span: _follow(seed, *span, deadline=deadline), spans):
            for row in rows:
                tally.take(row)
            tally.num_contained += contained
    return tally


def _follow(seed: int, start: int, end: int, *, deadline: float) -> tuple[list[dict[str, Any]], int]:
    """Rows of one span, each of a case; a worker that ends early is replaced after the case that ended it."""
    rows: list[dict[str, Any]] = []
    num_contained, at = 0, start
    while at < end and time.monotonic() < deadline:
        found, at, is_whole = _follow_worker(seed, at, end, deadline=deadline)
        rows += found
        if not is_whole and time.monotonic() < deadline:
            problem = _look_again(seed, at)
            num_contained += problem is None
            rows.append(_empty_row() | {"cases": 1, "problems": [] if problem is None else [problem]})
            at += 1
    return rows, num_contained


def _follow_worker(seed: int, at: int, end: int, *, deadline: float) -> tuple[list[dict[str, Any]], int, bool]:
    """Its rows, the case that it came to, and whether it did not end early."""
    command = [sys.executable, "-m", "benchmarks.hostile", "--seed", str(seed), "--work", str(at), str(end)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    rows = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        while time.monotonic() < deadline:
            if not select.select([process.stdout], [], [], SILENT_S)[0]:
                break
            line = process.stdout.readline()
            if not line:
                break
            row = json.loads(line)
            at = row["next"]
            rows.append(row)
        process.kill()
    return rows, at, at >= end


def _look_again(seed: int, number: int) -> dict[str, Any] | None:
    """None where the service, whose checks are limited processes of their own, refuses the case."""
    code = f"from benchmarks.hostile import look_at; look_at({seed}, {number})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=900)
    if done.returncode == 0:
        return None
    return {"what": "crash", "seed": seed, "number": number, "text": done.stderr[-300:]}


def look_at(seed: int, number: int) -> None:
    """Check one case with limited processes. Raises what is no refusal."""
    _set_up_django()
    from optimizer.base.errors import InvalidInput
    from tests.hostile.mutate import mutated
    from tests.hostile.upload import examine

    with tempfile.TemporaryDirectory() as folder:
        try:
            examine(mutated(seed, number)[1], Path(folder), is_bomb=True)
        except InvalidInput as error:
            print(error)


def _work(seed: int, start: int, end: int) -> None:
    """In the worker: after each case its number, so that whoever follows knows where it ended."""
    _set_up_django()
    from optimizer.base.errors import InvalidInput
    from tests.hostile.mutate import mutated
    from tests.hostile.upload import WronglyAllowedError, examine

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    out = sys.stdout
    for number in range(start, end):
        row = _empty_row()
        kind, upload = mutated(seed, number)
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                examine(upload, Path(folder))
                row["allowed"][kind] += 1
            except InvalidInput as error:
                row["refused"][kind] += 1
                if not str(error):
                    row["problems"].append({"what": "fault", "seed": seed, "number": number, "text": "a refusal without words"})
            except Exception as error:
                what = "wrong allow" if isinstance(error, WronglyAllowedError) else "fault"
                text = "".join(traceback.format_exception(error)[-2:])[-600:]
                row["problems"].append({"what": what, "seed": seed, "number": number, "kind": kind, "text": text})
        row["cases"] += 1
        taken_s = time.perf_counter() - begun
        if taken_s > row["slowest_s"]:
            row["slowest_s"], row["slowest_number"] = round(taken_s, 3), number
        row["memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        out.write(json.dumps({"next": number + 1, **row}) + "\n")
        out.flush()


def _empty_row() -> dict[str, Any]:
    return {"cases": 0, "allowed": Counter(), "refused": Counter(), "problems": [], "slowest_s": 0.0, "slowest_number": -1,
            "memory_bytes": 0}  # fmt: skip


def _set_up_django() -> None:
    """On a folder of its own: nothing here has rows."""
    import django

    os.environ["HEADROOM_HOME"] = tempfile.mkdtemp(prefix="headroom-hostile-")
    os.environ["DJANGO_SETTINGS_MODULE"] = "webapp.settings"
    django.setup()


if __name__ == "__main__":
    sys.exit(main())
