"""Plans under the budgets of cards: are they priced rightly, is the budget kept, are the bits the same?

For budgets that stand for cards of 8, 12, 16 and 24 GB it finds the largest model of a list that a plan fits, runs a few real
steps of that plan under the cap, and holds predicted against measured: peak (allocated and reserved) and step time. The
allocator's limit is then the whole card less its CUDA context, so what runs here runs there. Plain training (everything kept)
must be refused under the same cap. On small models, recomputing and offloading must give the bits of keeping.

    python -m benchmarks.gpu_check.budgets [--quick] [--device cuda:0] [--json FILE]

Needs torch, transformers, numpy, scipy. ``--device cpu`` runs the same code on the CPU device, on a small model, under shares
of plain training's peak instead of cards. An error in one row is reported in it, and the rows after it still run.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common.packages import list_impossible
from benchmarks.common.record import GoalEntry, Needs, Record, all_of, at_most, clear, goal
from optimizer.base.errors import NoFeasiblePlan, OutOfDeviceMemory
from optimizer.base.units import GIB, format_bytes
from optimizer.formats.allocator_slack import ALLOCATOR_SLACK_BYTES, ALLOCATOR_SLACK_SHARE
from optimizer.goal import UNLIMITED_BYTES, Goal
from optimizer.hardware.cuda_facts import find_workspaces
from optimizer.hardware.machine import Machine
from optimizer.hardware.probe.probe import probe_machine
from optimizer.models.build import build_model
from optimizer.models.presets import PRESETS
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.profile.trace.trace import profile_model
from optimizer.runtime.job.measure import make_synthetic_batches, measure_step
from optimizer.runtime.meter.device import prepared_device
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.step import Trainer
from optimizer.runtime.step.weights import torch_dtype
from optimizer.search.problem import PricedPlan
from optimizer.search.result import SearchResult
from optimizer.search.search import search_plans
from optimizer.workload import TrainingWorkload

CARDS_GIB = (8, 12, 16, 24)
CARD_MODELS = ("llama-3.2-1b", "qwen2.5-0.5b", "gpt2", "headroom-demo-10m")
"""Largest first; full training in fp32 takes 16 bytes for each parameter before the first activation."""
CPU_SHARES = (0.8, 0.65)
"""Budgets on the CPU device, of plain training's predicted peak."""
GOALS: dict[str, dict[str, Any]] = {
    "lossless": {},
    "offload only": {"forbid": ("accumulate", "recompute")},
    "no accumulation": {"forbid": ("accumulate",)},
    "bf16 allowed": {"allow_lossy": True},
}
"""Goals of each budget. Left free, search cuts the batch before it rebuilds or moves anything, so further goals forbid that."""
QUICK_GOALS = ("lossless", "offload only")
NUM_STEPS = 4
DEADLINE_S = 420.0
"""No new row is begun after this."""
PEAK_GOAL = 0.05
RESERVED_GOAL = 0.06
TIME_GOAL = 0.30
_SMALL = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 344,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 256,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 128, "n_layer": 3, "n_head": 4, "vocab_size": 512, "n_positions": 256},
}
_MIXED: tuple[BlockChoice, ...] = ("offload", "keep", "recompute")
_BIT_PLANS: dict[str, tuple[BlockChoice, ...]] = {
    "keep again": ("keep",) * 3,
    "recompute": ("recompute",) * 3,
    "offload": ("offload",) * 3,
    "mixed": _MIXED,
}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The bytes that one row must fit in."""

    label: str
    budget_bytes: int


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the smallest and the largest budget, exact numbers only")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here as well")
    arguments = parser.parse_args()
    record = check(arguments.device, quick=arguments.quick, file=arguments.json)
    return record.finish(summarize(record.rows))


def check(
    device_name: str,
    *,
    quick: bool,
    file: Path | None = None,
    models: Mapping[str, ModelSpec] | None = None,
    probe_s: float | None = None,
) -> Record:
    """Run all checks on one device; rows are printed and written as they come.

    models: by name, largest first. probe_s: seconds in which the machine's rates are measured.
    """
    started_s = time.monotonic()
    device = torch.device(device_name)
    models = models or default_models(device)
    tokens, sequences = (1024, 8) if device.type == "cuda" else (64, 16)
    workload = TrainingWorkload(sequence_length=tokens, global_batch_size=sequences, learning_rate=1e-4)
    with prepared_device(device):
        machine = probe_machine(device=device_name, max_s=probe_s or (2.0 if quick else 8.0))
        print_facts(machine)
        record = Record(file=file, machine=machine.to_json(), is_quick=quick, started_s=started_s)
        record.add_all("bits", bit_rows(device, dtypes=("fp32",) if quick else ("fp32", "bf16")))
        profiles = Profiles(models)
        for budget in budgets(machine, profiles, workload, quick=quick):
            for label in QUICK_GOALS if quick else GOALS:
                if time.monotonic() - started_s > DEADLINE_S:
                    record.add({"what": "left out", "budget": budget.label, "goal": label, "why": "out of time"})
                    continue
                asked = GOALS[label]
                forbidden = (*asked.get("forbid", ()), *list_impossible())
                wanted = Goal(device_budget_bytes=budget.budget_bytes, **{**asked, "forbid": forbidden})
                head = {"budget": budget.label, "goal": label, "budget_bytes": budget.budget_bytes}
                found = plan_rows(profiles, head, wanted, workload, machine, device)
                record.add_all(f"{budget.label}, {label}", found)
    return record


def default_models(device: torch.device) -> dict[str, ModelSpec]:
    """The models of a card; on the CPU device one that is profiled and run in seconds."""
    if device.type == "cuda":
        return {name: read_model_spec(PRESETS[name].config) for name in CARD_MODELS}
    return {"small llama": read_model_spec(_SMALL["llama"])}


class Profiles:
    """The models, each traced once when it is first priced."""

    def __init__(self, specs: Mapping[str, ModelSpec]) -> None:
        self.specs = specs
        self._known: dict[str, Profile] = {}

    def of(self, name: str) -> Profile:
        if name not in self._known:
            started_s = time.monotonic()
            self._known[name] = profile_model(self.specs[name])
            print(f"profiled {name} in {time.monotonic() - started_s:.1f} s", flush=True)
        return self._known[name]


def budgets(machine: Machine, profiles: Profiles, workload: TrainingWorkload, *, quick: bool) -> list[Budget]:
    """The cards that a CUDA device can stand for; on the CPU device shares of what plain training would take."""
    if machine.device.kind == "cuda":
        outside_bytes = int(machine.facts["context_bytes"]) + int(machine.facts["workspace_bytes"])
        found = [
            Budget(label=f"{size} GB card", budget_bytes=budget_of_card(size * GIB - outside_bytes))
            for size in CARDS_GIB
            if size * GIB <= int(machine.facts["total_bytes"])
        ]
    else:
        anything = Goal(device_budget_bytes=UNLIMITED_BYTES)
        profile = profiles.of(next(iter(profiles.specs)))
        result = search_plans(profile, workload=workload, goal=anything, machine=machine)
        plain_bytes = result.baselines["keep_all"].prediction.device_peak_bytes
        found = [Budget(label=f"{share:.0%} of plain", budget_bytes=int(plain_bytes * share)) for share in CPU_SHARES]
    return [found[0], found[-1]] if quick and len(found) > 2 else found


def budget_of_card(usable_bytes: int) -> int:
    """Allocated bytes that leave the allocator the room which the meter grants it."""
    return min(int(usable_bytes / (1 + ALLOCATOR_SLACK_SHARE)), usable_bytes - ALLOCATOR_SLACK_BYTES)


def plan_rows(
    profiles: Profiles,
    common: dict[str, Any],
    goal: Goal,
    workload: TrainingWorkload,
    machine: Machine,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    """The models that do not fit, then the chosen plan of the first that does, and plain training of the same."""
    for name, spec in profiles.specs.items():
        head = {"model": name, **common}
        started_s = time.monotonic()
        try:
            result = search_plans(profiles.of(name), workload=workload, goal=goal, machine=machine)
        except NoFeasiblePlan as error:
            yield {"what": "no plan", **head, "smallest_bytes": error.fields["smallest_feasible_bytes"]}
            continue
        search_s = round(time.monotonic() - started_s, 2)
        head |= {"lossless": result.chosen.plan.is_lossless, "search_s": search_s}
        yield from run_rows(spec, result, head, goal, workload, machine, device)
        return


def run_rows(
    spec: ModelSpec,
    result: SearchResult,
    head: dict[str, Any],
    goal: Goal,
    workload: TrainingWorkload,
    machine: Machine,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    chosen = result.chosen
    model = build_model(spec, dtype=torch_dtype(chosen.plan.weights), device=device, seed=1)
    try:
        yield {"what": "plan", **head, **measured(model, chosen, goal, workload, machine, device)}
    except OutOfDeviceMemory as error:
        yield {"what": "plan", **head, **predicted(chosen), "kept_under_cap": False, "error": str(error)}
    plain = result.baselines["keep_all"]
    if plain.prediction.device_peak_low_bytes <= goal.device_budget_bytes:
        return
    if chosen.plan.weights != plain.plan.weights:
        # The model would have to be built again in fp32; the lossless row has shown it.
        return
    drop_gradients(model)
    yield {"what": "plain", **head, **refused(model, plain.plan, goal, workload, device)}
    del model
    clear()


def measured(
    model: nn.Module,
    chosen: PricedPlan,
    goal: Goal,
    workload: TrainingWorkload,
    machine: Machine,
    device: torch.device,
) -> dict[str, Any]:
    """Take a few real steps under the cap."""
    measurement = measure_step(
        model,
        plan=chosen.plan,
        workload=workload,
        device=device,
        num_steps=NUM_STEPS,
        cap_bytes=goal.device_budget_bytes,
    )
    prediction = chosen.prediction
    row = {
        **predicted(chosen),
        "measured_bytes": measurement.device_peak_bytes,
        "peak_error": round(prediction.device_peak_bytes / measurement.device_peak_bytes - 1, 5),
        "measured_by_category": measurement.device_bytes_by_category,
        "measured_moment": measurement.peak_moment,
        "measured_host_bytes": measurement.host_peak_bytes,
        "copied_bytes": measurement.copied_bytes,
        "measured_ms": round(measurement.step_ms, 2),
        "time_error": round(prediction.step_ms / measurement.step_ms - 1, 4),
        "kept_under_cap": measurement.device_peak_bytes <= goal.device_budget_bytes,
    }
    if device.type == "cuda":
        # Of the last step; torch's own numbers, workspaces included.
        stats = torch.cuda.memory_stats(device)
        row["torch_allocated_bytes"] = stats["allocated_bytes.all.peak"]
        row["torch_reserved_bytes"] = stats["reserved_bytes.all.peak"]
        row["torch_active_bytes"] = stats["active_bytes.all.peak"]
        row["num_alloc_retries"] = stats["num_alloc_retries"]
        if prediction.memory is not None:
            # Workspaces come from torch's allocator too.
            reserved_bytes = prediction.memory.reserved.value + find_workspaces(machine.device).value
            row["predicted_reserved_bytes"] = reserved_bytes
            row["reserved_error"] = round(reserved_bytes / row["torch_reserved_bytes"] - 1, 5)
            row["predicted_allocated_bytes"] = prediction.memory.allocated.value
            row["predicted_process_bytes"] = prediction.memory.process.value
            free_bytes, total_bytes = torch.cuda.mem_get_info(device)
            row["process_bytes_at_the_end"] = total_bytes - free_bytes
    return row


def predicted(chosen: PricedPlan) -> dict[str, Any]:
    plan, prediction = chosen.plan, chosen.prediction
    return {
        "plan": describe(plan),
        "predicted_bytes": prediction.device_peak_bytes,
        "predicted_by_category": prediction.device_bytes_by_category,
        "predicted_moment": prediction.peak_moment,
        "predicted_host_bytes": prediction.host_peak_bytes,
        "predicted_ms": round(prediction.step_ms, 2),
    }


def refused(
    model: nn.Module, plan: Plan, goal: Goal, workload: TrainingWorkload, device: torch.device
) -> dict[str, Any]:
    """Plain training under the cap: it has to stop with the sizes of what was there."""
    row: dict[str, Any] = {"plan": describe(plan), "refused": False}
    try:
        measure_step(model, plan=plan, workload=workload, device=device, cap_bytes=goal.device_budget_bytes)
    except OutOfDeviceMemory as error:
        row |= {"refused": True, "error": str(error), "bytes_by_category": error.fields["bytes_by_category"]}
    return row


def bit_rows(device: torch.device, *, dtypes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Losses and weights after three steps, against those of keeping everything."""
    for name, config in _SMALL.items():
        spec = read_model_spec(config)
        for dtype in dtypes:
            expected = train_small(spec, ("keep",) * 3, dtype, device)
            for label, per_block in _BIT_PLANS.items():
                found = train_small(spec, per_block, dtype, device)
                equal = found[0] == expected[0] and all(
                    torch.equal(mine, theirs) for mine, theirs in zip(found[1], expected[1], strict=True)
                )
                yield {"what": "bits", "model": name, "dtype": dtype, "plan": label, "equal": equal}


