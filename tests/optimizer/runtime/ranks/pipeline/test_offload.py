"""A model that is cut and keeps a part of itself on the host: the bits of one device, and bytes on both tiers as predicted."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.units import GIB
from optimizer.estimate.card.training_memory import add_memory
from optimizer.estimate.step.setting import lay_out_stages
from optimizer.estimate.training import estimate_training, simulate_step
from optimizer.hardware.mixed import play_devices
from optimizer.plan.devices.layout import RankShare
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import Adapter
from tests.optimizer.estimate.step.pipeline.test_stages_measured import profile_of
from tests.optimizer.runtime.ranks.cases import RankCase, make_case
from tests.optimizer.runtime.ranks.conftest import CarryOut
from tests.optimizer.runtime.ranks.pipeline.test_steps import assert_bits_of_one_device

OnOneDevice = Callable[[RankCase], tuple[dict[str, Any], Path]]
WITHIN_BYTES = 64
"""A few numbers: of what belongs to no block each stage has one in the place of each tensor that others keep."""
ON_HOST = OptimizerStatePlan(place="host")


def cut(**changes: Any) -> RankCase:
    return make_case(**{"model": "untied", "stage_blocks": (1, 2), "accumulation_steps": 4, **changes})


STATE = [
    cut(gradients="host", state=ON_HOST, has_uneven_labels=True),
    cut(gradients="host", stage_blocks=(2, 1), activations=("recompute", "keep", "selective"), schedule="gpipe"),
    cut(gradients="host", state=OptimizerStatePlan(place="host", fraction=0.5), weights=WeightsPlan(dtype="bf16")),
    cut(gradients="host", state=ON_HOST, weights=WeightsPlan(dtype="fp16"), optimizer="lion", num_chunks=4),
    cut(gradients="host", state=ON_HOST, adapter=Adapter(rank=4), weights=WeightsPlan(frozen="int4", dtype="bf16")),
]
WEIGHTS = [
    cut(gradients="host", state=ON_HOST, weights=WeightsPlan(place="host")),
    cut(gradients="host", state=ON_HOST, weights=WeightsPlan(place="host", dtype="bf16", prefetch=0), stage_blocks=(2, 1)),
    cut(adapter=Adapter(rank=4), model="tied", weights=WeightsPlan(place="host", frozen="int8"), schedule="gpipe"),
    cut(
        gradients="host",
        state=ON_HOST,
        weights=WeightsPlan(place="host", prefetch=2),
        stage_blocks=(1, 3, 1, 1),
        activations=("keep", "recompute", "keep", "keep", "selective", "keep"),
        accumulation_steps=6,
    ),
]
ACTIVATIONS = [
    cut(activations=("offload", "offload", "offload")),
    cut(activations=("keep", "offload", "recompute"), stage_blocks=(2, 1), schedule="gpipe", weights=WeightsPlan(dtype="bf16")),
    cut(
        activations=("offload", "keep", "offload", "offload", "keep", "offload"),
        stage_blocks=(1, 3, 1, 1),
        accumulation_steps=6,
        has_uneven_labels=True,
    ),
    cut(
        gradients="host",
        state=ON_HOST,
        weights=WeightsPlan(place="host", dtype="bf16"),
        activations=("offload", "offload", "keep"),
        num_chunks=4,
    ),
    cut(model="llama", activations=("offload",) * 3, adapter=Adapter(rank=4), weights=WeightsPlan(place="host", frozen="int4")),
]


def assert_bytes_as_predicted(case: RankCase, answers: list[dict[str, Any]]) -> None:
    profile = profile_of(case)
    workload = replace(case.workload, eval_batches=1)
    here: dict[str, Any] = {"plan": case.plan, "workload": workload, "machine": replace(make_cpu_machine(), num_threads=2)}
    predicted = estimate_training(profile, **here)
    laid_out = lay_out_stages(profile, **here)
    stages = [simulate_step(laid) for laid in laid_out]
    for tier in ("device", "host"):
        measured = [max(answer["peaks" if tier == "device" else "host_peaks"][1:]) for answer in answers]
        expected = [getattr(stage, f"{tier}_peak_bytes") for stage in stages]
        differ = [ours - theirs for ours, theirs in zip(expected, measured, strict=True)]
        assert max(map(abs, differ)) <= (WITHIN_BYTES if tier == "device" else 0), (tier, differ, measured, expected)
        assert getattr(predicted, f"{tier}_peak_bytes") == max(expected)
    differ = []
    for laid, step, answer in zip(laid_out, stages, answers, strict=True):
        peaks = laid.setting.stages.estimate(laid.schedule, laid.resident, step, choices=case.plan.activations.per_block)
        assert peaks.evaluation is not None
        differ.append(int(peaks.evaluation.peak.sum()) - answer["evaluation_peak"])
    assert max(map(abs, differ)) <= WITHIN_BYTES, differ


@pytest.mark.breadth
@pytest.mark.parametrize("case", [*STATE, *WEIGHTS, *ACTIVATIONS], ids=lambda case: case.name)
def test_a_cut_that_keeps_a_part_on_the_host_has_the_bits_of_one_device_and_the_bytes_of_its_prediction(
    carry_out: CarryOut, on_one_device: OnOneDevice, case: RankCase
) -> None:
    assert_bytes_as_predicted(case, assert_bits_of_one_device(case, carry_out, on_one_device))


@pytest.mark.parametrize("has_kinds", [False, True])
def test_host_bytes_are_those_of_the_stage_that_has_most_there_in_each_stage_of_the_job(has_kinds: bool) -> None:
    machine = play_devices(make_cpu_machine(), [GIB, 2 * GIB])
    shares = tuple(RankShare(device=kind.device.name) for kind in machine.kinds) if has_kinds else ()
    away: dict[str, Any] = {"gradients": "host", "state": ON_HOST, "weights": WeightsPlan(place="host")}
    case = cut(**away, stage_blocks=(3, 2), activations=(*("recompute",) * 3, "keep", "keep"), shares=shares)
    # The first has most on the host, the last on the device.
    profile = profile_of(case)
    here: dict[str, Any] = {"plan": case.plan, "workload": case.workload, "machine": machine}
    stages = lay_out_stages(profile, **here)
    found = add_memory(estimate_training(profile, **here), profile, **here)
    most_bytes = stages[0].resident.host
    assert most_bytes > stages[1].resident.host
    assert stages[0].highest.num_bytes < stages[1].highest.num_bytes
    assert {peak.stage: peak.host_peak_bytes for peak in found.stages}["evaluation"] == most_bytes
    assert found.memory is not None
    assert found.memory.host_pageable.value == found.host_peak_bytes
