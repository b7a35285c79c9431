"""Generation under the budgets of cards: does the chosen plan fit and run as priced, and how fast is it beside accelerate?

    python -m benchmarks.gpu_check.generations [--quick] [--device cuda:0] [--json FILE]

The models have the shapes of published ones and random weights. For each budget the plan that the search chooses for the largest
model is carried out under the cap, once with weights in bf16 and once with any format. Then one model continues the same prompts
under the runtime and under accelerate's offload of every block, whose tokens per second stand beside ours. ``--device cpu`` runs
the same code on small shapes.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.alternatives import DoesNotRun, build_quickly
from benchmarks.common.packages import generation_pins
from benchmarks.common.record import GoalEntry, Record, Row, all_of, at_most, clear, goal
from benchmarks.generation.alternatives import Job, Ours, Theirs, offload_to_host
from benchmarks.gpu_check.budgets import budget_of_card
from optimizer.base.errors import HeadroomError, NoFeasiblePlan
from optimizer.base.units import GIB, MIB
from optimizer.goal import GenerationGoal
from optimizer.hardware.machine import Machine
from optimizer.hardware.probe.probe import probe_machine
from optimizer.models.presets import PRESETS
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.techniques import Technique
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.trace.generation import profile_generation
from optimizer.runtime.generation.generator import prepare_for_generation
from optimizer.runtime.job.measure_generation import make_prompts, measure_generation
from optimizer.runtime.meter.device import prepared_device
from optimizer.search.generation.search import search_generation_plans
from optimizer.workload import GenerationWorkload, TrainingWorkload

DEADLINE_S = 400.0
"""No new plan is begun after this."""
PEAK_GOAL = 0.03
TIME_GOAL = 0.30
FORMATS: dict[str, tuple[Technique, ...]] = {"bf16 weights": ("quantize_frozen", "quantize_kv", "fp16"), "any format": ()}
"""Techniques that each kind of plan must not use."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The models and budgets of a run."""

    models: dict[str, ModelSpec]
    """Largest first."""
    budgets_bytes: tuple[int, ...]
    workload: GenerationWorkload
    compared: ModelSpec
    """The model that accelerate offloads as well."""
    compared_workload: GenerationWorkload
    compared_budget_bytes: int
    probe_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the smallest and the largest budget")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    setup = card_setup(device) if device.type != "cpu" else small_setup()
    record = measure(setup, device, quick=options.quick, file=options.json)
    return record.finish(summarize(record.rows))


def card_setup(device: torch.device) -> Setup:
    """Cards of 8 to 24 GB, as far as this one is as large, less what a process holds beside its tensors."""
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    outside_bytes = GIB // 2
    budgets = [budget_of_card(size * GIB - outside_bytes) for size in (8, 12, 16, 24) if size * GIB <= total_bytes]
    one_b = PRESETS["llama-3.2-1b"].spec
    return Setup(
        models={"llama-3-8b": PRESETS["llama-3-8b"].spec, "llama-3.2-1b": one_b},
        budgets_bytes=tuple(budgets),
        workload=GenerationWorkload(prompt_length=512, num_new_tokens=32, num_sequences=16),
        compared=one_b,
        compared_workload=GenerationWorkload(prompt_length=128, num_new_tokens=16, num_sequences=32),
        compared_budget_bytes=3 * GIB,
        probe_s=6.0,
    )


