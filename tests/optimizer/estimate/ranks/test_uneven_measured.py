"""Each unequal rank's predicted peak is what its own meter counts, to the byte: on two and three processes of gloo."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.estimate.training import estimate_training
from optimizer.models.spec import read_model_spec
from optimizer.plan.devices.layout import RankShare
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import Adapter
from tests.optimizer.profiles import extent_of, trace
from tests.optimizer.runtime.ranks.cases import MODELS, RankCase, make_case
from tests.optimizer.runtime.ranks.pool import RankPool

SIZES = (
    RankShare(micro_batch_size=1, per_block=("recompute", "offload", "selective")),
    RankShare(micro_batch_size=3, per_block=("keep", "keep", "recompute")),
)
COUNTS = (
    RankShare(accumulation_steps=1, micro_batch_size=1, per_block=("recompute",) * 3),
    RankShare(accumulation_steps=2, micro_batch_size=2),
    RankShare(accumulation_steps=3, micro_batch_size=1),
)
ON_HOST: dict[str, Any] = {"gradients": "host", "state": OptimizerStatePlan(place="host")}


def measure(case: RankCase, pool: RankPool, folder: Path) -> tuple[tuple[int, ...], ...]:
    """The peaks of each rank over its steady steps, on the device and on the host."""
    replies = pool.run({"kind": "steps", "case": case.to_json(), "folder": str(folder)}, num_ranks=case.num_ranks)
    return tuple(tuple(max(reply["answer"][name][1:]) for reply in replies) for name in ("peaks", "host_peaks"))


@pytest.mark.breadth
@pytest.mark.parametrize(
    "case",
    [
        make_case(shares=SIZES),
        make_case(shares=SIZES, data="zero1", accumulation_steps=2),
        make_case(shares=SIZES, data="zero2", accumulation_steps=2),
        make_case(shares=SIZES, data="zero2", weights=WeightsPlan(place="host"), **ON_HOST),
        make_case(shares=SIZES, gradients="consume", weights=WeightsPlan(dtype="bf16")),
        make_case(shares=SIZES, data="zero1", weights=WeightsPlan(frozen="int4"), adapter=Adapter(rank=4)),
        make_case(shares=COUNTS),
        make_case(shares=COUNTS, data="zero1", optimizer="sgd", momentum=0.0, sequence_length=8),
    ],
    ids=lambda case: case.name,
)
def test_unequal_ranks_are_predicted_to_the_byte(case: RankCase, pool: RankPool, tmp_path: Path) -> None:
    machine = replace(make_cpu_machine(), num_threads=case.num_ranks)
    extent = extent_of([(case.plan, case.workload)])
    profile = trace(read_model_spec(MODELS[case.model]), extent=extent, adapter=case.workload.adapter)
    predicted = estimate_training(profile, plan=case.plan, workload=case.workload, machine=machine)
    on_device, on_host = measure(case, pool, tmp_path)
    assert predicted.rank_peak_bytes == on_device
    assert predicted.rank_peak_bytes == tuple(rank.peak_bytes for rank in predicted.ranks)
    assert len(set(predicted.rank_peak_bytes)) == case.num_ranks
    assert predicted.host_peak_bytes == max(on_host)
    assert [rank.num_sequences for rank in predicted.ranks] == list(case.plan.rank_sequences)
