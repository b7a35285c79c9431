"""Generations for ``benchmarks.accuracy``: cases as ``accuracy_cases.py`` has them of training, and a case told in a row.

A row has the keys of a training case's, so that both are summed up and shown alike. All passes are counted, since a pass leaves
nothing behind but its tokens on the host.
"""

import gc
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.accuracy_cases import MODELS, SHAPES, is_held_back, make_config
from benchmarks.accuracy_meter import AllocationProfile, HostMarkingMeter, ProfiledPeak
from benchmarks.record import Row
from optimizer.estimate.inference import estimate_inference
from optimizer.estimate.inference_prediction import InferencePrediction
from optimizer.hardware.machine import Machine
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.inference import InferencePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.inference import InferenceProfile
from optimizer.profile.inference_trace import profile_inference
from optimizer.runtime.inference import Generator, build_for_inference
from optimizer.runtime.measure_inference import GenerationMeasurement, make_prompts, measure_generation
from optimizer.runtime.meter import Peak
from optimizer.workload import InferenceWorkload

CPU = torch.device("cpu")
EXACT = ("weights", "kv_cache")
"""Categories whose bytes follow from shapes alone."""
TECHNIQUES: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bf16"},
    "int8": {"frozen": "int8"},
    "nf4": {"frozen": "nf4"},
    "streamed": {"place": "host"},
    "streamed-ahead": {"place": "host", "prefetch": 2},
    "streamed-disk": {"place": "disk", "prefetch": 0},
}
"""What each changes of weights in fp32 on the device."""
COMBINATIONS: tuple[tuple[str, ...], ...] = (
    ("bf16",),
    ("int8",),
    ("streamed",),
    ("nf4", "streamed-ahead"),
    ("streamed-disk",),
    ("bf16", "int8"),
    ("bf16", "streamed"),
    ("nf4",),
)
"""Of which each model takes some in turn, beside plain."""
NUM_COMBINATIONS = 4
PROMPTS: tuple[tuple[int, int, int], ...] = ((24, 16, 1), (8, 24, 3), (40, 4, 2), (16, 9, 3), (32, 1, 1))
"""Prompt length, new tokens and batch; cases take turns. Windows are 16 and 12, and our decoder's blocks 8 tokens."""
NUM_SEQUENCES = 4
"""The last pass of a batch of 3 holds one."""


@dataclass(frozen=True, kw_only=True)
class InferenceCase:
    """One plan of one model that generates."""

    name: str
    """``llama/tiny/generate+int8 24+16x1``."""
    model: str
    shape: str
    techniques: tuple[str, ...]
    """``generate`` first."""
    config: Mapping[str, Any] = field(repr=False)
    workload: InferenceWorkload = field(repr=False)
    plan: InferencePlan = field(repr=False)

    @property
    def is_held_back(self) -> bool:
        return is_held_back(self.name)

    @property
    def spec(self) -> ModelSpec:
        return read_model_spec(dict(self.config))


def list_inference_cases() -> list[InferenceCase]:
    """All, in a fixed order."""
    return [case for index, model in enumerate(MODELS) for case in _cases_of(model, index)]


def _cases_of(model: str, index: int) -> Iterator[InferenceCase]:
    chosen = [COMBINATIONS[(index * NUM_COMBINATIONS + turn) % len(COMBINATIONS)] for turn in range(NUM_COMBINATIONS)]
    for turn, techniques in enumerate([(), *chosen]):
        yield make_inference_case(
            model, ("tiny", "odd")[turn % 2], techniques, prompt=PROMPTS[(index + turn) % len(PROMPTS)]
        )


