"""Spreads tests that show one claim for many cases over several runs: ``--breadth 2/4`` takes every fourth case, from the third.

Such a test is marked ``breadth``. Tests that show one claim together, each dear by itself, are marked with its name,
``breadth("several devices, end to end")``: each is a case of it, wherever it stands. Without the option all cases run, as when a
file is run by hand. ``make test`` takes a share that the commit draws, so that a few commits' runs have had every case. A claim
with fewer cases than shares has one of them in each.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import pytest

SEVERAL_DEVICES: Final = "jobs on several devices, end to end"
WHOLE_ROADS: Final = "a road from the first page or command to the end"
SURVIVAL: Final = "jobs outlive what ends beneath them"
OPENAI_API: Final = "the OpenAI API, live"
WHOLE_STACK: Final = "the whole stack starts and stops"
COMPILED_BLOCKS: Final = "compiled blocks"
BYTES_OF_RANKS: Final = "bytes are predicted on each rank"
JOBS_OF_ONE_BASE: Final = "jobs of one base"
TRAINING_BENCHMARK: Final = "the training benchmark runs"
GPU_CHECK: Final = "the parts of gpu_check run"
LEFT_TO_OTHERS = pytest.StashKey[int]()
"""Number of cases that this run leaves to others."""


def read_share(text: str) -> tuple[int, int]:
    """``1/4``: the second of four shares. Raises ArgumentTypeError."""
    share, _, count = text.partition("/")
    if share.isdecimal() and count.isdecimal() and int(share) < int(count):
        return int(share), int(count)
    raise argparse.ArgumentTypeError(f"{text!r} is no share; allowed: 0/1 for all cases, 0/4 to 3/4 for a quarter of them")


def left_to_others(claims: Mapping[str, str], *, share: int, count: int) -> set[str]:
    """The cases that other runs have. claims: what each case shows, by its name as pytest writes it."""
    cases: dict[str, list[str]] = defaultdict(list)
    for name, claim in claims.items():
        cases[claim].append(name)
    left: set[str] = set()
    for found in cases.values():
        num_shares = min(count, len(found))
        left.update(name for index, name in enumerate(found) if index % num_shares != share % num_shares)
    return left


def claim_of(name: str, mark: pytest.Mark) -> str:
    """The claim that a marked case shows: its test's own, unless the mark names one. name: ``test_file.py::test_name[case]``."""
    return str(mark.args[0]) if mark.args else name.partition("[")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--breadth", type=read_share, default=(0, 1), metavar="SHARE/SHARES", help="of cases marked breadth")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share, count = config.getoption("breadth")
    marked = {item.nodeid: mark for item in items if (mark := item.get_closest_marker("breadth"))}
    left = left_to_others({name: claim_of(name, mark) for name, mark in marked.items()}, share=share, count=count)
    if left:
        config.stash[LEFT_TO_OTHERS] = len(left)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
        items[:] = [item for item in items if item.nodeid not in left]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_to_others"] = session.config.stash.get(LEFT_TO_OTHERS, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # Every process collects all tests, and leaves the same ones to others.
    node.config.stash[LEFT_TO_OTHERS] = getattr(node, "workeroutput", {}).get("left_to_others", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if number := config.stash.get(LEFT_TO_OTHERS, 0):
        share, count = config.getoption("breadth")
        terminalreporter.write_line(
            f"breadth {share}/{count}: {number} further cases of claims that are shown here are left to other commits' runs; "
            "make test BREADTH=0/1 runs all"
        )