def small_setup() -> Setup:
    """Shapes that the CPU device runs in a moment."""
    shape: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 128,
    }
    spec = read_model_spec(shape)
    workload = GenerationWorkload(prompt_length=16, num_new_tokens=4, num_sequences=4)
    return Setup(
        models={"small": spec},
        budgets_bytes=(MIB // 2, 8 * MIB),
        workload=workload,
        compared=spec,
        compared_workload=workload,
        compared_budget_bytes=MIB,
        probe_s=0.1,
    )


def measure(setup: Setup, device: torch.device, *, quick: bool, file: Path | None = None) -> Record:
    with prepared_device(device), tempfile.TemporaryDirectory(prefix="headroom-") as folder:
        machine = probe_machine(device=str(device), max_s=setup.probe_s)
        record = Record(file=file, machine=machine.to_json(), is_quick=quick)
        profiles = {name: profile_generation(spec, representations=["fp32", "bf16"]) for name, spec in setup.models.items()}
        budgets = (setup.budgets_bytes[0], setup.budgets_bytes[-1]) if quick else setup.budgets_bytes
        for budget_bytes in dict.fromkeys(budgets):
            for words, forbidden in FORMATS.items():
                if time.monotonic() - record.started_s > DEADLINE_S:
                    record.add({"what": "left out", "budget_bytes": budget_bytes, "formats": words, "why_not": "out of time"})
                    continue
                wanted = GenerationGoal(
                    device_budget_bytes=budget_bytes, allow_lossy=True, forbid=forbidden, pins=generation_pins()
                )
                head = {"budget_bytes": budget_bytes, "formats": words}
                record.add_all(words, plan_rows(setup, profiles, head, wanted, machine, device, Path(folder)))
        record.add_all("accelerate", compared_rows(setup, machine, device, Path(folder)))
    return record


def plan_rows(
    setup: Setup,
    profiles: dict[str, GenerationProfile],
    head: Row,
    wanted: GenerationGoal,
    machine: Machine,
    device: torch.device,
    scratch: Path,
) -> Iterator[Row]:
    """The models that do not fit, then the chosen plan of the first that does."""
    for name, profile in profiles.items():
        row = {"model": name, **head}
        try:
            chosen = search_generation_plans(profile, workload=setup.workload, goal=wanted, machine=machine).chosen
        except NoFeasiblePlan as error:
            yield {"what": "no plan", **row, "smallest_bytes": error.fields["smallest_feasible_bytes"]}
            continue
        prediction = chosen.prediction
        row |= {"plan": describe(chosen.plan), "predicted_bytes": prediction.device_peak_bytes}
        model = fill(setup.models[name], chosen.plan.weights, device)
        try:
            measured = measure_generation(
                model,
                plan=chosen.plan,
                workload=setup.workload,
                device=device,
                cap_bytes=wanted.device_budget_bytes,
                scratch=scratch,
            )
        except HeadroomError as error:
            yield {"what": "plan", **row, "kept_under_cap": False, "error": str(error)}
            return
        finally:
            del model
            clear()
        yield {
            "what": "plan",
            **row,
            "kept_under_cap": measured.device_peak_bytes <= wanted.device_budget_bytes,
            "measured_bytes": measured.device_peak_bytes,
            "peak_error": round(prediction.device_peak_bytes / measured.device_peak_bytes - 1, 5),
            "predicted_s": round(prediction.total_s, 3),
            "measured_s": round(measured.total_s, 3),
            "time_error": round(prediction.total_s / measured.total_s - 1, 4),
            "tokens_per_s": round(measured.tokens_per_s, 1),
            "copied_bytes": measured.copied_bytes,
            "host_bytes": measured.host_peak_bytes,
        }
        return


def fill(spec: ModelSpec, weights: WeightsPlan, device: torch.device) -> torch.nn.Module:
    """A model as ``measure_generation`` takes it; its weights repeat one run of random numbers."""
    whole = build_quickly(spec, weights=WeightsPlan(dtype=weights.dtype), workload=TrainingWorkload(), device=torch.device("cpu"))
    model = whole.eval()
    prepare_for_generation(model, weights=weights, device=device)
    return model if weights.place != "device" else model.to(device)


def compared_rows(setup: Setup, machine: Machine, device: torch.device, scratch: Path) -> Iterator[Row]:
    """Tokens per second in fp32 of all prompts in one batch, twice each and in turn; the better time of each counts."""
    workload = setup.compared_workload
    job = Job(spec=setup.compared, workload=workload, device=device, scratch=scratch)
    profile = profile_generation(setup.compared, representations=["fp32"])
    wanted = GenerationGoal(device_budget_bytes=setup.compared_budget_bytes, pins=generation_pins())
    plan = search_generation_plans(profile, workload=workload, goal=wanted, machine=machine).chosen.plan
    prompts = make_prompts(setup.compared.vocab_size, workload)
    contenders: dict[str, Any] = {"headroom": lambda: Ours(job, plan, None)}
    contenders["accelerate"] = lambda: Theirs(job, None, prepare=offload_to_host)
    best_s: dict[str, float] = {}
    for _ in range(2):
        for name, make in contenders.items():
            try:
                contender = make()
            except DoesNotRun as error:
                yield {"what": "not compared", "name": name, "why_not": str(error)}
                return
            batch = plan.sequences_per_pass if name == "headroom" else workload.num_sequences
            started_s = time.perf_counter()
            for first in range(0, len(prompts), batch):
                contender.generate(prompts[first : first + batch])
            taken_s = time.perf_counter() - started_s
            best_s[name] = min(taken_s, best_s.get(name, taken_s))
            contender.close()
            del contender
            clear()
    speeds = {f"{name}_tokens_per_s": round(workload.total_new_tokens / taken_s, 1) for name, taken_s in best_s.items()}
    faster = round(best_s["accelerate"] / best_s["headroom"], 3)
    head = {"what": "compared", "plan": describe(plan), "budget_bytes": wanted.device_budget_bytes}
    yield {**head, **speeds, "times_as_fast": faster}


def describe(plan: GenerationPlan) -> str:
    weights, cache = plan.weights, plan.kv_cache
    return (
        f"{weights.dtype} {weights.frozen} weights on {weights.place}, {cache.dtype} cache on {cache.place}, "
        f"{plan.batch_size}x{plan.num_micro_batches} sequences"
    )


def summarize(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    """Judge the plans; accelerate is to be no faster."""
    plans = [row for row in rows if row["what"] == "plan"]
    num_missing = sum(row["what"] in ("failed", "left out") for row in rows)
    peaks = [abs(row["peak_error"]) for row in plans if "peak_error" in row]
    times = sorted(abs(row["time_error"]) for row in plans if "time_error" in row)
    median_error = times[len(times) // 2] if times else None
    least = min((row["times_as_fast"] for row in rows if row["what"] == "compared"), default=None)
    return {
        "generations that failed or were left out": goal(num_missing, 0, met=num_missing == 0),
        "generations kept under their cap": all_of(row["kept_under_cap"] for row in plans),
        "worst error of a generation's peak": at_most(max(peaks, default=None), PEAK_GOAL),
        "median error of a generation's time": at_most(median_error, TIME_GOAL, needs="full size"),
        "times as fast as accelerate": goal(least, ">= 1", met=least is not None and least >= 1, needs="full size"),
    }


if __name__ == "__main__":
    sys.exit(main())
