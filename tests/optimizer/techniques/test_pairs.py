"""Every technique alone and with every other: the bits of plain training, and the predicted bytes on each tier and link.

Each plan runs two steps of one tiny model with gradients clipped (not where they are consumed, which cannot be). Plain means the
same micro-batches and the same chunks of the loss, since those change the order of sums, and nothing else.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from optimizer.hardware.machine import Device, Machine
from optimizer.hardware.rates import Rates
from optimizer.models.spec import ModelSpec
from optimizer.profile.profile import Profile
from optimizer.runtime.job.measure import StepMeasurement
from optimizer.workload import TrainingWorkload
from tests.optimizer.techniques.checks import check_bytes
from tests.optimizer.techniques.plans import TECHNIQUES, make_plan, make_workload


def list_cases() -> Iterator[Any]:
    """All that can be carried out, each plan once: some pairs are the same as one of the two."""
    seen = set()
    for names in [*((name,) for name in TECHNIQUES), *itertools.combinations(TECHNIQUES, 2)]:
        plan = make_plan(*names)
        if plan.fingerprint not in seen and plan.find_conflict(make_workload(plan)) is None:
            seen.add(plan.fingerprint)
            yield pytest.param(names, id=" and ".join(names))


CASES = list(list_cases())


@pytest.fixture(scope="module")
def machine() -> Machine:
    rates = Rates(
        matmul_flops_per_s={"fp32": 5e10},
        attention_flops_per_s={"fp32": 3e10},
        memory_bytes_per_s=8e9,
        op_overhead_s=5e-6,
        device_to_host_bytes_per_s=5e9,
        host_to_device_bytes_per_s=5e9,
        optimizer_elements_per_s={"adamw_32": 3e8},
        source="measured",
    )
    device = Device(kind="cpu", name="test", memory_bytes=2**34)
    return Machine(name="test", device=device, host_memory_bytes=2**34, rates=rates)


@pytest.fixture(scope="module")
def plain(spec: ModelSpec) -> Callable[..., str]:
    """The weights' hash of two steps of keeping everything, in the batch and the chunks of a plan."""
    from optimizer.runtime.job.measure import measure_step

    @functools.cache
    def run(batch: Any, logits_and_loss: Any, workload: TrainingWorkload) -> str:
        plan = dataclasses.replace(make_plan(), batch=batch, logits_and_loss=logits_and_loss)
        return measure_step(spec, plan=plan, workload=workload, with_weights_hash=True).weights_sha256

    return run


@pytest.mark.breadth
@pytest.mark.parametrize("names", CASES)
def test_the_weights_are_those_of_plain_training(
    measure: Callable[..., StepMeasurement], plain: Callable[..., str], names: tuple[str, ...]
) -> None:
    plan = make_plan(*names)
    assert plan.is_lossless
    assert measure(plan, make_workload(plan)).weights_sha256 == plain(plan.batch, plan.logits_and_loss, make_workload(plan))


@pytest.mark.breadth
@pytest.mark.parametrize("names", CASES)
def test_bytes_on_each_tier_and_over_each_link_are_those_predicted(
    profile: Profile, machine: Machine, measure: Callable[..., StepMeasurement], names: tuple[str, ...]
) -> None:
    plan = make_plan(*names)
    workload = make_workload(plan)
    check_bytes(profile, plan, workload, measure(plan, workload), machine=machine)


def test_different_seeds_give_different_weights(measure: Callable[..., StepMeasurement], spec: ModelSpec) -> None:
    from optimizer.runtime.job.measure import measure_step

    plan = make_plan()
    other = dataclasses.replace(make_workload(plan), seed=1)
    assert (
        measure_step(spec, plan=plan, workload=other, with_weights_hash=True).weights_sha256
        != measure(plan, make_workload(plan)).weights_sha256
    )
