"""Says how many tests were left out for want of a CUDA device, whether one process collects them or several do (pytest-xdist)."""

from importlib.util import find_spec
from typing import Any

import pytest

NUM_LEFT_OUT = pytest.StashKey[int]()
NEEDS_PACKAGE = "needs the package "
"""The reason of a skipped test of a card begins with it; the check of a card does not count it as missing."""
NF4 = pytest.param(
    "nf4", marks=pytest.mark.skipif(find_spec("bitsandbytes") is None, reason=f"{NEEDS_PACKAGE}bitsandbytes")
)
"""A case of tests on a card, whose machine may lack what packs it."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["num_left_out"] = config.stash.get(NUM_LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # Every process collects all tests, and leaves out the same ones.
    node.config.stash[NUM_LEFT_OUT] = getattr(node, "workeroutput", {}).get("num_left_out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    num_left_out = config.stash.get(NUM_LEFT_OUT, 0)
    if num_left_out:
        terminalreporter.write_line(
            f"no CUDA device: {num_left_out} tests marked gpu are left out; each has a twin on the CPU (CONTRIBUTING.md)"
        )
