"""Takes out each wait of the runtime, one at a time, in a process of its own that imports the changed module: who notices.

Those that could are asked: first who noticed in the latest result, then, cheapest first, the cases on the hostile device that
reach the wait, then the tests that do.
"""

import json
import multiprocessing
import queue
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.context import ForkContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.journal import Journal
from benchmarks.common.record import GoalEntry, Row, goal
from benchmarks.waits.reach import Witness, find_witnesses, run_tests
from benchmarks.waits.seeds import find_difference

if TYPE_CHECKING:
    from tests.hostile_device.mutations import Mutation

HANG_S = 60.0
"""Seconds after which a case or a test, of which the slowest takes a few, counts as one that hangs."""
_LOOK_S = 300.0
"""The same of looking for who reaches what, where the tracing of lines makes each many times as slow."""
_GOAL_SHARE = 1.0
_RESULT = Path(__file__).resolve().parents[1] / "results" / "waits.json"
Say = Callable[[Any], None]


def take_out_each(journal: Journal, *, places: Sequence[str], sources: str) -> None:
    """A row for each wait, or for each in the modules or lines named. Raises RuntimeError where the suite itself fails."""
    _import_libraries()
    from tests.hostile_device.mutations import list_mutations

    context = multiprocessing.get_context("fork")
    wanted = [each for each in list_mutations() if not places or {each.place, each.place.partition(":")[0]} & set(places)]
    if all(journal.has(what="wait", sources=sources, wait=mutation.name) for mutation in wanted):
        return
    lines = [_place_of(mutation) for mutation in wanted]
    expected, witnesses = _in_process(context, lambda say: say(find_witnesses(say, wanted=lines)), silent_s=_LOOK_S)
    if isinstance(witnesses, str):
        raise RuntimeError(f"who reaches which wait was not found: {witnesses}")
    noticed = _read_who_noticed()
    for mutation in wanted:
        # Lines move, so the words are compared; the sort keeps the order among the others.
        first = sorted(witnesses, key=lambda witness: witness.name not in noticed.get(_words_of(mutation.name), ()))
        journal.do(
            partial(_take_out, context, mutation, witnesses=first, expected=expected),
            what="wait", sources=sources, wait=mutation.name,
        )  # fmt: skip


def _read_who_noticed() -> dict[str, set[str]]:
    """By a wait's name without its line, the cases and tests that noticed waits of that name in the latest result."""
    noticed: dict[str, set[str]] = {}
    if _RESULT.exists():
        for row in json.loads(_RESULT.read_text())["rows"]:
            if row["what"] == "wait" and row["by"]:
                noticed.setdefault(_words_of(row["wait"]), set()).add(row["by"])
    return noticed


def _words_of(name: str) -> str:
    """``tiers.tiers:141 wait: x`` without the number."""
    place, _, words = name.partition(" ")
    return f"{place.partition(':')[0]} {words}"


def summarize(rows: Sequence[Row]) -> Mapping[str, GoalEntry]:
    outcomes = [row["outcome"] for row in rows if row["what"] == "wait"]
    num_caught = outcomes.count("caught")
    share = round(num_caught / len(outcomes), 4) if outcomes else None
    return {
        "share of removed waits that are caught": goal(share, _GOAL_SHARE, met=share == _GOAL_SHARE),
        "removed waits": goal(len(outcomes) or None, "all", met=bool(outcomes), needs="all cases"),
    }


def _take_out(context: ForkContext, mutation: "Mutation", *, witnesses: Sequence[Witness], expected: Mapping[str, str]) -> Row:
    begin_s = time.monotonic()
    reaching = [witness for witness in witnesses if _place_of(mutation) in witness.lines]
    by = how = ""
    if reaching:
        by, how = _in_process(context, lambda say: _ask(reaching, mutation, expected, say), silent_s=HANG_S)
    return {
        "outcome": "caught" if by else "survived",
        "by": by,
        "how": how,
        "num_reaching": len(reaching),
        "seconds": round(time.monotonic() - begin_s, 1),
    }


def _place_of(mutation: "Mutation") -> tuple[str, int]:
    """Module and line, as witnesses have them."""
    module, _, line = mutation.place.rpartition(":")
    return module, int(line)


def _ask(reaching: Sequence[Witness], mutation: "Mutation", expected: Mapping[str, str], say: Say) -> None:
    """In a process of its own: say who notices and how, or twice nothing."""
    from tests.hostile_device.mutations import install

    install(mutation)
    from tests.hostile_device.cases import list_quick_cases

    cases = {case.name: case for case in list_quick_cases()}
    for witness in reaching:
        if not witness.is_test:
            say(witness.name)
            difference = find_difference(cases[witness.name], expected[witness.name], schedule="late", seed=0)
            if difference:
                say((witness.name, difference))
                return
    failures = _Failures(say)
    tests = [witness.name for witness in reaching if witness.is_test]
    has_failed = bool(tests) and run_tests(tests, failures)
    say(((failures.names or tests)[0], "fails") if has_failed else ("", ""))


class _Failures:
    """A plugin of pytest's that notes which tests failed, and says each as it begins."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self.names: list[str] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._say(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.names.append(report.nodeid)


def _in_process(context: ForkContext, run: Callable[[Say], None], *, silent_s: float) -> Any:
    """The tuple that it says in the end; else what it said last, and that it died then or fell silent."""
    said = context.Queue()
    process = context.Process(target=run, args=(said.put,))
    process.start()
    latest: Any = "nothing"
    deadline_s = time.monotonic() + silent_s
    while not isinstance(latest, tuple):
        try:
            latest = said.get(timeout=0.2)
            deadline_s = time.monotonic() + silent_s
        except queue.Empty:
            if time.monotonic() > deadline_s:
                latest = (latest, f"hangs for {silent_s:.0f} s")
            elif not process.is_alive():
                latest = (latest, "the process died")
    process.kill()
    process.join()
    return latest


def _import_libraries() -> None:
    """All that the cases import from elsewhere, so that each process begins with it; of this program's runtime nothing."""
    import tests.hostile_device.cases

    assert tests.hostile_device.cases.QUICK
    for name in [name for name in sys.modules if name.partition(".")[0] in ("optimizer", "tests")]:
        del sys.modules[name]
