"""Searched plans for pairs: they keep the budget to the byte and leave the loss whole."""

from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.goal import Goal
from optimizer.profile.extent import Extent
from optimizer.profile.trace.trace import profile_model
from optimizer.runtime.job.measure import measure_step
from optimizer.search.search import search_plans
from optimizer.workload import Adapter, TrainingWorkload
from tests.optimizer.runtime.tiny import make_spec


@pytest.mark.parametrize("objective", ["dpo", "orpo"])
def test_the_plan_that_a_search_takes_under_a_budget_holds_what_it_says(objective: Any) -> None:
    spec = make_spec("llama")
    workload = TrainingWorkload(
        sequence_length=64,
        global_batch_size=4,
        packing="off",
        loss_on="assistant",
        objective=objective,
        adapter=Adapter(rank=4) if objective == "dpo" else None,
    )
    extent = Extent(representations=("fp32",), shapes=tuple((size, 64) for size in (1, 2, 4)))
    profile = profile_model(spec, adapter=workload.adapter, objective=objective, extent=extent)
    goal = Goal(device_budget_bytes=2_500_000)
    chosen = search_plans(profile, workload=workload, goal=goal, machine=make_cpu_machine()).chosen
    measured = measure_step(spec, plan=chosen.plan, workload=workload, device="cpu")
    assert measured.device_peak_bytes == chosen.prediction.device_peak_bytes <= goal.device_budget_bytes
    assert chosen.plan.logits_and_loss.num_chunks == 1
