"""A model that is cut into more stages than there are ranks: the bits of one device, and bytes as predicted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import Adapter
from tests.optimizer.runtime.ranks.cases import RankCase, make_case
from tests.optimizer.runtime.ranks.conftest import CarryOut, answers_of
from tests.optimizer.runtime.ranks.pipeline.test_jobs import TWO_STEPS, RunJob
from tests.optimizer.runtime.ranks.pipeline.test_offload import assert_bytes_as_predicted
from tests.optimizer.runtime.ranks.pipeline.test_steps import assert_bits_of_one_device
from tests.optimizer.runtime.ranks.test_steps import OnOneDevice
from tests.optimizer.runtime.ranks.test_train import make_rank_plan, run_job, weights_of

__all__ = ["run_job"]
ON_HOST = OptimizerStatePlan(place="host")


def rounds(**changes: Any) -> RankCase:
    given = {"model": "untied", "stage_blocks": (1, 1, 1, 1), "activations": ("keep",) * 4, "accumulation_steps": 4}
    return make_case(**{**given, "num_rounds": 2, "schedule": "breadth_first", **changes})


AWAY: dict[str, Any] = {"gradients": "host", "state": ON_HOST}
RESIDENT = [
    rounds(has_uneven_labels=True),
    rounds(stage_blocks=(1, 2), num_rounds=1, activations=("keep", "recompute", "selective")),
    rounds(stage_blocks=(1, 2, 2, 1), activations=("keep", "recompute", "keep", "selective", "keep", "keep")),
    rounds(stage_blocks=(1,) * 6, num_rounds=3, activations=("keep", "recompute") * 3, accumulation_steps=2),
    rounds(stage_blocks=(1,) * 6, activations=("keep",) * 6, accumulation_steps=5, weights=WeightsPlan(dtype="bf16")),
    rounds(stage_blocks=(1, 1, 1, 2), activations=("offload",) * 5, num_chunks=4),
    rounds(adapter=Adapter(rank=4), model="tied", weights=WeightsPlan(frozen="int8")),
]
POOLED = [
    rounds(adapter=Adapter(rank=4), weights=WeightsPlan(place="host", frozen="int4"), activations=("recompute",) * 4),
    rounds(**AWAY, weights=WeightsPlan(place="host"), has_uneven_labels=True),
    rounds(
        **AWAY,
        weights=WeightsPlan(place="host", prefetch=0),
        stage_blocks=(2, 1, 1, 2),
        activations=("keep", "offload") * 3,
    ),
    rounds(
        **AWAY,
        weights=WeightsPlan(place="host", prefetch=3, dtype="bf16"),
        stage_blocks=(1,) * 6,
        num_rounds=3,
        activations=("recompute",) * 6,
    ),
]


@pytest.mark.breadth
@pytest.mark.parametrize("case", [*RESIDENT, *POOLED], ids=lambda case: case.name)
def test_micro_batches_that_come_round_end_with_the_bits_of_one_device(
    carry_out: CarryOut, on_one_device: OnOneDevice, case: RankCase
) -> None:
    assert_bytes_as_predicted(case, assert_bits_of_one_device(case, carry_out, on_one_device))


AROUND = DeviceLayout(num_devices=2, stage_blocks=(1, 1, 1, 1), schedule="breadth_first")
HALVES = DeviceLayout(num_devices=2, stage_blocks=(1, 3))
HERE, ALONE = WeightsPlan(), DeviceLayout()


def deep_plan(layout: DeviceLayout, *, weights: WeightsPlan = HERE) -> Plan:
    plan = replace(make_rank_plan(1, accumulation_steps=2), layout=layout, activations=ActivationsPlan(per_block=("keep",) * 4))
    if weights is HERE:
        return plan
    return replace(plan, weights=weights, gradients=GradientsPlan(choice="host"), optimizer_state=ON_HOST)


@pytest.mark.parametrize("weights", [HERE, WeightsPlan(place="host")], ids=["resident", "pooled"])
def test_a_job_whose_micro_batches_come_round_leaves_the_files_of_one_device(
    run_job: RunJob, tmp_path: Path, weights: WeightsPlan
) -> None:
    plans = deep_plan(ALONE, weights=weights), deep_plan(AROUND, weights=weights)
    done = [
        answers_of(run_job(plan, job=job, model="deep", workload=TWO_STEPS))[0]["result"]
        for job, plan in zip(("one", "two"), plans, strict=True)
    ]
    for key in ("loss", "validation_loss", "validation_loss_start", "weights_sha256"):
        assert done[1]["summary"][key] == done[0]["summary"][key], key
    assert {each["file"]: each["sha256"] for each in done[1]["artifacts"]} == {
        each["file"]: each["sha256"] for each in done[0]["artifacts"]
    }
    for name in ("model.safetensors", "optimizer.safetensors"):
        files = [tmp_path / job / "checkpoints" / "step-000002-f1" / name for job in ("one", "two")]
        assert files[0].read_bytes() == files[1].read_bytes(), name


@pytest.mark.parametrize(("before", "after"), [(AROUND, HALVES), (ALONE, AROUND)], ids=["to-halves", "from-one-device"])
def test_a_checkpoint_goes_on_with_more_or_fewer_stages(
    run_job: RunJob, tmp_path: Path, before: DeviceLayout, after: DeviceLayout
) -> None:
    answers_of(run_job(deep_plan(ALONE), job="whole", model="deep", workload=TWO_STEPS))
    answers_of(run_job(deep_plan(before), job="job", model="deep", workload=TWO_STEPS, stops_before_step=3))
    run_job(deep_plan(after), job="job", model="deep", workload=TWO_STEPS, resume_from="newest", attempt=2)
    found, expected = weights_of(tmp_path / "job"), weights_of(tmp_path / "whole")
    assert all((found[name] == weight).all() for name, weight in expected.items())


def test_a_rank_with_several_stages_that_dies_ends_the_other(run_job: RunJob) -> None:
    plan = deep_plan(AROUND)
    lost = run_job(plan, job="job", model="deep", dies_before_step=3, ranks_only=[1], workload=TWO_STEPS)
    assert lost[1]["died"] == -9
    assert lost[0]["error"]["code"] == "rank_lost"
