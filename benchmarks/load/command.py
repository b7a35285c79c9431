"""``python -m benchmarks.load [--quick] [--only PART ...] [--database sqlite|postgresql] [--json FILE]``: a busy service.

- submissions: offers taken (POST /api/v1/jobs with a plan_id) by 1, 8 and 32 connections, each of which waits for its answer.
- overload: the same by 100 and 400 connections, of which most are refused.
- queued: the submissions again, with 20,000 jobs in the queue.
- reads: every page and every GET route with that queue, as its owner and as an administrator.

The web process is the real one, on loopback, with Valkey; no worker runs. Client and server share the machine's processors.
PostgreSQL is a server of the benchmark's own with its usual settings: commits wait for the disk.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from benchmarks.common.record import GoalEntry, Record, Row, at_most, describe_machine, goal, none_of
from benchmarks.load import rows as people
from benchmarks.load.reads import LIMIT_MS, measure_reads
from benchmarks.load.service import Service, running_service
from benchmarks.load.submissions import measure_submissions
from tests.postgresql import running_postgresql

PARTS = ("submissions", "overload", "queued", "reads")
TAKEN_PER_S = {"sqlite": 100, "postgresql": 200}
TAKEN_GOAL_MS = 300
REFUSED_GOAL_MS = 100
NUM_QUEUED = 20_000
FEW, MANY = (1, 8, 32), (100, 400)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter and fewer rounds: about two minutes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--database", choices=tuple(TAKEN_PER_S), default="sqlite")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    record = Record(
        file=options.json, machine=describe_machine(), is_quick=options.quick, is_whole=set(options.only) == set(PARTS)
    )
    database = running_postgresql() if options.database == "postgresql" else nullcontext(None)
    with database as url, running_service(database_url=url) as service:
        # in this order: the queue only grows
        for name in (part for part in PARTS if part in options.only):
            record.add_all(name, _measure(name, service, is_quick=options.quick))
    return record.finish(summarize(record.rows, database=options.database))


def _measure(part: str, service: Service, *, is_quick: bool) -> Iterator[Row]:
    if part in ("queued", "reads"):
        service.ask("fill_queue", num_jobs=NUM_QUEUED)
    if part == "reads":
        for person in (people.MEMBER, people.ADMINISTRATOR):
            yield from measure_reads(service, person=person, num_rounds=3 if is_quick else 24)
        return
    for num_connections in MANY if part == "overload" else FEW:
        row = measure_submissions(service, num_connections=num_connections, seconds=3 if is_quick else 10)
        yield {"what": part, **row}


def summarize(rows: Sequence[Row], *, database: str) -> dict[str, GoalEntry]:
    """Judge the rate by the number of connections that reaches the highest one, times by the slowest row."""
    by_part = {part: [row for row in rows if row["what"] == part] for part in PARTS}
    submitting = [row for part in ("submissions", "overload", "queued") for row in by_part[part]]
    reading = [row for row in rows if row["what"] in ("pages", "routes")]
    goals: dict[str, GoalEntry] = {}
    for part, name in (("submissions", "empty queue"), ("queued", f"{NUM_QUEUED:,} queued")):
        least, found = TAKEN_PER_S[database], [row["taken_per_s"] for row in by_part[part]]
        rate = max(found, default=None)
        goals[f"offers taken per second, {name}"] = goal(rate, f">= {least}", met=rate is not None and rate >= least)
        goals[f"offer taken, {name}, p99 (ms)"] = at_most(_worst(by_part[part], "p99_ms"), TAKEN_GOAL_MS)
    goals["refusal under overload, p99 (ms)"] = at_most(_worst(by_part["overload"], "refused_p99_ms"), REFUSED_GOAL_MS)
    goals["refusals without Retry-After"] = none_of(
        sum(row["num_without_retry_after"] for row in submitting), submitting
    )
    goals["5xx but 503, and lost connections"] = none_of(
        sum(row["num_faults"] for row in submitting + reading), submitting
    )
    for kind in ("pages", "routes"):
        found = [row for row in reading if row["what"] == kind]
        goals[f"{kind} with {NUM_QUEUED:,} queued, slowest p95 (ms)"] = at_most(_worst(found, "worst_p95_ms"), LIMIT_MS)
    return goals


def _worst(rows: Sequence[Row], key: str) -> float | None:
    return max((row[key] for row in rows if row[key] is not None), default=None)
