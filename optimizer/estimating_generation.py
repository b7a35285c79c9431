"""``estimate_generation``: from a model and a machine to what a batch generation takes, with reasons. Torch-free.

A model that was never seen is traced by a child process, and its profile is kept (``profile/obtain.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.estimate.inference import estimate_inference
from optimizer.estimate.inference_prediction import InferencePrediction
from optimizer.estimate.prediction import Verdict
from optimizer.hardware.machine import Machine
from optimizer.models.spec import ModelSpec
from optimizer.plan.explain_inference import explain_inference_plan
from optimizer.plan.inference import InferencePlan
from optimizer.profile.extent import traced_representation
from optimizer.profile.obtain import obtain_inference_profile
from optimizer.serialize import to_json
from optimizer.units import format_bytes
from optimizer.workload import InferenceWorkload


@dataclass(frozen=True, kw_only=True)
class GenerationEstimate:
    """One plan, priced on one machine for one workload, and explained."""

    machine: Machine
    workload: InferenceWorkload
    plan: InferencePlan
    prediction: InferencePrediction
    budget_bytes: int
    verdict: Verdict
    explanation: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return document


def estimate_generation(
    spec: ModelSpec,
    *,
    plan: InferencePlan,
    workload: InferenceWorkload,
    machine: Machine,
    budget_bytes: int | None = None,
    calibration: Mapping[str, Any] | None = None,
    profiles_folder: Path | None = None,
) -> GenerationEstimate:
    """budget_bytes: of device memory, which the verdict is about; all there is unless given. profiles_folder: where profiles are
    kept, instead of the usual place.

    Raises InvalidPlan and InvalidWorkload before anything is traced, InvalidModel where the model cannot be.
    """
    plan.check(workload=workload, max_sequence_length=spec.max_sequence_length)
    profile = obtain_inference_profile(
        spec, representations=[traced_representation(plan.weights.representation)], folder=profiles_folder
    )
    prediction = estimate_inference(profile, plan=plan, workload=workload, machine=machine, calibration=calibration)
    budget = machine.device.memory_bytes if budget_bytes is None else budget_bytes
    return GenerationEstimate(
        machine=machine,
        workload=workload,
        plan=plan,
        prediction=prediction,
        budget_bytes=budget,
        verdict=prediction.verdict(budget),
        explanation=tuple(explain_inference_plan(plan, workload=workload, prediction=prediction)),
    )


def report_generation(estimate: GenerationEstimate) -> str:
    """For the terminal: the verdict, bytes by category at the peak, then sentences."""
    prediction = estimate.prediction
    at_peak = sorted(prediction.device_bytes_by_category.items(), key=lambda item: -item[1])
    verdict = estimate.verdict.replace("_", " ")
    head = f"{estimate.machine.name}: {verdict} in {format_bytes(estimate.budget_bytes)}"
    sizes = [f"  {name.replace('_', ' '):16} {format_bytes(num_bytes):>10}" for name, num_bytes in at_peak if num_bytes]
    return "\n".join([head, "", "At the peak", *sizes, "", "Plan", *(f"- {each}" for each in estimate.explanation)])
