"""The proof that the estimate is right: predicted against measured, bytes and time, over many models and plans.

    python -m benchmarks.accuracy [--quick] [--json FILE] [--rows FILE] [--only PART] [--case WORD] [--device cpu]

Real steps of each case (``cases.py``) are held against what was predicted of it. On the CPU device bytes are counted by
an independent meter (``meter.py``) beside the runtime's; verdicts are asked for around the measured peak, and some
carried out under a cap; other ways to estimate answer for the same cases (``common/estimators.py``), as many as 7 minutes suffice
for; steps are timed in rounds, the first over all cases and the others as far as 12 minutes go, beside a yardstick (``times.py``
says what that normalises), and one calibration, fitted to four fifths of the cases, is judged on the fifth that was held back.

``--rows`` appends each row to a file as it comes, and a later run with the same file goes on from there. A case that fails is
reported in a row of its own, and the others still run. On a CUDA device see ``cards.py``, which needs torch, transformers,
numpy and scipy, and ends by itself in under eight minutes.
"""

import argparse
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.accuracy.card_summary import summarize_cards
from benchmarks.accuracy.cards import measure_cards
from benchmarks.accuracy.cases import Case, list_cases
from benchmarks.accuracy.run import Bench, carry_out, measure_memory, why_left_out
from benchmarks.accuracy.summary import summarize, tabulate_as_timed, tabulate_errors, tabulate_estimators
from benchmarks.accuracy.times import NUM_ROUNDS, describe_pace, measure_times, predicted_rows
from benchmarks.common.estimators import ask_all
from benchmarks.common.journal import Journal
from benchmarks.common.record import Row, describe_machine
from benchmarks.common.remote_store import remote_store
from benchmarks.common.yardstick import get_yardstick
from optimizer.base.units import format_bytes
from optimizer.hardware.machine import Machine
from optimizer.hardware.probe.probe import probe_machine
from optimizer.runtime.meter.device import set_num_threads
from optimizer.workload import GenerationWorkload

