"""Measures the meter itself: what it costs per step of the demo's model, and whether it agrees with torch's profiler.

Cost: two copies of one model take the same steps in turn (A B, B A, ...), one metered, one not; the median of paired ratios is
quoted. Agreement: the highest sum of the meter's events against that of the profiler's allocation events, whole process tiers
together, at the peak of a steady step.

    python -m benchmarks.meter [--quick] [--json FILE]
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.record import GoalEntry, Record, at_most, describe_machine
from optimizer.models.build import build_model
from optimizer.models.presets import PRESETS
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.meter.device import set_num_threads
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.step import Trainer
from optimizer.workload import TrainingWorkload

MODEL = "headroom-demo-10m"
WORKLOAD = TrainingWorkload(sequence_length=256, global_batch_size=8)
CPU = torch.device("cpu")
GOAL_OVERHEAD = 0.03
GOAL_DISAGREEMENT = 0.01


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under a minute on two cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here as well")
    arguments = parser.parse_args()
    set_num_threads()
    record = Record(file=arguments.json, machine=describe_machine(CPU), is_quick=arguments.quick)
    for row in measure_agreement(("keep",) if arguments.quick else ("keep", "recompute", "offload")):
        record.add(row)
    record.add(measure_cost(num_pairs=6 if arguments.quick else 30))
    return record.finish(summarize(record.rows))


def measure_cost(*, num_pairs: int) -> dict[str, Any]:
    """Wall time of a metered step over that of a plain one."""
    plan = make_plan("keep")
    metered = make_trainer(plan, Meter(device=CPU))
    plain = make_trainer(plan, None)
    batches = make_synthetic_batches(plain.model, plan=plan, workload=WORKLOAD)
    for trainer in (metered, plain):
        trainer.step(batches, learning_rate=1e-4)
    wall_ratios: list[float] = []
    cpu_ratios: list[float] = []
    plain_ms: list[float] = []
    for index in range(num_pairs):
        order = (metered, plain) if index % 2 == 0 else (plain, metered)
        wall_s: dict[int, float] = {}
        cpu_s: dict[int, float] = {}
        for trainer in order:
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            trainer.step(batches, learning_rate=1e-4)
            wall_s[id(trainer)] = time.perf_counter() - start_s
            cpu_s[id(trainer)] = time.process_time() - start_cpu_s
        wall_ratios.append(wall_s[id(metered)] / wall_s[id(plain)])
        cpu_ratios.append(cpu_s[id(metered)] / cpu_s[id(plain)])
        plain_ms.append(wall_s[id(plain)] * 1000)
    return {
        "what": "cost",
        "plan": "keep",
        "num_pairs": num_pairs,
        "plain_step_ms": round(statistics.median(plain_ms), 1),
        "overhead": round(statistics.median(wall_ratios) - 1, 5),
        "overhead_cpu_time": round(statistics.median(cpu_ratios) - 1, 5),
        "overhead_quartiles": [round(value - 1, 5) for value in statistics.quantiles(wall_ratios, n=4)],
    }


def measure_agreement(choices: Iterable[BlockChoice]) -> list[dict[str, Any]]:
    """Peak of one steady step by both counts, for one plan per choice."""
    rows = []
    for choice in choices:
        plan = make_plan(choice)
        meter = Meter(device=CPU)
        trainer = make_trainer(plan, meter)
        batches = make_synthetic_batches(trainer.model, plan=plan, workload=WORKLOAD)
        trainer.step(batches, learning_rate=1e-4)
        # Inputs were counted in the first step, so both counts start from here.
        base_bytes = meter.device_bytes
        meter.start_timeline()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            trainer.step(batches, learning_rate=1e-4)
        counted_bytes = base_bytes + highest_sum(delta for _, _, delta in meter.take_events())
        profiled_bytes = base_bytes + highest_sum(allocation_deltas(profiler))
        rows.append(
            {
                "what": "agreement",
                "plan": choice,
                "meter_bytes": counted_bytes,
                "profiler_bytes": profiled_bytes,
                "disagreement": round(abs(profiled_bytes - counted_bytes) / profiled_bytes, 6),
                "device_peak_bytes": meter.peak().device_bytes,
            }
        )
        trainer.close()
    return rows


def summarize(rows: list[dict[str, Any]]) -> dict[str, GoalEntry]:
    worst = max(row["disagreement"] for row in rows if row["what"] == "agreement")
    cost = next(row["overhead"] for row in rows if row["what"] == "cost")
    return {
        "meter_disagreement_with_profiler": at_most(worst, GOAL_DISAGREEMENT),
        "meter_overhead_of_step": at_most(cost, GOAL_OVERHEAD, needs="full size"),
    }


def make_plan(choice: BlockChoice) -> Plan:
    spec = read_model_spec(PRESETS[MODEL].config)
    return Plan(
        batch=BatchPlan(micro_batch_size=WORKLOAD.global_batch_size, accumulation_steps=1),
        activations=ActivationsPlan(per_block=(choice,) * spec.num_blocks),
    )


def make_trainer(plan: Plan, meter: Meter | None) -> Trainer:
    model = build_model(read_model_spec(PRESETS[MODEL].config), seed=1)
    return Trainer(model, plan=plan, workload=WORKLOAD, device=CPU, meter=meter)


def allocation_deltas(profiler: Any) -> list[int]:
    """Bytes that each allocation event adds or frees, in order of time."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def highest_sum(deltas: Iterable[int]) -> int:
    highest = current = 0
    for delta in deltas:
        current += delta
        highest = max(highest, current)
    return highest


if __name__ == "__main__":
    sys.exit(main())
