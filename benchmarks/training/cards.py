"""The part of ``benchmarks.training`` for a CUDA machine: fine-tuning under the caps of cards of 8, 12, 16 and 24 GB.

The cap is a meter's, which also limits torch's allocator. Models have the shapes of published ones and random weights. Each
case first tries the search's choice, then a plan written by hand; what fails is reported in its row. Minutes are scarce, so no
case is begun after ``DEADLINE_S``, and a model whose state does not fit on the host is left out with the sizes. On the CPU
device the same code runs on small shapes, which is how it is tested.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.common.alternatives import Contender, DoesNotRun, Factory, Job, Ours, list_alternatives
from benchmarks.common.packages import list_impossible
from benchmarks.common.record import GoalEntry, Record, Row, all_of, clear, goal
from optimizer.base.errors import HeadroomError
from optimizer.base.units import GIB, MIB, format_bytes
from optimizer.goal import Goal
from optimizer.hardware.machine import Machine
from optimizer.hardware.probe.probe import probe_machine
from optimizer.models.presets import PRESETS
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.trace.trace import profile_model
from optimizer.runtime.meter.device import prepared_device
from optimizer.runtime.meter.meter import Meter
from optimizer.search.search import search_plans
from optimizer.workload import Adapter, TrainingWorkload

DEADLINE_S = 420.0
OFFLOAD_SPEED_GOAL = 0.9
HOST_SHARE = 0.9
"""Share of the host's memory that a case may plan to use."""
THREE_B = {
    **PRESETS["llama-3.2-1b"].config,
    "hidden_size": 3_072,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "head_dim": 128,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model under one cap."""

    name: str
    spec: ModelSpec
    cap_bytes: int
    workload: TrainingWorkload
    by_hand: Plan
    """Tried where the search's choice fails."""
    has_alternatives: bool = False

    @property
    def host_bytes_by_hand(self) -> int:
        """Weights, gradients, fp32 master weights and moments, as far as they leave the device."""
        weights, trains_all = self.by_hand.weights, self.workload.adapter is None
        per_element = weights.bytes_per_element if weights.place == "host" else 0
        if trains_all:
            per_element += weights.bytes_per_element if self.by_hand.gradients.choice == "host" else 0
            per_element += 12 if self.by_hand.optimizer_state.place == "host" else 0
        return per_element * self.spec.num_parameters


@dataclass(frozen=True, kw_only=True)
class Cards:
    """The cases of a run and the number of their steps."""

    cases: tuple[Case, ...]
    offload_spec: ModelSpec
    """Whose optimizer is once resident and once on the host."""
    offload_workload: TrainingWorkload
    num_steps: int = 3
    probe_s: float = 6.0


def cuda_cards() -> Cards:
    one_b, eight_b = PRESETS["llama-3.2-1b"].spec, PRESETS["llama-3-8b"].spec
    three_b = read_model_spec(THREE_B)
    long = TrainingWorkload(sequence_length=2048, global_batch_size=16, learning_rate=1e-5)
    short = replace(long, global_batch_size=8)
    lora = replace(short, global_batch_size=4, adapter=Adapter())
    return Cards(
        offload_spec=one_b,
        offload_workload=long,
        cases=(
            Case(
                name="LoRA of an 8B shape",
                spec=eight_b,
                cap_bytes=8 * GIB,
                workload=lora,
                by_hand=streamed_plan(eight_b, lora, micro_batch_size=1),
            ),
            Case(
                name="full fine-tune of a 3B shape",
                spec=three_b,
                cap_bytes=12 * GIB,
                workload=short,
                by_hand=streamed_plan(three_b, short, micro_batch_size=2),
            ),
            Case(
                name="full fine-tune of a 1B shape",
                spec=one_b,
                cap_bytes=16 * GIB,
                workload=short,
                by_hand=streamed_plan(one_b, short, micro_batch_size=2),
                has_alternatives=True,
            ),
            Case(
                name="full fine-tune of an 8B shape",
                spec=eight_b,
                cap_bytes=24 * GIB,
                workload=short,
                by_hand=streamed_plan(eight_b, short, micro_batch_size=4),
            ),
        ),
    )


def small_cards() -> Cards:
    """The same cases on shapes that the CPU device runs in a moment."""
    spec = read_model_spec(
        {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 172,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
            "max_position_embeddings": 64,
        }
    )
    workload = TrainingWorkload(sequence_length=32, global_batch_size=4, learning_rate=1e-3)
    given = {"adapters": replace(workload, adapter=Adapter(rank=4)), "all weights": workload}
    cases = [
        Case(
            name=name,
            spec=spec,
            cap_bytes=3 * MIB // 2,
            workload=each,
            by_hand=streamed_plan(spec, each, micro_batch_size=1),
            has_alternatives=each.adapter is None,
        )
        for name, each in given.items()
    ]
    return Cards(cases=tuple(cases), offload_spec=spec, offload_workload=workload, num_steps=2, probe_s=0.1)


def streamed_plan(spec: ModelSpec, workload: TrainingWorkload, *, micro_batch_size: int) -> Plan:
    """Weights, gradients and state on the host, blocks recomputed, the loss in chunks."""
    every: BlockChoice = "recompute"
    trains_all = workload.adapter is None
    return Plan(
        batch=BatchPlan(
            micro_batch_size=micro_batch_size, accumulation_steps=workload.global_batch_size // micro_batch_size
        ),
        weights=WeightsPlan(dtype="bf16", place="host"),
        gradients=GradientsPlan(choice="host" if trains_all else "keep"),
        optimizer_state=OptimizerStatePlan(place="host" if trains_all else "device"),
        activations=ActivationsPlan(per_block=(every,) * spec.num_blocks),
        logits_and_loss=LogitsAndLossPlan(num_chunks=8),
    )


def measure_cards(record: Record, device: torch.device, *, quick: bool, cards: Cards | None = None) -> None:
    """All cases, each row recorded as it comes. quick: the two smallest caps and the optimizer on the host."""
    cards = cards or (cuda_cards() if device.type == "cuda" else small_cards())
    with prepared_device(device):
        machine = probe_machine(device=str(device), max_s=2.0 if quick else cards.probe_s)
        record.machine["rates"] = machine.to_json()["rates"]
        record.add_all(
            "optimizer on the host", guarded_by_time(record, "optimizer on the host", offload_rows(cards, device))
        )
        for case in cards.cases[:2] if quick else cards.cases:
            record.add_all(case.name, guarded_by_time(record, case.name, case_rows(cards, case, machine, device)))


def guarded_by_time(record: Record, name: str, rows: Iterator[Row]) -> Iterator[Row]:
    if time.monotonic() - record.started_s > DEADLINE_S:
        yield {"what": "left out", "of": name, "why_not": "out of time"}
        return
    yield from rows


def offload_rows(cards: Cards, device: torch.device) -> Iterator[Row]:
    """The same step with the optimizer's state resident and on the host, in turn, each built twice."""
    spec, workload = cards.offload_spec, cards.offload_workload
    resident = replace(
        streamed_plan(spec, workload, micro_batch_size=max(1, workload.global_batch_size // 4)),
        weights=WeightsPlan(dtype="bf16"),
        gradients=GradientsPlan(),
        optimizer_state=OptimizerStatePlan(),
    )
    on_host = replace(
        resident, gradients=GradientsPlan(choice="host"), optimizer_state=OptimizerStatePlan(place="host")
    )
    job = Job(spec=spec, workload=workload, device=device, draws_quickly=True)
    plans = {"resident": resident, "host": on_host}
    times: dict[str, list[float]] = {name: [] for name in plans}
    peaks: dict[str, int] = {}
    for _ in range(2):
        for name, plan in plans.items():
            meter = Meter(device=device)
            times[name] += run_steps(Ours(job, plan, meter), num_steps=cards.num_steps)
            peaks[name] = meter.peak().device_bytes
            clear()
    pairs = zip(times["resident"], times["host"], strict=True)
    yield {
        "what": "optimizer on the host",
        "tokens_per_step": workload.tokens_per_step,
        "resident_ms": round(statistics.median(times["resident"]), 1),
        "host_ms": round(statistics.median(times["host"]), 1),
        "resident_peak_bytes": peaks["resident"],
        "host_state_peak_bytes": peaks["host"],
        "speed_of_resident": round(statistics.median(a / b for a, b in pairs), 4),
    }


def case_rows(cards: Cards, case: Case, machine: Machine, device: torch.device) -> Iterator[Row]:
    """Ours under the cap, then the alternatives under the same one."""
    head: Row = {"what": "card", "name": case.name, "cap_bytes": case.cap_bytes}
    job = Job(spec=case.spec, workload=case.workload, device=device, draws_quickly=True)
    best_ms: float | None = None
    for source, plan in plans_of(case, machine):
        if isinstance(plan, str):
            yield {**head, "plan_from": source, "finished": False, "why_not": plan}
            continue
        row = {**head, "plan_from": source, **measure_under_cap(_ours(job, plan), case, cards.num_steps, device)}
        yield row
        if row["finished"]:
            best_ms = row["step_ms"]
            break
    if case.has_alternatives:
        yield from alternative_rows(head, replace(job, autocast=True), case, cards.num_steps, best_ms)


def plans_of(case: Case, machine: Machine) -> Iterator[tuple[str, Plan | str]]:
    """Each with where it comes from; a sentence where there is none."""
    wanted = Goal(device_budget_bytes=case.cap_bytes, allow_lossy=True, forbid=list_impossible())
    try:
        profile = profile_model(case.spec, adapter=case.workload.adapter)
        yield "search", search_plans(profile, workload=case.workload, goal=wanted, machine=machine).chosen.plan
    except HeadroomError as error:
        yield "search", str(error)
    available_bytes = int(machine.host_memory_bytes * HOST_SHARE)
    if case.host_bytes_by_hand <= available_bytes:
        yield "hand", case.by_hand
        return
    scratch_bytes = shutil.disk_usage(tempfile.gettempdir()).free
    state_bytes = 12 * case.spec.num_parameters
    on_disk = replace(case, by_hand=replace(case.by_hand, optimizer_state=OptimizerStatePlan(place="disk")))
    if on_disk.host_bytes_by_hand <= available_bytes and state_bytes < scratch_bytes:
        yield "hand, state on the disk", on_disk.by_hand
        return
    why_not = (
        f"weights, gradients and state take {format_bytes(case.host_bytes_by_hand)} of host memory; this machine has "
        f"{format_bytes(available_bytes)} for them and {format_bytes(scratch_bytes)} of scratch disk"
    )
    yield "hand", why_not


def measure_under_cap(make: Factory, case: Case, num_steps: int, device: torch.device) -> Row:
    """A few steps; over the cap is an answer, not a failure."""
    meter = Meter(device=device, cap_bytes=case.cap_bytes)
    try:
        with meter.translating():
            contender = make(meter)
            times = run_steps(contender, num_steps=num_steps)
    except DoesNotRun as error:
        return {"finished": False, "why_not": str(error)}
    except HeadroomError as error:
        return {"finished": False, "error": str(error)}
    finally:
        clear()
    peak = meter.peak()
    step_ms = statistics.median(times)
    return {
        "finished": True,
        "step_ms": round(step_ms, 1),
        "tokens_per_s": round(case.workload.tokens_per_step / step_ms * 1000, 1),
        "peak_bytes": peak.device_bytes,
        "host_peak_bytes": peak.host_bytes,
        "moment": peak.moment,
        "by_category": peak.device_bytes_by_category,
    }


def run_steps(contender: Contender, *, num_steps: int) -> list[float]:
    """Milliseconds of each step after a first one; the contender is closed."""
    times: list[float] = []
    try:
        contender.step()
        for _ in range(num_steps):
            start_s = time.perf_counter()
            contender.step()
            times.append((time.perf_counter() - start_s) * 1000)
    finally:
        contender.close()
    return times


def alternative_rows(head: Row, job: Job, case: Case, num_steps: int, best_ms: float | None) -> Iterator[Row]:
    for name, make in list_alternatives(job):
        row = {**head, "what": "card alternative", "alternative": name}
        try:
            row |= measure_under_cap(make, case, num_steps, job.device)
        except Exception as error:
            row |= {"finished": False, "error": f"{type(error).__name__}: {error}"}
            clear()
        if row["finished"] and best_ms is not None:
            row["ours_over_it"] = round(best_ms / row["step_ms"], 4)
        yield row


def summarize_cards(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    """Judge the cases; one of which no row finished is missed."""
    cases = {row["name"]: False for row in rows if row["what"] == "card"}
    for row in rows:
        if row["what"] == "card" and row["finished"]:
            cases[row["name"]] = True
    speeds = [row["speed_of_resident"] for row in rows if row["what"] == "optimizer on the host"]
    ratios = [row["ours_over_it"] for row in rows if "ours_over_it" in row]
    num_failed = sum(row["what"] in ("failed", "left out") for row in rows)
    worst, speed = max(ratios, default=None), min(speeds, default=None)
    value = "no alternative finished" if cases and worst is None else worst
    return {
        "rows that failed or were left out": goal(num_failed, 0, met=num_failed == 0),
        "models trained under their card's cap": all_of(cases.values()),
        "speed with the optimizer on the host": goal(
            speed,
            OFFLOAD_SPEED_GOAL,
            met=speed is not None and speed >= OFFLOAD_SPEED_GOAL,
            needs="full size",
        ),
        "step time over the alternatives under the same cap, worst": goal(
            value, 1.0, met=worst is None or worst <= 1.0, needs="full size"
        ),
    }


def _ours(job: Job, plan: Plan) -> Factory:
    return lambda meter: Ours(job, plan, meter)
