"""A training attempt that runs out of memory says which of its ranks did, and why."""

import dataclasses

import pytest

from optimizer.base.errors import OutOfDeviceMemory
from optimizer.goal import Goal
from tests.optimizer.estimate.test_causes import predict
from worker.run.training import _add_cause


@pytest.mark.parametrize(("rank", "cause"), [(0, "uneven_placement"), (1, "step")])
def test_the_cause_is_that_of_the_rank_that_ran_out(rank: int, cause: str) -> None:
    error = OutOfDeviceMemory(
        requested_bytes=100, in_use_bytes=950, budget_bytes=1000, bytes_by_category={"activations": 950}, category="activations"
    )
    prediction = dataclasses.asdict(predict(rank_peak_bytes=(900, 500)))
    _add_cause(error, Goal(device_budget_bytes=1000), prediction=prediction, place={"rank": rank, "num_ranks": 2})
    assert (error.fields["rank"], error.fields["cause"]) == (rank, cause)