def make_inference_case(
    model: str, shape: str, techniques: tuple[str, ...], *, prompt: tuple[int, int, int] = PROMPTS[0]
) -> InferenceCase:
    """prompt: its length, the new tokens, the batch."""
    prompt_length, num_new_tokens, batch_size = prompt
    config = make_config(model, SHAPES[shape])
    if model == "headroom_decoder":
        # Linear attention keeps no keys and values.
        config["layer_types"] = ["full" if kind == "linear" else kind for kind in config["layer_types"]]
        prompt_length = max(16, prompt_length)
    weights: dict[str, Any] = {}
    for name in techniques:
        weights |= TECHNIQUES[name]
    return InferenceCase(
        name=f"{model}/{shape}/{'+'.join(('generate', *techniques))} {prompt_length}+{num_new_tokens}x{batch_size}",
        model=model,
        shape=shape,
        techniques=("generate", *techniques),
        config=config,
        workload=InferenceWorkload(
            prompt_length=prompt_length, num_new_tokens=num_new_tokens, num_sequences=NUM_SEQUENCES
        ),
        plan=InferencePlan(batch_size=batch_size, weights=WeightsPlan(**weights)),
    )


def predict_and_measure(
    case: InferenceCase, *, machine: Machine, calibration: Mapping[str, Any] | None = None
) -> tuple[InferencePrediction, GenerationMeasurement]:
    """One case, from its configuration to both answers."""
    profile = _profile_of(case)
    prediction = estimate_inference(
        profile, plan=case.plan, workload=case.workload, machine=machine, calibration=calibration
    )
    return prediction, measure_generation(case.spec, plan=case.plan, workload=case.workload)


def measure_inference_memory(case: InferenceCase, *, machine: Machine) -> Row:
    """Predicted bytes beside what two meters counted."""
    profile = _profile_of(case)
    started_s = time.perf_counter()
    prediction = estimate_inference(profile, plan=case.plan, workload=case.workload, machine=machine)
    estimate_ms = (time.perf_counter() - started_s) * 1000
    metered, profiled, disk_bytes = count_generation(case)
    measured_bytes = max(metered.device_bytes, profiled.device_bytes)
    predicted_by, measured_by = prediction.device_bytes_by_category, metered.device_bytes_by_category
    return {
        "what": "memory",
        "case": case.name,
        "model": case.model,
        "shape": case.shape,
        "techniques": list(case.techniques),
        "held_back": case.is_held_back,
        "predicted_bytes": prediction.device_peak_bytes,
        "predicted_high_bytes": prediction.device_peak_high_bytes,
        "metered_bytes": metered.device_bytes,
        "profiled_bytes": profiled.device_bytes,
        "error": prediction.device_peak_bytes / measured_bytes - 1,
        "error_to_meter_bytes": prediction.device_peak_bytes - metered.device_bytes,
        "unseen_by_meter_bytes": profiled.device_bytes - metered.device_bytes,
        "host_error_bytes": prediction.host_peak_bytes - metered.host_bytes,
        "disk_error_bytes": prediction.disk_peak_bytes - disk_bytes,
        "host_bytes": metered.host_bytes,
        "wrong_categories": {
            name: predicted_by[name] - measured_by[name] for name in EXACT if predicted_by[name] != measured_by[name]
        },
        "predicted_moment": prediction.peak_moment,
        "measured_moment": metered.moment,
        "estimate_ms": round(estimate_ms, 3),
        "num_allocation_events": profiled.num_events,
    }


def count_generation(case: InferenceCase) -> tuple[Peak, ProfiledPeak, int]:
    """All passes by both meters, and the most in use on the disk."""
    gc.collect()
    meter = HostMarkingMeter(device=CPU)
    # Before anything is profiled: where prompts wait is the caller's memory.
    prompts = torch.split(make_prompts(case.spec.vocab_size, case.workload), case.plan.batch_size)
    with AllocationProfile() as profiled:
        model = build_for_inference(case.spec, weights=case.plan.weights, device=CPU, seed=case.workload.seed)
        generator = Generator(model, plan=case.plan, device=CPU, meter=meter)
        try:
            meter.reset_peak()
            with profiled.steady_step():
                for each in generator.run_passes(prompts, num_new_tokens=case.workload.num_new_tokens):
                    del each
            peak, disk_bytes = meter.peak(), generator.tiers.disk_peak_bytes
        finally:
            generator.close(keep_weights=False)
    return peak, profiled.peak, disk_bytes


def _profile_of(case: InferenceCase) -> InferenceProfile:
    return profile_inference(case.spec, representations=(case.plan.weights.representation,))
