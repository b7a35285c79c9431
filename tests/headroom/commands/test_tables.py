"""Ids and moments as short as people need them; the exact ones are in the JSON."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from headroom.commands.catalog import find_id
from headroom.commands.tables import moment, short_id

ROWS = [{"id": "model_01a21179c0a97969", "name": "tiny"}, {"id": "model_01a21179c0a87969", "name": "7a60cfa3"}]


@pytest.fixture
def in_tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_tokyo")
def test_a_moment_is_local_and_of_today_only_the_time() -> None:
    assert moment("2024-02-29T20:15:30.123456Z") == "2024-03-01 05:15"
    now = datetime.now(UTC)
    assert moment(now.isoformat()) == f"{now.astimezone():%H:%M:%S}"


def test_no_moment_is_what_the_table_says_for_it() -> None:
    assert moment(None, empty="never") == "never"


def test_a_short_id_is_taken_where_it_is_one_row_s() -> None:
    assert find_id(ROWS, short_id(ROWS[0]["id"])) == ROWS[0]["id"]
    assert find_id(ROWS, "7a60cfa3") == ROWS[1]["id"]
    assert find_id([ROWS[0], ROWS[0] | {"id": "model_00000000c0a97969"}], "c0a97969") == "c0a97969"
