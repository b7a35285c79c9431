"""Bytes that each rank is predicted to send in a step are those that the kernel counted of its connections, to the byte."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.estimate.categories.network import Network, estimate_sent_bytes
from optimizer.estimate.categories.tensors import list_tensors
from optimizer.estimate.step.setting import lay_out_ranks
from optimizer.models.spec import read_model_spec
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import Adapter
from tests.optimizer.profiles import extent_of, trace
from tests.optimizer.runtime.ranks.cases import MODELS, RankCase, make_case
from tests.optimizer.runtime.ranks.conftest import answers_of
from tests.optimizer.runtime.ranks.pool import RankPool

CASES = (
    make_case(data="replicated", accumulation_steps=2),
    make_case(data="zero1"),
    make_case(data="zero2", accumulation_steps=2),
    make_case(data="replicated", num_ranks=3),
    make_case(data="zero2", num_ranks=3, weights=WeightsPlan(dtype="bf16")),
    make_case(data="zero1", gradients="host", state=OptimizerStatePlan(place="host"), weights=WeightsPlan(place="host")),
    make_case(data="replicated", gradients="consume"),
    make_case(data="zero1", adapter=Adapter(rank=4)),
    make_case(data="zero1", num_ranks=4, replicas=2),
    make_case(data="zero2", num_ranks=4, replicas=2, accumulation_steps=2),
    make_case(data="zero2", num_ranks=4, replicas=2, accumulation_steps=2, gradients="host"),
    make_case(data="zero3", num_ranks=4, replicas=2, adapter=Adapter(rank=4)),
)


@pytest.mark.breadth
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernel_counts_what_was_predicted(case: RankCase, pool: RankPool, tmp_path: Path) -> None:
    profile = trace(
        read_model_spec(MODELS[case.model]), extent=extent_of([(case.plan, case.workload)]), adapter=case.workload.adapter
    )
    machine = replace(make_cpu_machine(), num_threads=case.num_ranks)
    laid = lay_out_ranks(profile, plan=case.plan, workload=case.workload, machine=machine)
    command = {"kind": "steps", "case": case.to_json(), "folder": str(tmp_path), "counts": True}
    answers = answers_of(pool.run(command, num_ranks=case.num_ranks))
    # In the first step ranks also compare in which order their gradients are complete.
    second = [answer["sent_bytes"][1] for answer in answers]
    assert list(laid[0].setting.rank_sent_bytes) == second
    assert second == [answer["sent_bytes"][2] for answer in answers]
    network = Network.of(machine, case.plan.layout)
    assert network is not None
    if not (case.plan.shares_homes(trains_all=case.workload.adapter is None) or case.plan.layout.shares_weights):
        assert list(estimate_sent_bytes(network, list_tensors(profile).num_elements, case.plan)) == second
