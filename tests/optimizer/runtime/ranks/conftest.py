from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.optimizer.runtime.ranks.cases import RankCase
from tests.optimizer.runtime.ranks.pool import RankPool
from tests.optimizer.runtime.ranks.rank_process import carry_out_steps

Tensors = dict[str, Any]
CarryOut = Callable[..., tuple[list[dict[str, Any]], Path]]


@pytest.fixture
def carry_out(pool: RankPool, tmp_path: Path) -> CarryOut:
    """Carries out a case; gives each rank's answer, and the folder with weights and state by rank."""

    def run(case: RankCase, **faults: Any) -> tuple[list[dict[str, Any]], Path]:
        folder = tmp_path / f"ranks-{case.name}"
        folder.mkdir(exist_ok=True)
        command = {"kind": "steps", "case": case.to_json(), "folder": str(folder), **faults}
        return pool.run(command, num_ranks=case.num_ranks), folder

    return run


@pytest.fixture
def on_one_device(tmp_path: Path) -> Callable[[RankCase], tuple[dict[str, Any], Path]]:
    """Carries out the same micro-batches in this process."""

    def run(case: RankCase) -> tuple[dict[str, Any], Path]:
        folder = tmp_path / f"one-{case.name}"
        folder.mkdir(exist_ok=True)
        return carry_out_steps(case.on_one_device, ranks=None, folder=folder), folder

    return run


def answers_of(replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers of ranks that all came to their end."""
    for reply in replies:
        assert "answer" in reply, reply.get("fault", reply)
    return [reply["answer"] for reply in replies]


def read_weights(folder: Path, *, rank: int = 0) -> Tensors:
    return load_file(folder / f"weights-{rank}.safetensors")


def read_state(folder: Path, *, rank: int = 0) -> Tensors:
    return load_file(folder / f"state-{rank}.safetensors")
