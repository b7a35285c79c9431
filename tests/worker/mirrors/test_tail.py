"""The measurements that a mirror has not had yet: each measurement comes once, in order, also after another start."""

from pathlib import Path

import pytest

from tests.worker.mirrors.beside import write_attempt
from worker.mirrors import tail as tails
from worker.mirrors.tail import Tail


def make_tail(job_folder: Path, *, last_attempt: int = 1) -> Tail:
    return Tail(job_folder, last_attempt=last_attempt, marks_folder=job_folder, mirror="wandb")


def take_all(tail: Tail) -> list[int]:
    """The steps, each kept as sent."""
    steps = []
    while events := tail.next():
        steps += [step for _, step, _ in events]
        tail.keep()
    return steps


def test_all_attempts_come_in_their_order_and_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "MAX_EVENTS", 2)
    write_attempt(tmp_path, 1, steps=range(1, 6))
    write_attempt(tmp_path, 2, steps=range(4, 8))
    tail = make_tail(tmp_path, last_attempt=2)
    assert take_all(tail) == [1, 2, 3, 4, 5, 4, 5, 6, 7]
    write_attempt(tmp_path, 2, steps=range(8, 10))
    assert take_all(tail) == [8, 9]
    assert take_all(make_tail(tmp_path, last_attempt=2)) == []


def test_what_was_not_kept_comes_again(tmp_path: Path) -> None:
    write_attempt(tmp_path, steps=range(1, 3))
    tail = make_tail(tmp_path)
    assert tail.next() == tail.next() != []


def test_a_mirror_that_was_left_over_takes_back_nothing_that_a_later_one_has_noted(tmp_path: Path) -> None:
    (tmp_path / "wandb.json").write_text("{}")  # of an earlier release
    write_attempt(tmp_path, 1, steps=range(1, 3))
    stale = make_tail(tmp_path)
    assert stale.next() != []
    assert not stale.is_passed_on
    write_attempt(tmp_path, 2, steps=range(3, 5))
    assert stale.is_passed_on
    assert take_all(make_tail(tmp_path, last_attempt=2)) == [1, 2, 3, 4]
    stale.keep()
    assert take_all(make_tail(tmp_path, last_attempt=3)) == []


def test_a_line_that_is_still_being_written_waits_for_its_end(tmp_path: Path) -> None:
    file = write_attempt(tmp_path, steps=range(1, 3)) / "samples.jsonl"
    whole = file.read_bytes()
    tail = make_tail(tmp_path)
    file.write_bytes(whole[: whole.index(b"\n") + 9])
    assert take_all(tail) == [1]
    file.write_bytes(whole)
    assert take_all(tail) == [2]


def test_values_carry_the_names_that_tensorboard_shows(tmp_path: Path) -> None:
    write_attempt(tmp_path, steps=range(1, 2))
    assert make_tail(tmp_path).next() == [(1001.0, 1, {"loss/training": 4.0, "memory/weights_bytes": 7.0})]
