"""Shows on the hostile device (``tests/hostile_device``) that copies, threads and streams wait for all that they must.

    python -m benchmarks.waits seeds --seeds 20               every plan of the suite, each seed another order: the CPU's bits
    python -m benchmarks.waits removed [--only tiers.tiers]   each wait taken out, one at a time: who notices

``--json`` writes the result. ``--rows`` appends each row as it is done, and a later run with the same file goes on from there, as
far as its rows are of the same sources.
"""

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common.journal import Journal
from benchmarks.common.record import Row, describe_machine
from benchmarks.waits import reach, removed, seeds

_ROOT = Path(__file__).resolve().parents[2]
_CASES = ("backend", "cases", "footprint", "modes", "races", "ranks/cases", "ranks/collectives", "streams", "trips")
_SOURCES = {
    "seeds": ["optimizer/runtime", *(f"tests/hostile_device/{module}.py" for module in _CASES)],
    "removed": ["optimizer/runtime", "tests/hostile_device", *(test.partition("::")[0] for test in reach.TESTS)],
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.waits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    orders = commands.add_parser("seeds", help="every plan under many orders")
    orders.add_argument("--seeds", type=int, default=seeds.NUM_SEEDS)
    waits = commands.add_parser("removed", help="each wait taken out")
    waits.add_argument("--only", nargs="*", default=[], help="modules, or lines (tiers.tiers:242)")
    for command in (orders, waits):
        command.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
        command.add_argument("--rows", type=Path, metavar="FILE", help="append rows as they come; go on from what is there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    journal = Journal(
        file=options.json,
        lines=options.rows,
        machine=describe_machine(torch.device("cpu")),
        is_whole=options.command == "seeds" or not options.only,
        is_quick=options.command == "seeds" and options.seeds < seeds.NUM_SEEDS,
        show=show,
    )
    sources = digest_of(_SOURCES[options.command])
    # Rows of other sources say nothing of these.
    journal.rows = [row for row in journal.rows if row.get("sources") == sources]
    if options.command == "seeds":
        seeds.run_seeds(journal, num_seeds=options.seeds, sources=sources)
        return journal.finish(seeds.summarize(journal.rows))
    removed.take_out_each(journal, places=options.only, sources=sources)
    return journal.finish(removed.summarize(journal.rows))


def show(row: Row) -> str:
    return "  ".join(str(value) for name, value in row.items() if name not in ("what", "sources", "traceback"))


def digest_of(sources: Sequence[str]) -> str:
    """Short; of files, and of all modules in folders."""
    digest = hashlib.sha256()
    for source in sources:
        path = _ROOT / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    raise SystemExit(main())
