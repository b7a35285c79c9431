"""A model that is cut into more stages than there are ranks: the bits of one device, and bytes as predicted."""

from typing import Any

import pytest

from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import Adapter
from tests.optimizer.runtime.ranks.cases import RankCase, make_case
from tests.optimizer.runtime.ranks.conftest import CarryOut
from tests.optimizer.runtime.ranks.pipeline.test_offload import assert_bytes_as_predicted
from tests.optimizer.runtime.ranks.test_pipeline import assert_bits_of_one_device
from tests.optimizer.runtime.ranks.test_steps import OnOneDevice

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
