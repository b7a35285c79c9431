"""Shows on the hostile device (``tests/hostile_device``) that copies, threads and streams wait for all that they must.

    python -m benchmarks.waits seeds --seeds 20               every plan of the suite, each seed another order: the CPU's bits
    python -m benchmarks.waits removed [--only tiers.tiers]   each wait taken out, one at a time: what notices

A wait is taken out in a process of its own, which imports the changed module and runs the quick cases until one fails, then the
tests that watch memory, times and errors.
"""

import argparse
import contextlib
import multiprocessing
import os
import queue
import sys
import time
from collections import Counter
from multiprocessing.context import ForkContext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.hostile_device.mutations import Mutation

TESTS = (
    "tests/hostile_device/test_waits.py",
    "tests/optimizer/runtime/tiers/test_tiers.py",
    "tests/optimizer/runtime/tiers/test_homes.py",
    "tests/optimizer/runtime/step/test_batch.py",
    "tests/optimizer/runtime/step/test_host_update.py",
    "tests/optimizer/runtime/step/test_sparse_gradients.py",
    "tests/optimizer/runtime/step/test_step.py::test_an_update_during_backward_names_the_tensor_whose_gradient_is_not_finite",
)
"""Asked where all bits are right without a wait."""
LIMIT_S = 300.0
"""Seconds after which a run without a wait counts as one that hangs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    seeds = commands.add_parser("seeds", help="every plan under many orders")
    seeds.add_argument("--seeds", type=int, default=20)
    seeds.add_argument("--limit-s", type=float, default=float("inf"))
    removed = commands.add_parser("removed", help="each wait taken out")
    removed.add_argument("--only", nargs="*", default=[], help="modules, or lines (tiers.tiers:242)")
    options = parser.parse_args()
    if options.command == "seeds":
        sys.exit(run_seeds(options.seeds, limit_s=options.limit_s))
    sys.exit(run_removed(options.only))


def run_seeds(num_seeds: int, *, limit_s: float = float("inf")) -> int:
    """Each case with the late and the early schedule, then with so many random ones; returns how many differed."""
    import torch

    from tests.hostile_device.cases import list_all_cases

    torch.set_num_threads(1)
    begin_s, num_runs, num_wrong = time.monotonic(), 0, 0
    schedules: list[tuple[Any, int]] = [("late", 0), ("early", 0), *(("random", seed) for seed in range(num_seeds))]
    cases = list_all_cases()
    for schedule, seed in schedules:
        for case in cases:
            if time.monotonic() - begin_s > limit_s:
                print(f"stopped at {schedule} {seed}, {case.name}")
                break
            found = _try(case, repr(case.expected), schedule=schedule, seed=seed)
            num_runs += 1
            if found:
                num_wrong += 1
                print(f"{case.name}, {schedule} {seed}: {found}", flush=True)
        print(f"{schedule} {seed}: {num_runs} runs, {num_wrong} wrong", flush=True)
    return num_wrong


def run_removed(places: list[str]) -> int:
    """Print what becomes of each, or of those in the modules or lines named; returns how many nobody notices."""
    import torch

    _import_libraries()
    from tests.hostile_device.mutations import list_mutations

    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    expected = _in_process(context, None, {})
    assert isinstance(expected, dict), expected
    counts: Counter[str] = Counter()
    for mutation in list_mutations():
        if places and not {mutation.place, mutation.place.partition(":")[0]} & set(places):
            continue
        outcome = str(_in_process(context, mutation, expected))
        counts[outcome.partition(":")[0]] += 1
        print(f"{mutation.name} | {outcome}", flush=True)
    print(dict(counts))
    return counts.total() - counts["caught"]


def _import_libraries() -> None:
    """All that the cases import from elsewhere, so that each process begins with it; of this program nothing."""
    import tests.hostile_device.cases

    assert tests.hostile_device.cases.QUICK
    for name in [name for name in sys.modules if name.partition(".")[0] in ("optimizer", "tests")]:
        del sys.modules[name]


def _in_process(context: ForkContext, mutation: "Mutation | None", expected: dict[str, str]) -> str | dict[str, str]:
    answers = context.Queue()
    process = context.Process(target=_run_quick, args=(answers, mutation, expected))
    process.start()
    outcome: str | dict[str, str] = "failed: the process died"
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        try:
            outcome = answers.get(timeout=0.2)
            break
        except queue.Empty:
            if not process.is_alive():
                break
    else:
        outcome = f"caught: hangs for {LIMIT_S:.0f} s"
    process.kill()
    process.join()
    return outcome


def _run_quick(answers: Any, mutation: "Mutation | None", expected: dict[str, str]) -> None:
    """In a process of its own. Without a mutation: what the cases give on the plain CPU device."""
    from tests.hostile_device.mutations import install

    if mutation is not None:
        install(mutation)
    from tests.hostile_device.cases import list_quick_cases

    cases = list_quick_cases()
    if mutation is None:
        answers.put({case.name: repr(case.expected) for case in cases})
        return
    if mutation.module.startswith("optimizer.runtime.generation"):
        cases = [*(case for case in cases if case.name[0].isdigit()), *(case for case in cases if not case.name[0].isdigit())]
    for case in cases:
        found = _try(case, expected[case.name], schedule="late", seed=0)
        if found:
            answers.put(f"caught: {case.name}: {found}")
            return
    found = _first_failure()
    answers.put(f"caught: {found}" if found else "survived:")


class _Failures:
    """A plugin of pytest's that notes which tests failed."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.names.append(report.nodeid)


def _first_failure() -> str:
    """The first test that fails where bits are no witness: some waits are for memory, for times or for errors."""
    import pytest

    failures = _Failures()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
        pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain", *TESTS], plugins=[failures])
    return failures.names[0] if failures.names else ""


def _try(case: Any, expected: str, *, schedule: Any, seed: int) -> str:
    """The difference that a run makes; empty for none."""
    try:
        return "" if repr(case.on_hostile_device(schedule=schedule, seed=seed)) == expected else "other bits"
    except Exception as error:
        return f"{type(error).__name__}: " + " ".join(str(error).split())[:160]


if __name__ == "__main__":
    main()
