"""Measures training: each technique alone, planned combinations, and what people use today, on the same work.

    python -m benchmarks.training [--quick] [--json FILE] [--device cuda:0] [--only PART] [--rounds N]

On the CPU device: the head in chunks against all logits at once; each technique alone against transformers' plain loop; the
search's choice at 60, 40 and 25 % of that loop's peak, against every alternative that fits there; models whose weights,
gradients and state are four times the budget. Steps are taken in turn (A B C, C B A, ...), the median of paired ratios is
quoted; times are of uncounted runs, peaks of counted ones, by one meter for all. On CUDA see ``cards.py``.

Needs torch, transformers, numpy, scipy; peft and bitsandbytes for their rows. An error in one row is reported in it, and
the rows after it still run.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.alternatives import DoesNotRun, Factory, Job, Ours, list_alternatives
from benchmarks.common.paired import measure_peak, paired_ratio, race, tokens_per_s
from benchmarks.common.record import GoalEntry, Record, Row, all_of, at_most, clear, describe_machine, failure, goal
from benchmarks.training.cards import measure_cards, summarize_cards
from benchmarks.training.head import HeadShape, head_rows
from benchmarks.training.plans import TECHNIQUES, describe, make_plan
from optimizer.base.errors import HeadroomError, NoFeasiblePlan
from optimizer.estimate.training import estimate_training
from optimizer.goal import Goal
from optimizer.hardware.machine import Machine
from optimizer.hardware.probe.probe import probe_machine
from optimizer.models.presets import PRESETS
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.profile.trace.trace import profile_model
from optimizer.search.search import search_plans
from optimizer.workload import Adapter, TrainingWorkload

CPU = torch.device("cpu")
SHARES = (0.60, 0.40, 0.25)
"""Budgets, of the plain loop's peak."""
HEAD_PEAK_GOAL = 5.0
HEAD_TIME_GOAL = 0.15
OVER_BUDGET_GOAL = 4.0
_QUICK_SPEC = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
}
_DEEP_SPEC = {**_QUICK_SPEC, "num_hidden_layers": 16, "vocab_size": 256}
"""Nearly all of its weights are in blocks, so that nearly all of them can stream."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The model of a run and its number of rounds."""

    spec: ModelSpec
    workload: TrainingWorkload
    num_rounds: int
    """Steps of each contender that count."""
    head: HeadShape
    deep_spec: ModelSpec
    """The model that is trained in a quarter of its weights, gradients and state."""
    probe_s: float = 8.0


def quick_setup() -> Setup:
    return Setup(
        spec=read_model_spec(_QUICK_SPEC),
        workload=TrainingWorkload(sequence_length=64, global_batch_size=8, learning_rate=1e-3),
        num_rounds=2,
        deep_spec=read_model_spec({**_DEEP_SPEC, "num_hidden_layers": 8}),
        head=HeadShape(num_tokens=1024, width=256, num_pairs=1),
        probe_s=2.0,
    )


def full_setup() -> Setup:
    return Setup(
        spec=PRESETS["headroom-demo-10m"].spec,
        workload=TrainingWorkload(sequence_length=256, global_batch_size=16, learning_rate=1e-3),
        num_rounds=7,
        deep_spec=read_model_spec(_DEEP_SPEC),
        head=HeadShape(num_tokens=2048, width=512, chunk_counts=(4, 8, 16), num_pairs=5),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="a small model and few rounds; under a minute on two idle cores"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here as well, after every row")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cards", action="store_true", help="the part for cards; on the CPU device on small shapes")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="these parts alone; may be repeated")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="steps of each contender that count, and pairs of heads"
    )
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    machine = describe_machine(device)
    record = Record(file=arguments.json, machine=machine, is_quick=arguments.quick, is_whole=not arguments.only)
    if device.type == "cuda" or arguments.cards:
        measure_cards(record, device, quick=arguments.quick)
        return record.finish(summarize_cards(record.rows))
    setup = quick_setup() if arguments.quick else full_setup()
    if arguments.rounds:
        head = replace(setup.head, num_pairs=arguments.rounds)
        setup = replace(setup, num_rounds=arguments.rounds, head=head)
    measure_cpu(record, setup, parts=arguments.only or list(PARTS))
    return record.finish(summarize(record.rows))