PARTS = ("memory", "estimators", "time")
PROBE_S = 50.0
ESTIMATORS_BUDGET_S = 440.0
"""No case is asked about after this."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="a few cases of one model; under a minute on two idle cores"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="append rows as they come; go on from what is there")
    parser.add_argument("--only", choices=PARTS, action="append", help="these parts alone; may be repeated")
    parser.add_argument(
        "--case", action="append", metavar="WORD", help="cases with this in their name; may be repeated"
    )
    parser.add_argument("--cards", action="store_true", help="the part for cards; on the CPU device on small shapes")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    set_num_threads()
    machine = describe_machine(device)
    journal = Journal(
        file=arguments.json,
        lines=arguments.rows,
        machine=machine,
        is_quick=arguments.quick,
        is_whole=not arguments.case and "memory" in (arguments.only or PARTS),
        show=show,
    )
    if device.type == "cuda" or arguments.cards:
        measure_cards(journal, device, quick=arguments.quick)
        return journal.finish(summarize_cards(journal.rows))
    with remote_store():
        return measure_cpu(journal, arguments)


def measure_cpu(journal: Journal, arguments: argparse.Namespace) -> int:
    """Measure the parts that were asked for, over the cases that were asked for; return the exit code."""
    cases = [case for case in list_cases() if is_wanted(case, arguments.case, quick=arguments.quick)]
    bench = Bench(find_machine(journal, probe_s=2.0 if arguments.quick else PROBE_S), cases)
    parts = arguments.only or PARTS
    run(journal, bench, cases, parts=parts, num_rounds=1 if arguments.quick else NUM_ROUNDS)
    return conclude(journal, bench, cases)


def is_wanted(case: Case, words: Sequence[str] | None, *, quick: bool) -> bool:
    """Decide on one case. quick: one model without adapters, so that two shapes are profiled and no more."""
    if words:
        return any(word in case.name for word in words)
    return not quick or (case.model == "llama" and case.shape in ("tiny", "small") and not (case.adapter or case.is_padded))


def find_machine(journal: Journal, *, probe_s: float) -> Machine:
    """Probed now, unless the journal has one: all rows are of one machine and its rates."""
    if not journal.has(what="machine"):
        yardstick = get_yardstick()
        before_ms = yardstick.measure_ms()
        machine = probe_machine(device="cpu", max_s=probe_s).to_json()
        beside = [round(ms, 3) for ms in (before_ms, yardstick.measure_ms())]
        journal.add({"what": "machine", "machine": machine, "yardstick_ms": beside})
    row = next(row for row in journal.rows if row["what"] == "machine")
    return Machine.from_json(row["machine"])


def run(journal: Journal, bench: Bench, cases: Sequence[Case], *, parts: Sequence[str], num_rounds: int) -> None:
    """The parts in order, each over all cases that can run here."""
    runnable = []
    for case in cases:
        why_not = why_left_out(case)
        if why_not is None:
            runnable.append(case)
        else:
            journal.do(dict, what="left out", case=case.name, why_not=why_not)
    if "memory" in parts:
        for case in runnable:
            count(journal, bench, case)
    if "estimators" in parts:
        ask_in_time(journal, runnable)
    if "time" in parts:
        measure_times(journal, [case for case in runnable if case.is_timed], num_rounds=num_rounds)


def count(journal: Journal, bench: Bench, case: Case) -> None:
    journal.do(lambda: measure_memory(bench, case), what="memory", case=case.name)
    if case.is_carried_out:
        journal.do(lambda: carry_out(bench, case), what="carried out", case=case.name)


def ask_in_time(journal: Journal, cases: Sequence[Case]) -> None:
    """Ask in an order that mixes models, so that the cases left out when time runs out are of no one kind."""
    started_s = time.monotonic()
    for case in sorted(cases, key=lambda case: hashlib.sha256(case.name.encode()).digest()):
        if time.monotonic() - started_s > ESTIMATORS_BUDGET_S:
            return
        ask(journal, case)


def ask(journal: Journal, case: Case) -> None:
    """Ask other estimators about a case that the memory part has measured.

    Left out are large models, which would only take MemTracker longer, and plain modules and padded batches, which others
    do not know.
    """
    memory = next((row for row in journal.rows if row["what"] == "memory" and row["case"] == case.name), None)
    if (
        memory is None
        or case.is_timed
        or case.is_padded
        or case.module is not None
        or isinstance(case.workload, GenerationWorkload)
        or journal.has(what="estimator", case=case.name)
    ):
        return
    measured_bytes = max(memory["metered_bytes"], memory["profiled_bytes"])
    for row in ask_all(case, measured_bytes=measured_bytes):
        journal.add(row)


def conclude(journal: Journal, bench: Bench, cases: Sequence[Case]) -> int:
    """Print and write goals and tables from all rows; return the exit code."""
    journal.rows = [*journal.rows, *predicted_rows(bench, cases, journal.rows)]
    memory = [row for row in journal.rows if row["what"] == "memory"]
    timed = [row for row in journal.rows if row["what"] == "time"]
    if timed:
        journal.tables["pace"] = describe_pace(journal.rows)
        journal.tables["time as the clock had it"] = tabulate_as_timed(timed)
        for name in ("pace", "time as the clock had it"):
            print(name, *(f"{key}={value}" for key, value in journal.tables[name].items()), sep="  ")
    for key in ("model", "shape", "techniques"):
        journal.tables[f"bytes by {key}"] = tabulate_errors(memory, key)
        journal.tables[f"time by {key}"] = tabulate_errors(timed, key)
    journal.tables["estimators"] = tabulate_estimators(journal.rows)
    for name, entry in journal.tables["estimators"].items():
        print(name, *(f"{key}={value}" for key, value in entry.items()), sep="  ")
    return journal.finish(summarize(journal.rows))


def show(row: Row) -> str:
    """One line for people."""
    if row["what"] == "memory":
        unseen = f", {row['unseen_by_meter_bytes']:+d} B unseen by the meter" if row["unseen_by_meter_bytes"] else ""
        return (
            f"{row['case']:44} predicted {format_bytes(row['predicted_bytes']):>9}  error {row['error']:+.4%} "
            f"({row['error_to_meter_bytes']:+d} B to the meter{unseen}) host {row['host_error_bytes']:+d} B"
            f"{'  held back' if row['held_back'] else ''}"
        )
    if row["what"] == "estimator":
        answer = row["why_not"] or f"error {row['error']:+.2%} in {row['took_ms']:.0f} ms"
        return f"{row['case']:44} {row['estimator']}: {answer}"
    if row["what"] == "machine":
        return f"machine: {row['machine']['name']}"
    if row["what"] == "carried out":
        return f"{row['case']:44} finished {row['finished']}, refused one byte below {row['refused_below']}"
    return "  ".join(f"{name}={value}" for name, value in row.items() if name != "traceback")
