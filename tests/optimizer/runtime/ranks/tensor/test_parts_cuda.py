"""Twins on a card of tests/hostile_device/ranks/test_ranks.py: one rank of two that share blocks, or that take steps alone.

The other rank is played by streams of the same card.
"""

from pathlib import Path

import pytest
import torch

from optimizer.runtime.device.backends import backend_of
from tests.hostile_device.ranks.cases import ALONE, REPLICAS, SHARED, assert_like, run_beside_another
from tests.optimizer.runtime.ranks.cases import RankCase

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("prepared_card")]

CUDA = torch.device("cuda:0")
CASES = {
    **SHARED,
    **{f"alone, {name}": case for name, case in ALONE.items()},
    **{f"replicas, {name}": case for name, case in REPLICAS.items()},
}


# Twins: test_ranks.test_sums_inside_of_blocks_that_ranks_share_are_waited_for
# and test_ranks.test_weights_of_steps_alone_are_brought_together_as_updates_leave_them
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_sums_of_ranks_are_waited_for_on_a_card(tmp_path: Path, case: RankCase, rank: int) -> None:
    backend = backend_of(CUDA)
    beside = run_beside_another(case, tmp_path / "beside", rank=rank, backend=backend)
    assert_like(beside, run_beside_another(case, tmp_path / "at once", rank=rank, backend=backend, are_at_once=True))
