"""Errors of predicted step times over architectures and plans, before and after calibration.

``python -m benchmarks.step_times [--quick] [--json FILE]`` probes this machine, prices and runs every case, fits a calibration
to four fifths of them and prints the errors of the rest, which had no part in it; then where the milliseconds were predicted
and by how much each kind was corrected. ``--thread-clock`` counts the running thread's processor time in the probe and in the
steps, and of the steps the least: what can be measured while others use the machine. No plan then uses the disk, which waits.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.record import GoalEntry, Record, at_most
from benchmarks.search.subjects import rotary
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.training import estimate_training
from optimizer.hardware.calibration import TimedRun, fit_calibration, read_time_factors
from optimizer.hardware.machine import Machine
from optimizer.hardware.probe import clock
from optimizer.hardware.probe.probe import probe_machine
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.profile.trace.trace import profile_model
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.job.prepare import build_prepared
from optimizer.runtime.meter.device import prepared_device
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.step import Trainer
from optimizer.workload import TrainingWorkload

SEED = 7
NUM_STEPS = 5
"""Steps of each case; the first, without optimizer state, does not count."""
PLANS_PER_MODEL = 8
MEDIAN_GOAL, WORST_GOAL = 0.08, 0.25
HELD_BACK = 5
"""One case of so many is never used for fitting."""


def _rotary(model_type: str, hidden: int, blocks: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return rotary(model_type, hidden, blocks, vocabulary, max_position_embeddings=1024, **more)


MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "llama 256": (_rotary("llama", 256, 6, 4096), 4, 128),
    "llama 64": (_rotary("llama", 64, 4, 512), 4, 64),
    "llama 512": (_rotary("llama", 512, 3, 8192), 2, 128),
    "gpt2 256": (
        {"model_type": "gpt2", "n_embd": 256, "n_layer": 6, "n_head": 4, "vocab_size": 4096, "n_positions": 512}, 2, 192,
    ),
    "opt 192": (
        {
            "model_type": "opt", "hidden_size": 192, "word_embed_proj_dim": 192, "ffn_dim": 768, "num_hidden_layers": 6,
            "num_attention_heads": 4, "vocab_size": 8192, "max_position_embeddings": 512,
        }, 4, 96,
    ),
    "qwen2 192": (_rotary("qwen2", 192, 8, 8192, tie_word_embeddings=True), 2, 256),
    "phi3 320": (_rotary("phi3", 320, 4, 4096, num_key_value_heads=4), 2, 128),
    "gemma2 128": (_rotary("gemma2", 128, 4, 4096, head_dim=32, sliding_window=64), 4, 128),
    "mixtral 128": (_rotary("mixtral", 128, 4, 2048, num_local_experts=4, num_experts_per_tok=2), 4, 128),
    "decoder 256": (
        _rotary("headroom_decoder", 256, 6, 4096, attention_block=64, bos_token_id=0, eos_token_id=0), 4, 128,
    ),
}  # fmt: skip
"""Configuration, micro-batch size, sequence length."""
QUICK_MODELS = ("llama 256", "gpt2 256")


def make_plans(num_blocks: int, micro_batch_size: int, *, waits: bool) -> dict[str, Plan]:
    """waits: with the disk, whose time no thread's clock shows."""
    plain = Plan(
        batch=BatchPlan(micro_batch_size=micro_batch_size, accumulation_steps=1),
        activations=ActivationsPlan(per_block=_repeat(num_blocks, "keep")),
    )

    def with_blocks(*choices: BlockChoice, **more: Any) -> Plan:
        return replace(plain, activations=ActivationsPlan(per_block=_repeat(num_blocks, *choices), **more))

    on_host = replace(plain, gradients=GradientsPlan(choice="host"))
    plans: dict[str, Plan] = {
        "keep": plain,
        "recompute": with_blocks("recompute"),
        "selective": with_blocks("selective"),
        "offload": with_blocks("offload"),
        "offload, recompute, keep": with_blocks("offload", "recompute", "keep"),
        "offload as int8": with_blocks("offload", "keep", compress="int8"),
        "offload as bf16": with_blocks("offload", compress="bf16"),
        "4 micro-batches of a quarter": replace(
            plain, batch=BatchPlan(micro_batch_size=max(1, micro_batch_size // 4), accumulation_steps=4)
        ),
        "8-bit state": replace(plain, optimizer_state=OptimizerStatePlan(bits=8)),
        "gradients on the host": on_host,
        "state on the host": replace(on_host, optimizer_state=OptimizerStatePlan(place="host")),
        "weights and state on the host": replace(
            on_host, weights=WeightsPlan(place="host"), optimizer_state=OptimizerStatePlan(place="host")
        ),
        "4 chunks, recompute": replace(with_blocks("recompute", "keep"), logits_and_loss=LogitsAndLossPlan(num_chunks=4)),
        "consume": replace(plain, gradients=GradientsPlan(choice="consume")),
        "4 micro-batches, 8 bits, recompute": replace(
            with_blocks("recompute"),
            batch=BatchPlan(micro_batch_size=max(1, micro_batch_size // 2), accumulation_steps=4),
            optimizer_state=OptimizerStatePlan(bits=8),
        ),
    }
    if waits:
        plans["offload to disk"] = with_blocks("offload_disk", "keep")
    return plans


def _repeat(number: int, *choices: BlockChoice) -> tuple[BlockChoice, ...]:
    return tuple(choices[index % len(choices)] for index in range(number))


def list_cases(names: tuple[str, ...], *, waits: bool, number: int) -> Iterator[tuple[str, ModelSpec, str, Plan, int]]:
    """The plain plan of each model and some others, ``number`` in all, the same ones every time."""
    chance = random.Random(SEED)
    for name in names:
        config, micro_batch_size, sequence_length = MODELS[name]
        spec = read_model_spec(config)
        plans = make_plans(spec.num_blocks, micro_batch_size, waits=waits)
        chosen = ["keep", *chance.sample([label for label in plans if label != "keep"], number - 1)]
        for label in chosen:
            yield name, spec, label, plans[label], sequence_length


def measure_ms(spec: ModelSpec, plan: Plan, workload: TrainingWorkload, *, now_s: Callable[[], float]) -> float:
    """Time of the steps after the first, unmetered as most of a job's are: the median, or of processor time the least."""
    device = torch.device("cpu")
    times: list[float] = []
    with prepared_device(device):
        model = build_prepared(spec, weights=plan.weights, workload=workload, device=device)
        trainer = Trainer(model, plan=plan, workload=workload, device=device, meter=Meter(device=device))
        try:
            for index in range(NUM_STEPS):
                batches = make_synthetic_batches(model, plan=plan, workload=workload)
                started_s = now_s()
                trainer.step(batches, learning_rate=1e-4, is_counted=index == 0)
                times.append((now_s() - started_s) * 1000)
        finally:
            trainer.close(keep_weights=False)
    del model, trainer
    gc.collect()
    return min(times[1:]) if now_s is time.thread_time else statistics.median(times[1:])


def run_cases(names: tuple[str, ...], machine: Machine, *, on_thread: bool, number: int) -> list[dict[str, Any]]:
    now_s = time.thread_time if on_thread else time.perf_counter
    profiles: dict[str, Profile] = {}
    rows: list[dict[str, Any]] = []
    for name, spec, label, plan, sequence_length in list_cases(names, waits=not on_thread, number=number):
        if name not in profiles:
            profiles = {name: profile_model(spec)}
        workload = TrainingWorkload(
            sequence_length=sequence_length,
            global_batch_size=plan.batch.global_batch_size,
            max_grad_norm=None if plan.gradients.choice == "consume" else 1.0,
        )
        predicted = estimate_training(profiles[name], plan=plan, workload=workload, machine=machine)
        measured_ms = measure_ms(spec, plan, workload, now_s=now_s)
        rows.append(_row(name, label, predicted, measured_ms, held_back=len(rows) % HELD_BACK == HELD_BACK - 1))
        print(
            f"{name:12} {label:36} predicted {predicted.step_ms:8.1f} measured {measured_ms:8.1f} "
            f"{predicted.step_ms / measured_ms - 1:+7.1%}",
            flush=True,
        )
    return rows


def _row(name: str, label: str, predicted: Prediction, measured_ms: float, *, held_back: bool) -> dict[str, Any]:
    return {
        "model": name,
        "plan": label,
        "predicted_ms": predicted.step_ms,
        "measured_ms": measured_ms,
        "by_kind_ms": predicted.exposed_by_kind_ms,
        "recomputed_ms": predicted.recomputed_ms,
        "held_back": held_back,
    }


def calibrate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Fit a calibration to the rows that are not held back; each row then holds its error after calibration."""
    fitted = fit_calibration(
        TimedRun(predicted_ms=row["by_kind_ms"], measured_ms=row["measured_ms"]) for row in rows if not row["held_back"]
    )
    factors = read_time_factors(fitted)
    for row in rows:
        calibrated_ms = sum(factors.get(kind, 1.0) * kind_ms for kind, kind_ms in row["by_kind_ms"].items())
        row["error_before"] = row["predicted_ms"] / row["measured_ms"] - 1
        row["error"] = calibrated_ms / row["measured_ms"] - 1
    return fitted


def summarize(rows: list[dict[str, Any]]) -> dict[str, GoalEntry]:
    held_back = [abs(row["error"]) for row in rows if row["held_back"]]
    median, worst = (statistics.median(held_back), max(held_back)) if held_back else (None, None)
    return {
        "median error of the step time, held back": at_most(median, MEDIAN_GOAL, needs="full size"),
        "worst error of the step time, held back": at_most(worst, WORST_GOAL, needs="full size"),
    }


def print_residuals(rows: list[dict[str, Any]], fitted: dict[str, Any]) -> None:
    """Print errors, the worst first, and then the factors by kind."""
    print("\nafter calibration, the ten furthest off:")
    for row in sorted(rows, key=lambda row: -abs(row["error"]))[:10]:
        largest = sorted(row["by_kind_ms"].items(), key=lambda item: -item[1])[:4]
        shares = ", ".join(f"{kind} {kind_ms / row['predicted_ms']:.0%}" for kind, kind_ms in largest)
        mark = "held back" if row["held_back"] else ""
        print(f"  {row['model']:12} {row['plan']:36} {row['error_before']:+7.1%} -> {row['error']:+7.1%} {mark:9} {shares}")
    print("\nkind, share of all predicted time, factor fitted:")
    total_ms = sum(row["predicted_ms"] for row in rows)
    for kind, factor in sorted(fitted["time_factors"].items()):
        kind_ms = sum(row["by_kind_ms"].get(kind, 0.0) for row in rows)
        print(f"  {kind:14} {kind_ms / total_ms:6.1%}  {factor:.3f}")
    for name in ("error_before", "error"):
        errors = [abs(row[name]) for row in rows]
        print(f"all cases, {name}: median {statistics.median(errors):.1%}, worst {max(errors):.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two architectures, under a minute on two idle cores")
    parser.add_argument("--thread-clock", action="store_true", help="count processor time of the thread that runs")
    parser.add_argument("--plans", type=int, default=PLANS_PER_MODEL, help="of each architecture")
    parser.add_argument("--machine", type=Path, help="a probed machine, instead of probing")
    parser.add_argument("--json", type=Path, help="write the rows and the summary there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.thread_clock:
        clock.now_s = time.thread_time
    started_s = time.monotonic()
    if arguments.machine:
        machine = Machine.from_json(json.loads(arguments.machine.read_text()))
    else:
        machine = probe_machine(device="cpu", max_s=8.0 if arguments.quick else 40.0)
        print(f"probed in {time.monotonic() - started_s:.0f} s")
    names = QUICK_MODELS if arguments.quick else tuple(MODELS)
    rows = run_cases(names, machine, on_thread=arguments.thread_clock, number=arguments.plans)
    fitted = calibrate(rows)
    print_residuals(rows, fitted)
    record = Record(file=arguments.json, machine=machine.to_json(), rows=rows, is_quick=arguments.quick, started_s=started_s)
    record.tables["calibration"] = fitted
    return record.finish(summarize(rows))


if __name__ == "__main__":
    sys.exit(main())
