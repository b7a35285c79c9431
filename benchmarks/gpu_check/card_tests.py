"""The tests marked gpu, each as a row: ``python -m benchmarks.gpu_check.card_tests [--json FILE] [--device cuda:0]``.

pytest collects no more than the files that have such tests, since a machine with a card may have nothing of the service.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

import torch

from benchmarks.common.record import GoalEntry, Record, Row, describe_machine, goal
from tests.left_out import NEEDS_PACKAGE

_ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 420.0
"""All files together."""
FILE_SHARE = 1 / 3
"""The most of it that one file may take: torch alone takes ten seconds to start."""
_MARK = "mark." + "gpu"
_MOST_CHARACTERS = 4_000
"""Kept of the text of one failure."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="taken like the other parts', and changes nothing")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    record = Record(file=options.json, machine=describe_machine(device), is_quick=device.type != "cuda")
    if device.type == "cuda":
        record.add_all("tests", run_tests(list_files()))
    else:
        record.add({"what": "left out", "why_not": f"the tests need a CUDA device, and this is {device}"})
    return record.finish(summarize(record.rows))


def list_files() -> list[Path]:
    """Files of the library's tests in which one is marked, as seen from the repository's root."""
    files = sorted((_ROOT / "tests" / "optimizer").rglob("test_*.py"))
    return [file.relative_to(_ROOT) for file in files if _MARK in file.read_text()]


def run_tests(files: Sequence[Path], *, limit_s: float = LIMIT_S) -> Iterator[Row]:
    """One row for each test, and one for the end of each file.

    Each has a pytest of its own, so that one that hangs or ends its process loses the rows of no other. Past its share of the
    limit it is ended, and is a failed row itself.
    """
    ends_s = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix="headroom-") as folder:
        for index, file in enumerate(files):
            report = Path(folder) / f"report-{index}.xml"
            left_s = max(0.0, min(limit_s * FILE_SHARE, ends_s - time.monotonic()))
            command = command_of([file], f"--junitxml={report}")
            try:
                ended = subprocess.run(command, cwd=_ROOT, check=False, timeout=left_s)
            except subprocess.TimeoutExpired:
                yield {"what": "failed", "of": str(file), "error": f"did not end in {left_s:.0f} s"}
                continue
            if report.exists():
                yield from read_report(report)
            yield {"what": "pytest", "file": str(file), "exit_code": ended.returncode}


def command_of(files: Sequence[Path], *arguments: str) -> list[str]:
    """The command line for tests marked gpu of these files."""
    return [sys.executable, "-m", "pytest", "-q", "-c", "tests/gpu.ini", "--rootdir=.", *arguments, *map(str, files)]


def read_report(report: Path) -> Iterator[Row]:
    """The rows of a JUnit file that pytest on this machine wrote."""
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        row: Row = {"what": "test", "name": name, "seconds": float(case.get("time") or 0)}
        outcomes = {child.tag: child for child in case}
        if (found := outcomes.get("failure", outcomes.get("error"))) is not None:
            row |= {"outcome": "failed", "why_not": (found.text or found.get("message") or "")[-_MOST_CHARACTERS:]}
        elif (found := outcomes.get("skipped")) is not None:
            row |= {"outcome": "skipped", "why_not": found.get("message", "")}
        else:
            row["outcome"] = "passed"
        yield row


def summarize(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    """Skipped tests are no success: on a card every one of them is to run, but those whose package is not installed."""
    tests = [row for row in rows if row["what"] == "test" and not row.get("why_not", "").startswith(NEEDS_PACKAGE)]
    num_passed = sum(row["outcome"] == "passed" for row in tests)
    value = f"{num_passed} of {len(tests)}" if tests else None
    ended_well = all(row["what"] != "failed" and row.get("exit_code", 0) == 0 for row in rows)
    return {"gpu tests that pass": goal(value, "all", met=num_passed == len(tests) and ended_well)}


if __name__ == "__main__":
    sys.exit(main())
