"""A model that is cut and keeps a part of itself on the host: the bits of one device, and bytes on both tiers as predicted."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.estimate.step.setting import lay_out_stages
from optimizer.estimate.training import estimate_training, simulate_step
from optimizer.models.spec import read_model_spec
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import Adapter
from tests.optimizer.profiles import extent_of, trace
from tests.optimizer.runtime.ranks.cases import MODELS, RankCase, make_case
from tests.optimizer.runtime.ranks.conftest import CarryOut
from tests.optimizer.runtime.ranks.test_pipeline import assert_bits_of_one_device

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
    spec = read_model_spec({**MODELS[case.model], "num_hidden_layers": len(case.plan.activations.per_block)})
    profile = trace(spec, extent=extent_of([(case.plan, case.workload)]), adapter=case.workload.adapter)
    here: dict[str, Any] = {"plan": case.plan, "workload": case.workload, "machine": replace(make_cpu_machine(), num_threads=2)}
    predicted = estimate_training(profile, **here)
    stages = [simulate_step(laid) for laid in lay_out_stages(profile, **here)]
    for tier in ("device", "host"):
        measured = [max(answer["peaks" if tier == "device" else "host_peaks"][1:]) for answer in answers]
        expected = [getattr(stage, f"{tier}_peak_bytes") for stage in stages]
        differ = [ours - theirs for ours, theirs in zip(expected, measured, strict=True)]
        assert max(map(abs, differ)) <= (WITHIN_BYTES if tier == "device" else 0), (tier, differ, measured, expected)
        assert getattr(predicted, f"{tier}_peak_bytes") == max(expected)


@pytest.mark.breadth
@pytest.mark.parametrize("case", [*STATE, *WEIGHTS, *ACTIVATIONS], ids=lambda case: case.name)
def test_a_cut_that_keeps_a_part_on_the_host_has_the_bits_of_one_device_and_the_bytes_of_its_prediction(
    carry_out: CarryOut, on_one_device: OnOneDevice, case: RankCase
) -> None:
    assert_bytes_as_predicted(case, assert_bits_of_one_device(case, carry_out, on_one_device))
