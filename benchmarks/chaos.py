"""``python -m benchmarks.chaos [--rounds N] [--seed S] [--only PART] [--database NAME] [--limit-s T] [--json FILE]``: faults.

The whole service runs as real processes while people use it, and round after round it is struck by one to six faults of some
forty kinds at once: processes killed and halted, servers lost, disks filled, checkpoints damaged. Every 25 rounds all comes to
rest and is looked over for leaks; at the end every promise is held against the rows and the files (``tests/chaos``, of which the
tests run sixty rounds). INT or TERM ends it after the round under way, with a verdict on what was done until then.
"""

import argparse
import json
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common.record import GoalEntry, Record, describe_machine, goal, none_of
from tests import llama
from tests.chaos import faults
from tests.chaos.campaign import DRAINED_WITHIN_S, Report, run_campaign
from tests.chaos.promises import PROMISES
from tests.chaos.world import running_world
from tests.postgresql import running_postgresql

ROUNDS = 1000
LEAST_KINDS = 30
LEAST_FAULTS = 3_000
LEAST_JOBS = 20_000
LEAST_HALTS = 100
NUM_PEOPLE = 5
PAUSE_S = 0.05
"""Between two submissions of one person: the queue is kept short, so that jobs are at work whenever a fault strikes."""
MOST_WAITING = 200
"""Jobs in the queue: enough that workers have some through a round in which nobody can submit."""
MOST_AT_ONCE = 6
"""Faults of one round."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", action="append", default=[], metavar="PART", help="kinds whose name has this part, such as 'halt a worker'"
    )
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no round after so many seconds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    record = Record(file=options.json, machine=describe_machine(), is_quick=options.rounds < ROUNDS)
    is_to_end = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: is_to_end.set())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        profile_file = trace_llama(folder)
        url = stack.enter_context(running_postgresql()) if options.database == "postgresql" else None
        world = stack.enter_context(running_world(postgresql_url=url))
        report = run_campaign(
            world,
            rounds=options.rounds,
            seed=options.seed,
            profile_file=profile_file,
            num_people=NUM_PEOPLE,
            pause_s=PAUSE_S,
            most_waiting=MOST_WAITING,
            limit_s=options.limit_s,
            most_at_once=MOST_AT_ONCE,
            only=options.only,
            is_to_end=is_to_end.is_set,
        )
        if report.broken or report.ended_alone:
            print(world.logs())
    record.add({"what": "campaign", "database": options.database, "seed": options.seed, **report.to_json()})
    return record.finish(summarize(report))


def trace_llama(folder: Path) -> Path:
    """The profile of the tests' tiny model, with which jobs can be priced."""
    from optimizer.cli.main import main as optimize

    (folder / "config.json").write_text(json.dumps(llama.CONFIG))
    if optimize(["profile", "--model", str(folder), "-o", str(folder / "profile.json")]):
        raise RuntimeError("the tiny model cannot be profiled")
    return folder / "profile.json"


def summarize(report: Report) -> Mapping[str, GoalEntry]:
    """The promises, and whether enough was done to break them."""
    rounds = range(report.rounds)
    num_faults = report.struck.total()
    num_halts = sum(report.struck[fault.name] for fault in faults.ALL if fault.outlasts_lease)
    slowest_s = max(report.drained_s, default=None)
    amounts = {
        "kinds of faults that struck": (len(report.struck), LEAST_KINDS),
        "faults that struck": (num_faults, LEAST_FAULTS),
        "jobs accepted": (report.num_accepted, LEAST_JOBS),
        "workers halted past their lease": (num_halts, LEAST_HALTS),
    }
    return {
        **{name: goal(value, f">= {least}", met=value >= least, needs="all cases") for name, (value, least) in amounts.items()},
        **{promise: none_of(len(report.broken.get(promise, ())), rounds) for promise in PROMISES},
        "services that ended though no fault had ended them": none_of(len(report.ended_alone), rounds),
        "longest time until the queue was empty, s": goal(
            slowest_s, f"<= {DRAINED_WITHIN_S:g}", met=slowest_s is not None and slowest_s <= DRAINED_WITHIN_S
        ),
    }


if __name__ == "__main__":
    raise SystemExit(main())
