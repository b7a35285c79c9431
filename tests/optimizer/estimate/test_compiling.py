"""Compiled blocks make a price's intervals wider where nothing was measured."""

from dataclasses import replace

import pytest

from optimizer.estimate.compiling import widen_memory, widen_time
from optimizer.plan.activations import ActivationsPlan, KernelsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan

PLAIN = Plan(batch=BatchPlan(micro_batch_size=1, accumulation_steps=1), activations=ActivationsPlan(per_block=("keep",)))
COMPILED = replace(PLAIN, kernels=KernelsPlan(blocks="compiled"))


def test_times_of_compiled_blocks_have_a_wider_interval() -> None:
    assert widen_time(PLAIN, (0.9, 1.2)) == (0.9, 1.2)
    assert widen_time(COMPILED, (0.9, 1.2)) == pytest.approx((0.72, 1.5))


@pytest.mark.parametrize(("device_kind", "share"), [("cpu", 0.0), ("cuda", 0.1)])
def test_peaks_are_as_sure_as_ever_where_the_code_that_runs_was_traced(device_kind: str, share: float) -> None:
    assert widen_memory(PLAIN, device_kind=device_kind) == 0.0
    assert widen_memory(COMPILED, device_kind=device_kind) == share
