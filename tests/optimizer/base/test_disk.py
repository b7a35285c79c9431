"""The room on the disk that stays free."""

import pytest

from optimizer.base.disk import FLOOR_VARIABLE, disk_floor_bytes


def test_the_floor_is_the_environment_s_or_256_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FLOOR_VARIABLE, raising=False)
    assert disk_floor_bytes() == 256 * 1024**2
    monkeypatch.setenv(FLOOR_VARIABLE, "1000")
    assert disk_floor_bytes() == 1000


def test_a_floor_that_is_no_number_of_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLOOR_VARIABLE, "1 GiB")
    with pytest.raises(ValueError, match="HEADROOM_DISK_FLOOR_BYTES is '1 GiB'; allowed: a number of bytes from 0"):
        disk_floor_bytes()