def measure_cpu(record: Record, setup: Setup, *, parts: Sequence[str]) -> None:
    """Measure all parts in order; an error in one does not stop the others."""
    bench = Bench(setup)
    for name in parts:
        record.add_all(name, PARTS[name](bench))


class Bench:
    """Machine, profiles and peaks that several parts need, made once."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.job = Job(spec=setup.spec, workload=setup.workload, device=CPU)
        self._machine: Machine | None = None
        self._profile: Profile | None = None
        self._adapter_profile: Profile | None = None
        self._peaks: dict[str, int | str] | None = None

    @property
    def machine(self) -> Machine:
        if self._machine is None:
            self._machine = probe_machine(device="cpu", max_s=self.setup.probe_s)
        return self._machine

    @property
    def profile(self) -> Profile:
        if self._profile is None:
            self._profile = profile_model(self.setup.spec)
        return self._profile

    @property
    def adapter_profile(self) -> Profile:
        if self._adapter_profile is None:
            self._adapter_profile = profile_model(self.setup.spec, adapter=Adapter())
        return self._adapter_profile

    @property
    def alternatives(self) -> dict[str, Factory]:
        return dict(list_alternatives(self.job))

    @property
    def alternative_peaks(self) -> dict[str, int | str]:
        """Measured bytes, or why it does not run."""
        if self._peaks is None:
            self._peaks = {name: _peak_or_reason(make, CPU) for name, make in self.alternatives.items()}
        return self._peaks

    @property
    def plain_peak_bytes(self) -> int:
        peak = self.alternative_peaks["transformers"]
        if isinstance(peak, str):
            raise RuntimeError(f"the plain loop does not run: {peak}")
        return peak


def _peak_or_reason(make: Factory, device: torch.device) -> int | str:
    try:
        return int(measure_peak(make, device)["peak_bytes"])
    except DoesNotRun as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# Each technique alone.


def technique_rows(bench: Bench) -> Iterator[Row]:
    """Each against transformers' plain loop, in turn; what it is priced at beside what was measured."""
    plain = bench.alternatives["transformers"]
    for name, changes in TECHNIQUES.items():
        head: Row = {"what": "technique", "name": name}
        if name == "activations to a remote store" and not os.environ.get("HEADROOM_REMOTE_URL"):
            yield {**head, "why_not": "no store at HEADROOM_REMOTE_URL"}
            continue
        try:
            yield {**head, **_technique_row(bench, changes, plain)}
        except Exception as error:
            yield {**head, **failure(name, error)}
        clear()


def _technique_row(bench: Bench, changes: Mapping[str, Any], plain: Factory) -> Row:
    workload = bench.setup.workload
    if changes.get("gradients") == "consume":
        workload = replace(workload, max_grad_norm=None)
    if changes.get("adapter"):
        workload = replace(workload, adapter=Adapter())
    job = replace(bench.job, workload=workload)
    plan = make_plan(job.spec, workload, **changes)
    ours = _ours(job, plan)
    measured = measure_peak(ours, CPU)
    times = race({"plain": plain, "ours": ours}, num_rounds=bench.setup.num_rounds)
    row = {
        "peak_bytes": measured["peak_bytes"],
        "share_of_plain": round(measured["peak_bytes"] / bench.plain_peak_bytes, 3),
        "time_over_plain": round(paired_ratio(times["ours"], times["plain"]) - 1, 4),
        "tokens_per_s": tokens_per_s(times["ours"], workload),
        "host_peak_bytes": measured["host_peak_bytes"],
        "disk_peak_bytes": measured["disk_peak_bytes"],
        "moment": measured["moment"],
        "lossless": plan.is_lossless,
    }
    row["measured_ms"] = round(statistics.median(times["ours"]), 1)
    profile = bench.profile if workload.adapter is None else bench.adapter_profile
    prediction = estimate_training(profile, plan=plan, workload=workload, machine=bench.machine)
    return row | {
        "predicted_peak_bytes": prediction.device_peak_bytes,
        "predicted_ms": round(prediction.step_ms, 1),
    }


