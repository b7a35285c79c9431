"""Telemetry goes from samples.jsonl to the database, and the job's row shows it."""

import json
from pathlib import Path
from typing import Any

import pytest

from worker.telemetry import BATCH_RECORDS, Progress, SampleCopier


class Refused(Exception):
    """The database is away."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "samples.jsonl"


def append(path: Path, *records: Any) -> None:
    with path.open("ab") as file:
        for record in records:
            file.write(json.dumps(record).encode() + b"\n")


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, **fields}


def test_each_record_is_copied_once_however_often_it_is_asked(path: Path) -> None:
    rows: list[Any] = []
    copier = SampleCopier(path, attempt_number=2, record=rows.extend)
    append(path, step(1), step(2))
    copier.copy()
    append(path, {"kind": "eval", "step": 2, "validation_loss": 3.5})
    copier.copy()
    copier.copy()
    assert [(row["kind"], row["step"]) for row in rows] == [("step", 1), ("step", 2), ("eval", 2)]


def test_records_carry_the_number_of_the_attempt_whatever_the_file_says(path: Path) -> None:
    rows: list[Any] = []
    append(path, step(1, attempt=99))
    SampleCopier(path, attempt_number=2, record=rows.extend).copy()
    assert rows[0]["attempt"] == 2


def test_records_that_are_known_already_are_not_read_again(path: Path) -> None:
    rows: list[Any] = []
    append(path, *(step(number) for number in range(1, 6)))
    SampleCopier(path, attempt_number=1, record=rows.extend, num_known=3).copy()
    assert [row["step"] for row in rows] == [4, 5]


def test_a_file_that_is_not_there_yet_is_empty(path: Path) -> None:
    assert SampleCopier(path, attempt_number=1, record=lambda records: None).copy() == []


def test_a_torn_last_line_waits_for_its_end(path: Path) -> None:
    rows: list[Any] = []
    copier = SampleCopier(path, attempt_number=1, record=rows.extend)
    line = json.dumps(step(1)).encode() + b"\n"
    path.write_bytes(line[:9])
    assert copier.copy() == []
    path.write_bytes(line)
    copier.copy()
    assert [row["step"] for row in rows] == [1]


def test_what_the_database_refused_is_written_when_it_is_back(path: Path) -> None:
    rows = []
    is_away = True

    def record(records: list[dict[str, Any]]) -> None:
        if is_away:
            raise Refused
        rows.extend(records)

    copier = SampleCopier(path, attempt_number=1, record=record)
    append(path, step(1), step(2))
    with pytest.raises(Refused):
        copier.copy()
    is_away = False
    append(path, step(3))
    copier.copy()
    assert [row["step"] for row in rows] == [1, 2, 3]


def test_rows_are_written_in_batches(path: Path) -> None:
    sizes = []
    append(path, *(step(number) for number in range(BATCH_RECORDS * 2 + 5)))
    SampleCopier(path, attempt_number=1, record=lambda records: sizes.append(len(records))).copy()
    assert sizes == [BATCH_RECORDS, BATCH_RECORDS, 5]


def test_the_wire_hears_of_a_batch_at_once(path: Path) -> None:
    sizes = []
    append(path, *(step(number) for number in range(BATCH_RECORDS + 5)))
    SampleCopier(path, attempt_number=1, record=len, mirror=lambda records: sizes.append(len(records))).copy()
    assert sizes == [BATCH_RECORDS, 5]


def test_the_wire_hears_of_a_record_after_the_database(path: Path) -> None:
    order = []
    append(path, step(1))
    copier = SampleCopier(
        path,
        attempt_number=1,
        record=lambda records: order.append("database"),
        mirror=lambda records: order.append("wire"),
    )
    copier.copy()
    assert order == ["database", "wire"]


@pytest.mark.parametrize("line", [b"{torn\n", b"[]\n", b'{"kind": "other", "step": 1}\n', b'{"kind": "step"}\n'])
def test_a_line_that_is_no_record_is_left_out_and_the_next_one_kept(path: Path, line: bytes) -> None:
    rows: list[Any] = []
    path.write_bytes(line)
    append(path, step(7))
    SampleCopier(path, attempt_number=1, record=rows.extend).copy()
    assert [row["step"] for row in rows] == [7]


def test_the_latest_step_carries_what_the_card_says(path: Path) -> None:
    rows: list[Any] = []
    append(path, step(1), step(2))
    SampleCopier(path, attempt_number=1, record=rows.extend, read_gpu=lambda: {"temperature_c": 61}).copy()
    assert [row.get("gpu") for row in rows] == [None, {"temperature_c": 61}]


def test_time_left_is_the_steps_left_at_the_latest_pace() -> None:
    progress = Progress(num_steps=100)
    progress.add([step(number, time_s=10.0 + 0.5 * number) for number in range(1, 11)])
    assert progress.eta_s == pytest.approx(45.0)


def test_time_left_is_unknown_before_the_third_step() -> None:
    progress = Progress(num_steps=100)
    progress.add([step(1, time_s=1.0), step(2, time_s=2.0)])
    assert progress.eta_s is None


def test_the_summary_holds_the_latest_numbers_and_the_highest_peak() -> None:
    progress = Progress(num_steps=10)
    progress.add(
        [
            {"kind": "eval", "step": 0, "validation_loss": 9.0},
            step(1, loss=8.0, device_peak_bytes=500, tokens_per_s=10.0, step_ms=7.0),
            step(2, loss=7.0, device_peak_bytes=400, tokens_per_s=11.0, step_ms=6.0),
            {"kind": "eval", "step": 2, "validation_loss": 7.5},
        ]
    )
    assert progress.step == 2
    assert progress.summary == {
        "loss": 7.0,
        "device_peak_bytes": 500,
        "tokens_per_s": 11.0,
        "step_ms": 6.0,
        "validation_loss": 7.5,
        "validation_loss_start": 9.0,
    }


def test_progress_is_taken_at_most_once_for_one_piece_of_news() -> None:
    progress = Progress(num_steps=10)
    progress.add([step(1, loss=1.0)])
    assert progress.take_if_due()
    assert not progress.take_if_due()
