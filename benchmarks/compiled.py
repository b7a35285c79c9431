"""Measures compiled blocks on the CPU device: predicted peaks, step time against blocks that run op by op, losses, cold start.

    python -m benchmarks.compiled [--quick] [--only PART ...] [--json FILE]

peaks       for each architecture one trace and one compiled model, and on it every plan of ``PLANS``; the meter's peak of a
            steady step against the predicted one.
speed       the same model and plan with compiled blocks and op by op, uncounted steps in turn (A B, B A, ...); the median of the
            paired ratios, and both peaks.
loss        50 steps of both, from the same weights on the same tokens.
cold start  in a process of its own, whose kernels another process has compiled before: the first step less the second.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.accuracy.configs import MODELS, SHAPES, make_config
from benchmarks.common.record import GoalEntry, Record, at_most, describe_machine, failure, goal
from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Device, Machine
from optimizer.hardware.rates import Rates
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.activations import ActivationsPlan, BlockChoice, BlockKernels, KernelsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.extent import Extent
from optimizer.profile.profile import Profile
from optimizer.profile.trace.trace import profile_model
from optimizer.runtime.job.measure import make_synthetic_batches, measure_step
from optimizer.runtime.job.prepare import build_prepared
from optimizer.runtime.meter.device import set_num_threads
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.step import Trainer
from optimizer.workload import TrainingWorkload

PARTS: Final = ("peaks", "speed", "loss", "cold start")
ARCHITECTURES: Final = (
    "llama",
    "gpt2",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "phi3",
    "gemma",
    "opt",
    "gpt_neox",
    "starcoder2",
    "phi",
    "falcon",
)
NUM_ARCHITECTURES, NUM_CASES = 10, 100
GOAL_PEAK, GOAL_RATIO, GOAL_LOSS, GOAL_COLD_S = 0.005, 0.85, 1e-5, 10.0
NUM_BLOCKS: Final = 2
MICRO_BATCH: Final = 4
LOSS_STEPS: Final = 50
CPU: Final = torch.device("cpu")
_ON_HOST: Final[dict[str, Any]] = {
    "gradients": GradientsPlan(choice="host"),
    "optimizer_state": OptimizerStatePlan(place="host"),
}
_TWICE: Final[dict[str, Any]] = {"batch": BatchPlan(micro_batch_size=MICRO_BATCH, accumulation_steps=2)}
_CONSUMED: Final[dict[str, Any]] = {"gradients": GradientsPlan(choice="consume")}
_CHUNKED: Final[dict[str, Any]] = {"logits_and_loss": LogitsAndLossPlan(num_chunks=3)}
PLANS: Final[dict[str, tuple[tuple[BlockChoice, ...], dict[str, Any]]]] = {
    "keep": (("keep",), {}),
    "recompute": (("recompute",), {}),
    "offload": (("offload",), {}),
    "recompute and keep": (("recompute", "keep"), {}),
    "offload and recompute": (("offload", "recompute"), {}),
    "keep, chunked loss": (("keep",), _CHUNKED),
    "keep, state on host": (("keep",), _ON_HOST),
    "recompute, state on host": (("recompute",), _ON_HOST),
    "keep, twice": (("keep",), _TWICE),
    "recompute, twice": (("recompute",), _TWICE),
    "offload, twice, state on host": (("offload",), {**_TWICE, **_ON_HOST}),
    "keep, consumed gradients": (("keep",), _CONSUMED),
    "recompute, weights on host": (("recompute",), {**_ON_HOST, "weights": WeightsPlan(place="host")}),
}
"""By name, the blocks' choices in turn, and the rest."""
_QUICK_PLANS: Final = ("keep", "recompute", "offload", "keep, twice")


def main(arguments: list[str]) -> int:
    options = _read_options(arguments)
    if options.cold_start:
        print(json.dumps(_first_step()))
        return 0
    set_num_threads()
    record = Record(
        file=options.json, machine=describe_machine(CPU), is_quick=options.quick, is_whole=set(options.only) == set(PARTS)
    )
    if "peaks" in options.only:
        for name in ARCHITECTURES[: 1 if options.quick else None]:
            record.add_all(name, _peaks(name, plans=_QUICK_PLANS if options.quick else tuple(PLANS)))
    if "speed" in options.only:
        record.add_all("speed", _speed(num_rounds=4 if options.quick else 16))
    if "loss" in options.only:
        record.add_all("loss", _losses(num_steps=10 if options.quick else LOSS_STEPS))
    if "cold start" in options.only:
        record.add_all("cold start", _cold_start())
    return record.finish(_goals(record))


