"""Compiled blocks with other techniques: predicted bytes are those that a step of compiled blocks really holds."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from optimizer.base.errors import NotProfiled
from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Machine
from optimizer.models.spec import ModelSpec
from optimizer.plan.activations import KernelsPlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.extent import Extent
from optimizer.runtime.job.measure import StepMeasurement
from optimizer.workload import Adapter, TrainingWorkload
from tests.breadth import COMPILED_BLOCKS
from tests.optimizer.profiles import trace
from tests.optimizer.techniques.checks import check_bytes
from tests.optimizer.techniques.plans import TECHNIQUES, make_plan, make_workload
from tests.optimizer.techniques.test_pairs import machine as machine

pytestmark = pytest.mark.breadth(COMPILED_BLOCKS)

COMBINATIONS = (
    (),
    ("recompute",),
    ("offload",),
    ("offload", "recompute"),
    ("accumulate", "recompute"),
    ("chunked loss",),
    ("consume",),
    ("gradients on host",),
    ("state on host", "offload"),
    ("weights on host", "recompute"),
)


def compiled(plan: Plan) -> Plan:
    return replace(plan, kernels=KernelsPlan(blocks="compiled"))


def extent_of(plan: Plan) -> Extent:
    return Extent(representations=(plan.representation,), shapes=((2, 24), (4, 24)))


@pytest.mark.parametrize("names", COMBINATIONS, ids=" and ".join)
def test_bytes_are_those_predicted(
    spec: ModelSpec, machine: Machine, measure: Callable[..., StepMeasurement], names: tuple[str, ...]
) -> None:
    assert set(names) <= set(TECHNIQUES)
    plan = compiled(make_plan(*names))
    workload = make_workload(plan)
    check_bytes(trace(spec, extent=extent_of(plan)), plan, workload, measure(plan, workload), machine=machine)


@pytest.mark.parametrize(
    "weights",
    [WeightsPlan(dtype="bf16"), WeightsPlan(autocast="bf16"), WeightsPlan(frozen="int8"), WeightsPlan(frozen="int4")],
    ids=lambda weights: weights.representation,
)
def test_bytes_of_other_formats_are_those_predicted(
    spec: ModelSpec, machine: Machine, measure: Callable[..., StepMeasurement], weights: Any
) -> None:
    adapter = None if weights.frozen == "same" else Adapter(rank=4)
    plan = replace(compiled(make_plan("recompute")), weights=weights)
    workload = replace(make_workload(plan), adapter=adapter)
    profile = trace(spec, adapter=adapter, extent=extent_of(plan))
    check_bytes(profile, plan, workload, measure(plan, workload), machine=machine)


def test_compiling_is_part_of_the_price_of_a_run_and_not_of_a_step(spec: ModelSpec, machine: Machine) -> None:
    plan = compiled(make_plan())
    workload = replace(make_workload(plan), num_steps=100)
    predicted = estimate_training(trace(spec, extent=extent_of(plan)), plan=plan, workload=workload, machine=machine)
    steps_s = predicted.step_ms / 10
    assert predicted.once_s == 20.0
    assert predicted.total_s == pytest.approx(steps_s + 20.0)
    assert predicted.over(200).total_s == pytest.approx(2 * steps_s + 20.0)
    low_s, high_s = predicted.total_interval_s
    assert low_s == pytest.approx(predicted.step_low_ms / 10 + 20.0 / 3)
    assert high_s == pytest.approx(predicted.step_high_ms / 10 + 60.0)


def test_a_profile_without_compiled_blocks_does_not_price_them(spec: ModelSpec, machine: Machine) -> None:
    plan = make_plan()
    profile = trace(spec, extent=extent_of(plan))
    workload: TrainingWorkload = make_workload(plan)
    estimate_training(profile, plan=plan, workload=workload, machine=machine)
    with pytest.raises(NotProfiled, match="fp32@compiled weights"):
        estimate_training(profile, plan=compiled(plan), workload=workload, machine=machine)
