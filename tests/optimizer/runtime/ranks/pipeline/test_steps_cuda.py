"""Twins on a card of tests/hostile_device/ranks/test_ranks.py: one rank of two, whose other one streams of the same card play.

Ranks of NCCL need a card each, so what is shown on one is that compute and memory wait for collectives beside them. A run in
which the host waits for each collective has the right numbers.
"""

from pathlib import Path

import pytest
import torch

from optimizer.models.spec import read_model_spec
from optimizer.runtime.device.backends import backend_of
from tests.hostile_device.ranks.cases import CUTS, STAGED, assert_like, generate_beside_another, run_beside_another
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.runtime.ranks.cases import RankCase

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("prepared_card")]

CUDA = torch.device("cuda:0")


# Twin: test_ranks.test_hidden_states_and_gradients_of_other_stages_are_waited_for_and_kept_until_they_are_taken
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", CUTS.values(), ids=CUTS)
def test_a_stage_waits_for_others_on_a_card(tmp_path: Path, case: RankCase, rank: int) -> None:
    backend = backend_of(CUDA)
    beside = run_beside_another(case, tmp_path / "beside", rank=rank, backend=backend)
    at_once = run_beside_another(case, tmp_path / "at once", rank=rank, backend=backend, are_at_once=True)
    assert beside[2]
    assert_like(beside, at_once)


# Twin: test_ranks.test_a_stage_of_a_generation_waits_for_hidden_states_and_until_its_own_are_taken
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_of_a_generation_waits_for_others_on_a_card(tmp_path: Path, rank: int) -> None:
    backend, spec = backend_of(CUDA), read_model_spec(SMALL_CONFIGS["qwen3"])
    tokens, sent = generate_beside_another(spec, STAGED, tmp_path / "beside", rank=rank, backend=backend)
    expected, expected_sent = generate_beside_another(
        spec, STAGED, tmp_path / "at once", rank=rank, backend=backend, are_at_once=True
    )
    assert tokens == expected
    assert len(sent) == len(expected_sent)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(sent, expected_sent, strict=True))