def _ours(job: Job, plan: Plan) -> Factory:
    return lambda meter: Ours(job, plan, meter)


# Alternatives, and plans at budgets.


def alternative_rows(bench: Bench) -> Iterator[Row]:
    plain = bench.alternatives["transformers"]
    for name, make in bench.alternatives.items():
        peak = bench.alternative_peaks[name]
        if isinstance(peak, str):
            yield {"what": "alternative", "name": name, "why_not": peak}
            continue
        times = race({"plain": plain, name: make}, num_rounds=bench.setup.num_rounds)
        yield {
            "what": "alternative",
            "name": name,
            "peak_bytes": peak,
            "share_of_plain": round(peak / bench.plain_peak_bytes, 3),
            "time_over_plain": round(paired_ratio(times[name], times["plain"]) - 1, 4),
            "tokens_per_s": tokens_per_s(times[name], bench.setup.workload),
        }


def budget_rows(bench: Bench) -> Iterator[Row]:
    """The search's choice at shares of the plain peak, against all alternatives that fit there, in turn."""
    for share in SHARES:
        budget_bytes = int(share * bench.plain_peak_bytes)
        head: Row = {"what": "budget", "share": share, "budget_bytes": budget_bytes}
        wanted = Goal(device_budget_bytes=budget_bytes)
        started_s = time.monotonic()
        try:
            result = search_plans(bench.profile, workload=bench.setup.workload, goal=wanted, machine=bench.machine)
        except NoFeasiblePlan as error:
            yield {**head, "finished": False, "error": str(error)}
            continue
        head["search_s"] = round(time.monotonic() - started_s, 2)
        try:
            yield {**head, **_budget_row(bench, result.chosen.plan, budget_bytes)}
        except HeadroomError as error:
            yield {**head, "finished": False, "plan": describe(result.chosen.plan), "error": str(error)}
        clear()


def _budget_row(bench: Bench, plan: Plan, budget_bytes: int) -> Row:
    ours = _ours(bench.job, plan)
    measured = measure_peak(ours, CPU, cap_bytes=budget_bytes)
    peaks = bench.alternative_peaks
    fitting = {name: peak for name, peak in peaks.items() if isinstance(peak, int) and peak <= budget_bytes}
    contenders = {
        "transformers": bench.alternatives["transformers"],
        "ours": ours,
        **{name: bench.alternatives[name] for name in fitting},
    }
    times = race(contenders, num_rounds=bench.setup.num_rounds)
    prediction = estimate_training(bench.profile, plan=plan, workload=bench.setup.workload, machine=bench.machine)
    in_same_peak = [name for name, peak in fitting.items() if peak <= measured["peak_bytes"]]
    return {
        "finished": True,
        "plan": describe(plan),
        "peak_bytes": measured["peak_bytes"],
        "predicted_peak_bytes": prediction.device_peak_bytes,
        "host_peak_bytes": measured["host_peak_bytes"],
        "time_over_plain": round(paired_ratio(times["ours"], times["transformers"]) - 1, 4),
        "tokens_per_s": tokens_per_s(times["ours"], bench.setup.workload),
        "predicted_ms": round(prediction.step_ms, 1),
        "measured_ms": round(statistics.median(times["ours"]), 1),
        **_against("in_same_peak", in_same_peak, times, peaks),
        **_against("in_budget", list(fitting), times, peaks),
    }


def _against(label: str, names: Sequence[str], times: Mapping[str, list[float]], peaks: Mapping[str, int | str]) -> Row:
    """The fastest of them; its ratio below 1 says that ours is faster."""
    if not names:
        return {f"best_{label}": None}
    best = min(names, key=lambda name: statistics.median(times[name]))
    return {
        f"best_{label}": best,
        f"best_{label}_bytes": peaks[best],
        f"ours_over_best_{label}": paired_ratio(times["ours"], times[best]),
    }


