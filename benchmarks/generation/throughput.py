"""Tokens per second of the chosen plan and of what others offer, at a device budget of a quarter of the weights.

Each contender takes the largest batch whose measured peak honours the budget. A batch after the other continues all prompts; one
batch of each contender is timed in turn (A B C, C B A), and what all of them take follows from their number. A contender that
cannot honour the budget with a single sequence is reported with its peak, and timed with that batch all the same: it had more
memory.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common.alternatives import DoesNotRun
from benchmarks.common.parts import Options, Part
from benchmarks.common.record import GoalEntry, Row, clear, goal, none_of
from benchmarks.generation.alternatives import DataMeter, Factory, Job, Ours, list_alternatives
from benchmarks.generation.subjects import Subject, setup_of, wanted_of
from optimizer.goal import GenerationGoal
from optimizer.hardware.machine import Machine
from optimizer.hardware.probe.probe import probe_machine
from optimizer.plan.generation import GenerationPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.trace.generation import profile_generation
from optimizer.runtime.job.measure_generation import make_prompts
from optimizer.runtime.meter.meter import Meter
from optimizer.search.generation.search import search_generation_plans

NAME = "throughput"
SHARE = 0.25
"""Share of the weights that the device has room for."""
CPU_GOAL, CUDA_GOAL = 5.0, 10.0
"""Least throughput, as a multiple of that of accelerate's offload."""
_OURS = "headroom"
_OFFLOADS = ("accelerate, host", "accelerate, disk")


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A contender with its largest batch."""

    name: str
    make: Factory
    batch_size: int
    """Sequences that it continues at once."""
    peak_bytes: int
    host_peak_bytes: int


def measure(options: Options) -> Iterator[Row]:
    setup = setup_of(options)
    machine = probe_machine(device=str(options.device), max_s=setup.probe_s)
    for subject in wanted_of(setup.subjects, options):
        with tempfile.TemporaryDirectory(prefix="headroom-") as folder:
            job = Job(spec=subject.spec, workload=subject.workload, device=options.device, scratch=Path(folder))
            yield from _measure_subject(job, subject, machine, num_rounds=setup.num_rounds)
        clear()


def summarize(rows: Sequence[Row]) -> Mapping[str, GoalEntry]:
    """Judge our throughput over that of each of accelerate's offloads, for each model."""
    found: dict[str, GoalEntry] = {}
    raced = [row for row in rows if row.get("what") == "raced"]
    for model in dict.fromkeys(row["model"] for row in raced):
        rates = {row["name"]: row["tokens_per_s"] for row in raced if row["model"] == model}
        wanted = CUDA_GOAL if any(row["device"] == "cuda" for row in raced) else CPU_GOAL
        for name in _OFFLOADS:
            if name in rates:
                ratio = round(rates[_OURS] / rates[name], 2)
                found[f"{model}: times the throughput of {name}"] = goal(
                    ratio, f">= {wanted}", met=ratio >= wanted, needs="full size"
                )
    over = [row["name"] for row in raced if row["name"] == _OURS and row["peak_bytes"] > row["budget_bytes"]]
    found["our peaks over the budget"] = none_of(len(over), raced)
    return found


PART = Part(name=NAME, measure=measure, summarize=summarize, case="model")


def _measure_subject(job: Job, subject: Subject, machine: Machine, *, num_rounds: int) -> Iterator[Row]:
    profile = profile_generation(job.spec, representations=["fp32"])
    budget_bytes = int(SHARE * weight_bytes(profile))
    head: Row = {"part": NAME, "model": subject.name, "device": job.device.type, "budget_bytes": budget_bytes}
    goal_ = GenerationGoal(device_budget_bytes=budget_bytes)
    result = search_generation_plans(profile, workload=job.workload, goal=goal_, machine=machine)
    plan, prediction = result.chosen.plan, result.chosen.prediction
    yield {**head, "what": "plan", "plan": plan.to_json(), "explanation": " ".join(result.explanation)}
    contenders = [fit_ours(job, plan)]
    for name, make in list_alternatives(job):
        try:
            contenders.append(fit_batch(name, make, job, budget_bytes=budget_bytes))
        except DoesNotRun as why:
            yield {**head, "what": "left out", "name": name, "why": str(why)}
    times = race(contenders, job, num_rounds=num_rounds)
    for each in contenders:
        seconds = total_s(times[each.name], each.batch_size, job.workload.num_sequences)
        row = {
            **head,
            "what": "raced",
            "name": each.name,
            "batch_size": each.batch_size,
            "peak_bytes": each.peak_bytes,
            "fits": each.peak_bytes <= budget_bytes,
            "host_peak_bytes": each.host_peak_bytes,
            "batch_s": [round(value, 3) for value in times[each.name]],
            "tokens_per_s": round(job.workload.num_sequences * job.workload.num_new_tokens / seconds, 1),
        }
        if each.name == _OURS:
            row |= {
                "predicted_tokens_per_s": round(prediction.tokens_per_s, 1),
                "predicted_peak_bytes": prediction.device_peak_bytes,
            }
        yield row


