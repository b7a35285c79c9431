"""``estimate_padded_model``: what training takes over a dataset whose batches are padded to their longest sequence. Torch-free.

The worst batch decides what fits, the mean one how long a step takes (``estimate/padded.py``).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optimizer.api.inputs import BEST, read_model, read_text
from optimizer.api.needs import baseline_plan
from optimizer.base.errors import InvalidDataset, InvalidInput
from optimizer.base.serialize import WithJson
from optimizer.data.lengths import Lengths
from optimizer.estimate.padded import PaddedPrediction, estimate_padded
from optimizer.estimate.prediction import Verdict
from optimizer.goal import Goal
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.models.spec import ModelSpec
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.extent import Extent, traced_representation
from optimizer.profile.keep.obtain import obtain_profile
from optimizer.profile.profile import BLOCK_CHOICES, Profile
from optimizer.search.training import training_problem
from optimizer.workload import TrainingWorkload

MAX_LENGTHS_BYTES = 64_000_000
"""Largest file of lengths that is read: some ten million sequences."""


@dataclass(frozen=True, kw_only=True)
class PaddedEstimate(WithJson):
    """One plan over one dataset's batches."""

    machine: Machine
    workload: TrainingWorkload
    """``sequence_length`` is what longer sequences are cut to."""
    plan: Plan
    num_sequences: int
    pad_to_multiple: int
    predicted: PaddedPrediction
    verdict: Verdict


def estimate_padded_model(
    model: str | Path | Mapping[str, Any] | ModelSpec,
    *,
    machine: str | Machine,
    lengths: Lengths,
    workload: TrainingWorkload | None = None,
    plan: str | Plan = "keep_all",
    goal: Goal | None = None,
    weights: WeightsPlan | None = None,
    pad_to_multiple: int = 1,
    profiles_folder: Path | None = None,
) -> PaddedEstimate:
    """The arguments are those of ``estimate_model``; plan: one, or a baseline's label.

    Raises as that does, and InvalidPlan for ``best``: a search is over batches of one length.
    """
    if plan == BEST:
        raise InvalidInput(
            "a plan for padded batches is not searched for; name one, or search with sequence_length at the worst batch's",
            field="plan",
            value=BEST,
        )
    spec = model if isinstance(model, ModelSpec) else read_model(model)
    workload = workload or TrainingWorkload()
    target = machine if isinstance(machine, Machine) else table_machine(machine)
    goal = goal or Goal(device_budget_bytes=target.device.memory_bytes)
    asked = plan.weights if isinstance(plan, Plan) else weights or WeightsPlan()
    extent = Extent(representations=(traced_representation(asked.representation),), choices=_choices_of(plan))

    def trace(*, is_padded: bool) -> Profile:
        return obtain_profile(spec, adapter=workload.adapter, extent=extent, is_padded=is_padded, folder=profiles_folder)

    profile = trace(is_padded=False)
    if not isinstance(plan, Plan):
        problem = training_problem(profile, workload=workload, goal=goal, machine=target)
        plan = baseline_plan(plan, problem, weights)
    predicted = estimate_padded(
        profile,
        padded_profile=trace(is_padded=True),
        plan=plan,
        workload=workload,
        machine=target,
        lengths=lengths,
        pad_to_multiple=pad_to_multiple,
    )
    return PaddedEstimate(
        machine=target,
        workload=replace(workload, global_batch_size=plan.batch.global_batch_size),
        plan=plan,
        num_sequences=len(lengths),
        pad_to_multiple=pad_to_multiple,
        predicted=predicted,
        verdict=predicted.verdict(goal.device_budget_bytes),
    )


def read_lengths(path: Path) -> Lengths:
    """Read a file with a sequence's tokens on each line, or with a JSON list of them. Raises InvalidInput, InvalidDataset."""
    text = read_text(path, field="lengths", max_bytes=MAX_LENGTHS_BYTES).strip()
    try:
        found = json.loads(text) if text.startswith("[") else [int(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise InvalidDataset(
            f"--lengths {path} is no list of lengths: {error}",
            field="lengths",
            value=str(path),
            allowed="whole numbers, one a line, or a JSON list of them",
        ) from error
    if not all(type(value) is int and 0 < value < 2**31 for value in found):
        raise InvalidDataset(
            f"--lengths {path} holds what is no length; allowed: whole numbers from 1, one a line, or a JSON list of them",
            field="lengths",
            value=str(path),
            allowed="whole numbers from 1",
        )
    return Lengths(found)


def _choices_of(plan: str | Plan) -> tuple[Any, ...]:
    return tuple(BLOCK_CHOICES) if isinstance(plan, str) else ("keep", *dict.fromkeys(plan.activations.per_block))
