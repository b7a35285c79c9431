"""Reading ahead changes when batches are read, never which."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optimizer.data.batches import Batches
from optimizer.data.token_file import FORMAT_VERSION, TokenFile, TokenManifest, write_manifest
from optimizer.plan.batch import BatchPlan
from optimizer.runtime.step.batch import NUM_STEPS_AHEAD, BatchReader

CPU = torch.device("cpu")
PLAN = BatchPlan(micro_batch_size=2, accumulation_steps=2)


@pytest.fixture
def batches(tmp_path: Path) -> Batches:
    np.arange(403, dtype="<u4").tofile(tmp_path / "tokens.bin")
    facts: dict[str, Any] = {"vocab_size": 403, "end_of_text_id": 0, "tokenizer": "own", "num_documents": 1}
    hashes = {"dataset_sha256": "", "tokenizer_sha256": "", "tokens_sha256": ""}
    write_manifest(tmp_path, TokenManifest(version=FORMAT_VERSION, dtype="uint32", num_tokens=403, **facts, **hashes))
    return Batches(TokenFile.open(tmp_path), sequence_length=10, seed=3)


@pytest.fixture
def reader(batches: Batches) -> Iterator[BatchReader]:
    reader = BatchReader(batches, plan=PLAN, num_steps=5, device=CPU)
    yield reader
    reader.close()


def expected(batches: Batches, step: int) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(map(torch.from_numpy, batches.train_batch(step, index, 2, 2))) for index in range(2)]


def assert_same(found: Any, wanted: Any) -> None:
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [3, 4], [2, 0, 4, 1]], ids=["from the start", "resumed", "any"])
def test_each_step_gets_its_own_batches(batches: Batches, reader: BatchReader, order: list[int]) -> None:
    for step in order:
        assert_same(reader.read(step), expected(batches, step))


def test_the_next_steps_are_read_by_another_thread_but_none_after_the_last(
    batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, bool]] = []
    original = batches.train_slice

    def watched(step: int, *args: int) -> Any:
        read.append((step, threading.current_thread() is threading.main_thread()))
        return original(step, *args)

    monkeypatch.setattr(batches, "train_slice", watched)
    reader = BatchReader(batches, plan=BatchPlan(micro_batch_size=4, accumulation_steps=1), num_steps=5, device=CPU)
    reader.read(0)
    reader.read(3)
    reader.close()
    assert {step for step, _ in read} <= {0, *range(1, 1 + NUM_STEPS_AHEAD), 3, 4}
    assert not any(is_main for _, is_main in read)


def test_a_fault_while_reading_ahead_is_raised_where_the_step_is_asked_for(
    batches: Batches, reader: BatchReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: int) -> Any:
        raise OSError("the disk is gone")

    monkeypatch.setattr(batches, "train_slice", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        reader.read(0)