# Larger than the device.


def larger_rows(bench: Bench) -> Iterator[Row]:
    """A model whose weights, gradients and state are four times the budget; with state on the host, then on the disk."""
    spec = bench.setup.deep_spec
    workload = TrainingWorkload(sequence_length=64, global_batch_size=4, learning_rate=1e-3)
    job = Job(spec=spec, workload=workload, device=CPU)
    plain = measure_peak(_ours(job, make_plan(spec, workload, cut=4)), CPU, num_steps=4)
    static_bytes = 16 * spec.num_parameters
    budget_bytes = int(static_bytes / OVER_BUDGET_GOAL)
    for place in ("host", "disk"):
        plan = make_plan(
            spec,
            workload,
            cut=4,
            blocks="recompute",
            gradients="host",
            state={"place": place},
            weights={"place": place},
        )
        row: Row = {
            "what": "larger than the device",
            "state_and_weights_on": place,
            "static_bytes": static_bytes,
            "budget_bytes": budget_bytes,
            "static_over_budget": round(static_bytes / budget_bytes, 2),
            "plain_peak_bytes": plain["peak_bytes"],
        }
        try:
            found = measure_peak(_ours(job, plan), CPU, num_steps=4, cap_bytes=budget_bytes)
        except HeadroomError as error:
            yield {**row, "trains": False, "error": str(error)}
            continue
        losses = found["losses"]
        yield {
            **row,
            "trains": losses[-1] < losses[0],
            "losses": [round(loss, 5) for loss in losses],
            "losses_equal_plain": losses == plain["losses"],
            "peak_bytes": found["peak_bytes"],
            "host_peak_bytes": found["host_peak_bytes"],
            "disk_peak_bytes": found["disk_peak_bytes"],
        }


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "head": lambda bench: head_rows(bench.setup.head, bench.machine),
    "alternatives": alternative_rows,
    "techniques": technique_rows,
    "budgets": budget_rows,
    "larger": larger_rows,
}


def summarize(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    num_failed = sum(row["what"] == "failed" for row in rows)
    budgets = [row for row in rows if row["what"] == "budget"]
    larger = [row for row in rows if row["what"] == "larger than the device"]
    heads = [row for row in rows if row["what"] == "head"]
    small_enough = [row for row in heads if row["peak_falls_by"] >= HEAD_PEAK_GOAL]
    head = min(small_enough or heads, key=lambda row: row["time_over_plain"], default=None)
    falls = None if head is None else head["peak_falls_by"]
    slower = None if head is None else head["time_over_plain"]
    return {
        "rows that failed": goal(num_failed, 0, met=num_failed == 0),
        "head in chunks: peak falls by": goal(falls, HEAD_PEAK_GOAL, met=bool(small_enough), needs="full size"),
        "head in chunks: time over plain": at_most(slower, HEAD_TIME_GOAL, needs="full size"),
        "budgets of 60, 40 and 25 % in which training finishes": all_of(row["finished"] for row in budgets),
        "step time over the best alternative in the same peak, worst": _worst(budgets, "ours_over_best_in_same_peak"),
        "step time over the best alternative in the same budget, worst": _worst(budgets, "ours_over_best_in_budget"),
        "models of 4 times the budget that train to plain training's bits": all_of(
            row["trains"] and row["losses_equal_plain"] for row in larger
        ),
    }


def _worst(budgets: Sequence[Row], name: str) -> GoalEntry:
    """Judge the worst ratio: met if no alternative fits, since none is faster; missed if ours did not finish in a budget."""
    ratios = [row[name] for row in budgets if name in row]
    value = max(ratios) if ratios else "no alternative fits" if budgets else None
    met = all(row["finished"] for row in budgets) and all(ratio <= 1.0 for ratio in ratios)
    return goal(value, 1.0, met=met, needs="full size")
