"""The check of a card runs here on the CPU device, on a model small enough to be traced in a test."""

import json

import pytest

from benchmarks import gpu_check
from benchmarks.common.record import Record
from optimizer.formats.allocator_slack import ALLOCATOR_SLACK_BYTES, ALLOCATOR_SLACK_SHARE
from optimizer.models.spec import read_model_spec


@pytest.fixture(scope="module")
def record() -> Record:
    config = {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": 128,
        "n_positions": 64,
    }
    return gpu_check.check("cpu", quick=True, models={"tiny": read_model_spec(config)}, probe_s=0.1)


def test_nothing_fails_and_the_exact_goals_are_met(record: Record) -> None:
    assert [row["traceback"] for row in record.rows if row["what"] == "failed"] == []
    summary = gpu_check.summarize(record.rows)
    for name in ("bits equal those of keeping", "plans kept under their cap", "plain training refused"):
        assert summary[name]["met"], summary[name]


def test_the_machine_and_the_rows_are_json(record: Record) -> None:
    assert json.loads(json.dumps([record.machine, record.rows], allow_nan=False))


def test_offloading_is_among_what_runs(record: Record) -> None:
    assert any(row.get("copied_bytes") for row in record.rows)


def test_a_card_keeps_room_for_its_allocator_above_the_budget() -> None:
    for usable_bytes in (2**30, 2**33, 2**36):
        budget_bytes = gpu_check.budget_of_card(usable_bytes)
        slack_bytes = max(ALLOCATOR_SLACK_BYTES, budget_bytes * ALLOCATOR_SLACK_SHARE)
        assert budget_bytes + slack_bytes == pytest.approx(usable_bytes, rel=1e-6)


def test_a_row_that_failed_misses_its_goal() -> None:
    found = [{"what": "bits", "equal": True}, {"what": "failed"}]
    assert not gpu_check.summarize(found)["rows that failed"]["met"]