def weight_bytes(profile: GenerationProfile) -> int:
    """Bytes of all weights and buffers in fp32."""
    held = profile.weight_bytes("fp32")
    return held.outside + sum(held.by_block[kind] + held.staying_by_block[kind] for kind in profile.block_kinds)


def fit_ours(job: Job, plan: GenerationPlan) -> Fitted:
    def make(meter: Meter | None) -> Ours:
        return Ours(job, plan, meter)

    size = min(plan.sequences_per_pass, job.workload.num_sequences)
    peak_bytes, host_peak_bytes = measure_peak(make, job, batch_size=size)
    return Fitted(name=_OURS, make=make, batch_size=size, peak_bytes=peak_bytes, host_peak_bytes=host_peak_bytes)


def fit_batch(name: str, make: Factory, job: Job, *, budget_bytes: int) -> Fitted:
    """Find the largest batch whose measured peak is within the budget. Peaks grow linearly; that of the answer is measured."""
    measured = {1: measure_peak(make, job, batch_size=1)}
    if measured[1][0] > budget_bytes:
        peak_bytes, host_peak_bytes = measured[1]
        return Fitted(name=name, make=make, batch_size=1, peak_bytes=peak_bytes, host_peak_bytes=host_peak_bytes)
    measured[2] = measure_peak(make, job, batch_size=2)
    slope_bytes = max(1, measured[2][0] - measured[1][0])
    size = min(job.workload.num_sequences, max(1, 1 + (budget_bytes - measured[1][0]) // slope_bytes))
    while True:
        if size not in measured:
            measured[size] = measure_peak(make, job, batch_size=size)
        over_bytes = measured[size][0] - budget_bytes
        if over_bytes <= 0 or size == 1:
            peak_bytes, host_peak_bytes = measured[size]
            return Fitted(
                name=name, make=make, batch_size=size, peak_bytes=peak_bytes, host_peak_bytes=host_peak_bytes
            )
        size = max(1, size - max(1, over_bytes // slope_bytes))


def measure_peak(make: Factory, job: Job, *, batch_size: int) -> tuple[int, int]:
    """Device and host bytes at the peak of one batch."""
    meter = DataMeter(device=job.device)
    with meter.translating():
        contender = make(meter)
    try:
        meter.reset_peak()
        contender.generate(make_prompts(job.spec.vocab_size, job.workload)[:batch_size])
        peak = meter.peak()
        return peak.device_bytes, peak.host_bytes
    finally:
        contender.close()
        del contender
        clear()


def race(contenders: Sequence[Fitted], job: Job, *, num_rounds: int) -> dict[str, list[float]]:
    """Seconds of one batch of each contender, taken in turn."""
    prompts = make_prompts(job.spec.vocab_size, job.workload)
    times: dict[str, list[float]] = {each.name: [] for each in contenders}
    for index in range(num_rounds):
        for each in contenders if index % 2 == 0 else list(reversed(contenders)):
            contender = each.make(None)
            try:
                # A first short one, so that what is made once is made.
                contender.generate(prompts[:1])
                start_s = time.perf_counter()
                contender.generate(prompts[: each.batch_size])
                _synchronize(job.device)
                times[each.name].append(time.perf_counter() - start_s)
            finally:
                contender.close()
                del contender
                clear()
    return times


def total_s(batch_s: Sequence[float], batch_size: int, num_sequences: int) -> float:
    """Seconds of all batches; the last one, of fewer sequences, counts for its share."""
    return statistics.median(batch_s) * num_sequences / batch_size


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