def _read_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one architecture, few plans and rounds")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and summary there")
    parser.add_argument("--cold-start", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _goals(record: Record) -> dict[str, GoalEntry]:
    rows = record.rows
    peaks = [row for row in rows if row.get("what") == "peak"]
    failed = [row["of"] for row in rows if row.get("what") == "failed"]
    architectures = {row["model"] for row in peaks}
    by_part = {row["what"]: row for row in rows if row.get("what") in PARTS[1:]}
    speed = by_part.get("speed")
    is_enough = len(peaks) >= NUM_CASES and len(architectures) >= NUM_ARCHITECTURES
    worst = max((abs(row["error"]) for row in peaks), default=None)
    at_equal_peak = speed is not None and speed["compiled_peak_bytes"] <= speed["op_by_op_peak_bytes"]
    return {
        "worst error of a peak": at_most(worst, GOAL_PEAK),
        "cases of architectures": goal(
            f"{len(peaks)} of {len(architectures)}" if peaks else None,
            f">= {NUM_CASES} of {NUM_ARCHITECTURES}",
            met=is_enough,
            needs="all cases",
        ),
        "parts and architectures that failed": goal(", ".join(map(str, failed)) or "none", "none", met=not failed),
        "step time over that op by op, at no higher a peak": goal(
            None if speed is None else speed["ratio"],
            f"<= {GOAL_RATIO}",
            met=at_equal_peak and speed is not None and speed["ratio"] <= GOAL_RATIO,
            needs="full size",
        ),
        "largest difference of losses": at_most(by_part["loss"]["difference"] if "loss" in by_part else None, GOAL_LOSS),
        "cold start with kernels at hand, s": at_most(
            by_part["cold start"]["seconds"] if "cold start" in by_part else None, GOAL_COLD_S, needs="full size"
        ),
    }


# Peaks.


def _peaks(name: str, *, plans: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    shape = replace(SHAPES["tiny"], num_blocks=NUM_BLOCKS)
    spec = read_model_spec({**make_config(name, shape), **MODELS[name]})
    start_s = time.process_time()
    extent = Extent(representations=("fp32@compiled",), shapes=((MICRO_BATCH, shape.sequence_length),))
    profile = profile_model(spec, extent=extent)
    trace_s = time.process_time() - start_s
    workload = TrainingWorkload(sequence_length=shape.sequence_length, global_batch_size=MICRO_BATCH)
    model = build_prepared(spec, weights=WeightsPlan(), workload=workload, device=CPU)
    for label in plans:
        try:
            found = _compare(profile, spec, model, label, workload)
            yield {"what": "peak", "model": name, "plan": label, **found, "trace_s": trace_s}
        except Exception as error:
            yield failure(f"{name}, {label}", error)


def _compare(
    profile: Profile, spec: ModelSpec, model: torch.nn.Module, label: str, workload: TrainingWorkload
) -> dict[str, Any]:
    plan = _plan(spec, label, kernels="compiled")
    asked = replace(
        workload,
        global_batch_size=plan.batch.global_batch_size,
        max_grad_norm=None if plan.gradients.choice == "consume" else 1.0,
    )
    predicted = estimate_training(profile, plan=plan, workload=asked, machine=_machine())
    measured = measure_step(model, plan=plan, workload=asked)
    for parameter in model.parameters():
        parameter.grad = None
    error = predicted.device_peak_bytes / measured.device_peak_bytes - 1
    return {
        "predicted_bytes": predicted.device_peak_bytes,
        "measured_bytes": measured.device_peak_bytes,
        "error": error,
        "host_difference_bytes": predicted.host_peak_bytes - measured.host_peak_bytes,
    }


def _plan(spec: ModelSpec, label: str, *, kernels: BlockKernels) -> Plan:
    choices, rest = PLANS[label]
    per_block = tuple(choices[index % len(choices)] for index in range(spec.num_blocks))
    batch = {"batch": BatchPlan(micro_batch_size=MICRO_BATCH, accumulation_steps=1)}
    return Plan(**{**batch, "activations": ActivationsPlan(per_block=per_block), "kernels": KernelsPlan(blocks=kernels), **rest})


def _machine() -> Machine:
    """Rates decide no bytes."""
    rates = Rates(
        source="table",
        memory_bytes_per_s=2e10,
        op_overhead_s=1e-5,
        matmul_flops_per_s={"fp32": 1e11},
        attention_flops_per_s={"fp32": 5e10},
        optimizer_elements_per_s={"adamw_32": 5e8},
        host_to_device_bytes_per_s=1e10,
        device_to_host_bytes_per_s=1e10,
    )
    device = Device(kind="cpu", name="CPU", memory_bytes=2**36)
    return Machine(name="CPU", device=device, host_memory_bytes=2**36, rates=rates)


# Speed and losses.


_LARGER: Final = replace(SHAPES["long"], hidden_size=384, intermediate_size=1024)


def _trainer(kernels: BlockKernels, *, meter: Meter | None = None, shape: Any = _LARGER) -> tuple[Trainer, TrainingWorkload]:
    torch.manual_seed(0)
    spec = read_model_spec(make_config("llama", shape))
    workload = TrainingWorkload(sequence_length=shape.sequence_length, global_batch_size=MICRO_BATCH)
    plan = _plan(spec, "keep", kernels=kernels)
    model = build_prepared(spec, weights=plan.weights, workload=workload, device=CPU)
    return Trainer(model, plan=plan, workload=workload, device=CPU, meter=meter), workload


def _speed(*, num_rounds: int) -> Iterator[dict[str, Any]]:
    kinds: tuple[BlockKernels, ...] = ("compiled", "memory_saving")
    peaks = {kernels: _peak_of(kernels) for kernels in kinds}
    trainers = {kernels: _trainer(kernels)[0] for kernels in kinds}
    times: dict[BlockKernels, list[float]] = {kernels: [] for kernels in kinds}
    for index in range(num_rounds + 2):
        for kernels in kinds if index % 2 == 0 else reversed(kinds):
            step_s = _step(trainers[kernels], index)[1]
            if index >= 2:
                times[kernels].append(step_s)
    for trainer in trainers.values():
        trainer.close()
    ratios = [one / other for one, other in zip(*times.values(), strict=True)]
    yield {
        "what": "speed",
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "compiled_ms": round(1000 * statistics.median(times["compiled"]), 1),
        "op_by_op_ms": round(1000 * statistics.median(times["memory_saving"]), 1),
        "compiled_peak_bytes": peaks["compiled"],
        "op_by_op_peak_bytes": peaks["memory_saving"],
    }


def _peak_of(kernels: BlockKernels) -> int:
    meter = Meter(device=CPU)
    trainer, _ = _trainer(kernels, meter=meter)
    for index in range(2):
        _step(trainer, index)
    trainer.close()
    return meter.peak().device_bytes


def _step(trainer: Trainer, index: int) -> tuple[float, float]:
    """The loss, and the processor's time in seconds."""
    workload = replace(trainer.workload, seed=index)
    batches = make_synthetic_batches(trainer.model, plan=trainer.plan, workload=workload)
    start_s = time.process_time()
    loss = trainer.step(batches, learning_rate=1e-4).loss
    return loss, time.process_time() - start_s


def _losses(*, num_steps: int) -> Iterator[dict[str, Any]]:
    found: dict[BlockKernels, list[float]] = {}
    kinds: tuple[BlockKernels, ...] = ("compiled", "memory_saving")
    for kernels in kinds:
        trainer, _ = _trainer(kernels, shape=SHAPES["tiny"])
        found[kernels] = [_step(trainer, index)[0] for index in range(num_steps)]
        trainer.close()
    differences = [abs(one - other) for one, other in zip(*found.values(), strict=True)]
    last = {kernels: losses[-1] for kernels, losses in found.items()}
    yield {"what": "loss", "num_steps": num_steps, "difference": max(differences), "last": last}


# Cold start.


def _cold_start() -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.compiled", "--cold-start"]
    runs = [json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout) for _ in range(2)]
    yield {"what": "cold start", **runs[1], "before": runs[0]}


def _first_step() -> dict[str, Any]:
    set_num_threads()
    trainer, _ = _trainer("compiled", shape=SHAPES["tiny"])
    wall_s = []
    for index in range(2):
        start_s = time.perf_counter()
        _, spent_s = _step(trainer, index)
        wall_s.append((time.perf_counter() - start_s, spent_s))
    trainer.close()
    first, second = wall_s
    return {"seconds": round(first[0] - second[0], 2), "processor_s": round(first[1] - second[1], 2), "num_kinds": 1}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