def train_small(
    spec: ModelSpec, per_block: tuple[BlockChoice, ...], dtype: str, device: torch.device
) -> tuple[list[float], list[torch.Tensor]]:
    plan = Plan(
        batch=BatchPlan(micro_batch_size=2, accumulation_steps=2),
        weights=WeightsPlan(dtype=dtype),  # type: ignore[arg-type]
        activations=ActivationsPlan(per_block=per_block),
    )
    workload = TrainingWorkload(sequence_length=64, global_batch_size=4)
    model = build_model(spec, dtype=torch_dtype(plan.weights), device=device, seed=3)
    trainer = Trainer(model, plan=plan, workload=workload, device=device, meter=Meter(device=device))
    torch.manual_seed(5)
    batches = make_synthetic_batches(model, plan=plan, workload=workload)
    losses = [trainer.step(batches, learning_rate=1e-3).loss for _ in range(3)]
    trainer.close()
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


def summarize(rows: list[dict[str, Any]]) -> dict[str, GoalEntry]:
    plans = [row for row in rows if row["what"] == "plan"]
    exact = {
        "bits equal those of keeping": [row["equal"] for row in rows if row["what"] == "bits"],
        "plans kept under their cap": [row["kept_under_cap"] for row in plans],
        "plain training refused": [row["refused"] for row in rows if row["what"] == "plain"],
    }
    num_failed = sum(row["what"] == "failed" for row in rows)
    summary = {"rows that failed": goal(num_failed, 0, met=num_failed == 0)}
    summary |= {name: all_of(found) for name, found in exact.items()}
    checks: list[tuple[str, str, float, Callable[[list[float]], float], Needs]] = [
        ("worst peak error", "peak_error", PEAK_GOAL, max, "rows"),
        ("median step time error", "time_error", TIME_GOAL, statistics.median, "full size"),
    ]
    if any("reserved_error" in row for row in plans):
        checks.append(("worst reserved error", "reserved_error", RESERVED_GOAL, max, "rows"))
    for name, key, limit, pick, needs in checks:
        errors = [abs(row[key]) for row in plans if key in row]
        summary[name] = at_most(pick(errors) if errors else None, limit, needs=needs)
    return summary


def describe(plan: Plan) -> str:
    batch = plan.batch
    choices = "".join(choice[0] for choice in plan.activations.per_block)
    return f"{plan.weights.dtype} adam{plan.optimizer_state.bits} {batch.micro_batch_size}x{batch.accumulation_steps} {choices}"


def drop_gradients(model: nn.Module) -> None:
    """Free the gradients that a refused step left behind."""
    for parameter in model.parameters():
        parameter.grad = None
    clear()


def print_facts(machine: Machine) -> None:
    print(f"{machine.name}: {machine.device.name}, {format_bytes(machine.device.memory_bytes)} usable")
    print("  ".join(f"{name}={value}" for name, value in machine.facts.items()))
    print(json.dumps(machine.to_json()["rates"]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
