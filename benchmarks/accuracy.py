"""How far predicted bytes are from measured bytes, over architectures, plans, dtypes and accumulation.

``python -m benchmarks.accuracy [--quick] [--json FILE]``. Each row prices a plan and runs two real steps of it under
the runtime's meter.
Tiny models: what is compared is bookkeeping, which does not depend on size. Step times are not compared here.
"""

import argparse
import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Device, Machine, Rates
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.profile.trace import profile_model
from optimizer.runtime.measure import measure_step
from optimizer.workload import TrainingWorkload

_ROTARY = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 257, "n_positions": 128},
    "opt": {
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 257,
        "max_position_embeddings": 128,
    },
    "llama": _ROTARY,
    "qwen2": {**_ROTARY, "tie_word_embeddings": True},
    "mistral": {**_ROTARY, "sliding_window": 32},
    "gemma2": {**_ROTARY, "head_dim": 16, "sliding_window": 32},
    "phi3": {**_ROTARY, "num_key_value_heads": 4},
    "mixtral": {**_ROTARY, "num_local_experts": 4, "num_experts_per_tok": 2},
}
QUICK_MODELS = ("opt",)
BLOCKS: tuple[tuple[BlockChoice, ...], ...] = (
    ("keep",) * 4,
    ("recompute",) * 4,
    ("offload",) * 4,
    ("offload", "recompute", "keep", "keep"),
)
SETTINGS = (("fp32", 32, 1, 2), ("fp32", 8, 2, 1), ("bf16", 32, 2, 2), ("bf16", 8, 1, 1))
"""dtype, bits of the optimizer state, accumulation steps, micro-batch size."""
WORST_GOAL = 0.01
MEDIAN_GOAL = 0.001
SEQUENCE_LENGTH = 40


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one architecture, under a minute on two idle cores")
    parser.add_argument("--json", type=Path, help="write the rows and the summary there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in (QUICK_MODELS if arguments.quick else MODELS) for row in measure_model(name)]
    summary = summarize(rows)
    for goal, entry in summary.items():
        print(f"{goal}: {entry['value']:.4%} (goal {entry['goal']:.2%}, {'met' if entry['met'] else 'MISSED'})")
    if arguments.json:
        machine = {"platform": platform.platform(), "torch": torch.__version__, "num_rows": len(rows)}
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows, "summary": summary}, indent=1))
    return 0 if all(entry["met"] for entry in summary.values()) else 1


def measure_model(name: str) -> list[dict[str, Any]]:
    """Every plan of one architecture, printed as it comes."""
    config = {"model_type": name, **MODELS[name]}
    profile = profile_model(read_model_spec(config))
    rows = []
    for dtype, bits, accumulation_steps, micro_batch_size in SETTINGS:
        for per_block in BLOCKS:
            plan = Plan(
                batch=BatchPlan(micro_batch_size=micro_batch_size, accumulation_steps=accumulation_steps),
                weights=WeightsPlan(dtype=dtype),  # type: ignore[arg-type]
                optimizer_state=OptimizerStatePlan(bits=bits),  # type: ignore[arg-type]
                activations=ActivationsPlan(per_block=per_block),
            )
            row = {"model": name, **compare(profile, config, plan)}
            print_row(row)
            rows.append(row)
    return rows


def compare(profile: Profile, config: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Predicted and measured peaks of one plan, on both tiers and by category."""
    batch = plan.batch
    workload = TrainingWorkload(sequence_length=SEQUENCE_LENGTH, global_batch_size=batch.global_batch_size)
    predicted = estimate_training(profile, plan=plan, workload=workload, machine=_any_machine())
    measured = measure_step(read_model_spec(config), plan=plan, workload=workload)
    return {
        "plan": f"{plan.weights.dtype} adam{plan.optimizer_state.bits} {batch.micro_batch_size}x{batch.accumulation_steps} "
        + "".join(choice[0] for choice in plan.activations.per_block),
        "predicted_bytes": predicted.device_peak_bytes,
        "measured_bytes": measured.device_peak_bytes,
        "error": predicted.device_peak_bytes / measured.device_peak_bytes - 1,
        "predicted_host_bytes": predicted.host_peak_bytes,
        "measured_host_bytes": measured.host_peak_bytes,
        "predicted_by_category": predicted.device_bytes_by_category,
        "measured_by_category": measured.device_bytes_by_category,
        "predicted_moment": predicted.peak_moment,
        "measured_moment": measured.peak_moment,
    }


def print_row(row: dict[str, Any]) -> None:
    host = row["predicted_host_bytes"] - row["measured_host_bytes"]
    print(
        f"{row['model']:8} {row['plan']:24} predicted {row['predicted_bytes']:>10} measured {row['measured_bytes']:>10} "
        f"error {row['error']:+.4%} host {host:+d} B  {row['measured_moment']}",
        flush=True,
    )


def summarize(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    errors = [abs(row["error"]) for row in rows]
    worst, median = max(errors), statistics.median(errors)
    return {
        "worst peak error": {"value": worst, "goal": WORST_GOAL, "met": worst <= WORST_GOAL},
        "median peak error": {"value": median, "goal": MEDIAN_GOAL, "met": median <= MEDIAN_GOAL},
    }


def _any_machine() -> Machine:
    """Bytes do not depend on rates."""
    rates = Rates(
        matmul_flops_per_s={"fp32": 1e11, "bf16": 1e11},
        attention_flops_per_s={"fp32": 1e11, "bf16": 1e11},
        memory_bytes_per_s=1e10,
        op_overhead_s=1e-6,
        device_to_host_bytes_per_s=1e10,
        host_to_device_bytes_per_s=1e10,
        optimizer_elements_per_s={"adamw_32": 1e9, "adamw_8": 1e9},
        source="table",
    )
    return Machine(
        name="any", device=Device(kind="cpu", name="cpu", memory_bytes=2**34), host_memory_bytes=2**34, rates=rates
    )


if __name__ == "__main__":
    sys.exit(main())
