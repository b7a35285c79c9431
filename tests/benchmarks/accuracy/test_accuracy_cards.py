"""The part of the proof for cards runs here on the CPU device, on a shape small enough for a test."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.accuracy.card_cases import cuda_cards, small_cards
from benchmarks.accuracy.card_summary import summarize_cards
from benchmarks.accuracy.cards import bytes_of_others, measure_cards
from benchmarks.common import packages
from benchmarks.common.journal import Journal
from optimizer.base.units import GIB, MIB
from optimizer.models.spec import read_model_spec
from optimizer.profile.trace import trace

CPU = torch.device("cpu")
SPEC = read_model_spec(
    {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 128, "n_positions": 64}
)
FITS_BYTES = 8 * MIB


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Plans that fit, and one that does not."""
    torch.set_num_threads(1)
    journal = Journal(file=None, machine={})
    cards = small_cards(SPEC, ((), ("recompute",), ("offload", "chunks")), card_bytes=FITS_BYTES)
    too_small = small_cards(SPEC, ((),), card_bytes=MIB // 2)
    measure_cards(journal, CPU, quick=False, cards=replace(cards, cases=cards.cases + too_small.cases))
    return journal.rows


def test_nothing_fails_and_every_cap_bites(rows: list[dict[str, Any]]) -> None:
    assert [row.get("traceback") for row in rows if row["what"] == "failed"] == []
    assert [row["bites"] for row in rows if row["what"] == "cap"] == [True, True]


def test_predicted_bytes_are_the_measured_ones(rows: list[dict[str, Any]]) -> None:
    ran = [row for row in rows if row["what"] == "card" and row["finished"]]
    assert len(ran) == 3
    assert all(row["predicted_allocated_bytes"] == row["allocated_bytes"] for row in ran)


def test_what_does_not_fit_is_called_so_and_ends_with_the_sizes(rows: list[dict[str, Any]]) -> None:
    (row,) = [row for row in rows if row["what"] == "card" and not row["finished"]]
    assert row["verdict"] == "does_not_fit"
    assert "in use" in row["why_not"]


def test_the_summary_has_every_goal_and_the_rows_are_json(rows: list[dict[str, Any]]) -> None:
    summary = summarize_cards(rows)
    assert summary["called fits on a card that it does not fit on"] == {"value": 0, "goal": 0, "met": True}
    assert summary["allocated, worst error"]["met"]
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


def test_cases_left_out_for_lack_of_time_are_reported() -> None:
    journal = Journal(file=None, machine={})
    cards = small_cards(SPEC, ((),), card_bytes=FITS_BYTES)
    measure_cards(journal, CPU, quick=False, cards=replace(cards, deadline_s=-1.0))
    assert [row["why_not"] for row in journal.rows if row["what"] == "left out"] == ["out of time"]
    assert not summarize_cards(journal.rows)["rows that failed or were left out"]["met"]


def test_cases_of_a_missing_package_are_left_out_and_those_beside_them_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "find_spec", lambda name: None)
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    journal = Journal(file=None, machine={})
    cards = small_cards(SPEC, (("lora",), ("qlora-nf4",)), card_bytes=FITS_BYTES)
    measure_cards(journal, CPU, quick=False, cards=cards)
    (left,) = [row for row in journal.rows if row["what"] == "needs a package"]
    assert (left["case"], left["package"]) == (cards.cases[1].name, "bitsandbytes")
    assert [row["case"] for row in journal.rows if row["what"] == "card"] == [cards.cases[0].name]
    assert summarize_cards(journal.rows)["rows that failed or were left out"]["met"]


class FakeNvml:
    """The vendor's library for one card with a reserve of the driver's and bytes of another process."""

    nvmlMemory_v2 = 2
    total, reserved, others = 140 * GIB, GIB // 2, 3 * MIB

    def __init__(self) -> None:
        self.opened: list[int | str] = []

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> None:
        self.opened.append(index)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> None:
        self.opened.append(uuid)

    def nvmlDeviceGetMemoryInfo(self, handle: None, version: int | None = None) -> SimpleNamespace:
        free = self.total - self.reserved - self.others
        if version is None:
            return SimpleNamespace(total=self.total, free=free, used=self.total - free)
        return SimpleNamespace(total=self.total, free=free, used=self.others, reserved=self.reserved)


@pytest.mark.parametrize(("visible", "card"), [("", 0), ("2,3", 2), ("GPU-5f", "GPU-5f")])
def test_bytes_of_other_processes_leave_out_the_drivers_reserve_and_are_those_of_the_card_that_torch_sees(
    monkeypatch: pytest.MonkeyPatch, visible: str, card: int | str
) -> None:
    library = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert bytes_of_others(torch.device("cuda:0")) == library.others
    assert library.opened == [card]


def test_the_cards_cases_are_plans_that_hold_for_their_models_on_cards_of_4_to_24_gb() -> None:
    cases = cuda_cards().cases
    for case in cases:
        case.plan.check(num_blocks=case.spec.num_blocks, workload=case.workload)
    assert {case.card_bytes // GIB for case in cases} == {4, 8, 12, 16, 24}
    assert len({case.name for case in cases}) == len(cases)
    assert 0 < sum(case.is_held_back for case in cases) < len(cases) / 2
