import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.formats.transfer_sizes import PIECE_ELEMENTS
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.tiers.disk import DiskStore
from optimizer.runtime.tiers.homes import HomeTensor, OffDeviceBytes, pieces
from optimizer.runtime.tiers.tiers import Tiers

CPU = torch.device("cpu")


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    made = Tiers(device=CPU, meter=Meter(device=CPU), scratch=tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_go_home_in_pieces_and_come_back(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch, place: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("optimizer.runtime.tiers.homes.PIECE_ELEMENTS", 16)
    source = torch.randn(7, 11)
    home = OffDeviceBytes(tiers, source.numel() * dtype.itemsize, place=place, category="weights")
    home.write(source, dtype=dtype)
    assert torch.equal(HomeTensor(home, dtype=dtype, shape=source.shape).load(), source.to(dtype))
    target = torch.empty(7, 11, dtype=dtype)
    home.fetch(target).wait()
    assert torch.equal(target, source.to(dtype))


def test_a_home_in_a_store_is_written_a_piece_at_a_time(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimizer.runtime.tiers.homes.PIECE_ELEMENTS", 100)
    home = OffDeviceBytes(tiers, 40_000, place="disk", category="weights")
    write = DiskStore.write

    def write_late(store: DiskStore, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.002)
        write(store, *args, **kwargs)

    monkeypatch.setattr(DiskStore, "write", write_late)
    with tiers.meter:
        tiers.meter.reset_peak()
        home.write(torch.randn(10_000), dtype=torch.float32)
    # Host memory holds the piece on its way, and the next one as it is made.
    assert tiers.meter.peak().host_bytes <= 2 * 400


def test_a_home_counts_where_it_is(tiers: Tiers) -> None:
    meter = tiers.meter
    on_host = OffDeviceBytes(tiers, 1000, place="host", category="optimizer_state")
    assert (meter.host_bytes, tiers.disk_bytes) == (1000, 0)
    on_disk = OffDeviceBytes(tiers, 3000, place="disk", category="optimizer_state")
    assert tiers.disk_bytes == 3000
    assert meter.bytes_by_category(tier="host")["optimizer_state"] == 1000
    assert meter.device_bytes == 0
    assert on_host.num_bytes + on_disk.num_bytes == 4000


def test_a_new_home_on_the_disk_reads_as_zeros(tiers: Tiers) -> None:
    home = OffDeviceBytes(tiers, 400, place="disk", category="optimizer_state")
    assert torch.equal(home.read(), torch.zeros(400, dtype=torch.uint8))


@pytest.mark.parametrize("place", ["host", "disk"])
def test_what_was_sent_home_can_still_be_resized(tiers: Tiers, place: str) -> None:
    parameter = torch.nn.Parameter(torch.randn(8))
    home = OffDeviceBytes(tiers, parameter.nbytes, place=place, category="weights")
    home.write(parameter, dtype=torch.float32)
    parameter.untyped_storage().resize_(0)
    assert parameter.untyped_storage().nbytes() == 0


def test_only_whole_copies_count_on_links(tiers: Tiers) -> None:
    home = OffDeviceBytes(tiers, 64, place="host", category="weights")
    home.write(torch.randn(16), dtype=torch.float32)
    home.read()
    assert not any(tiers.copied_bytes.values())
    home.fetch(torch.empty(16))
    assert tiers.copied_bytes["host_to_device"] == 64


def test_pieces_cover_everything_once() -> None:
    size = PIECE_ELEMENTS
    assert list(pieces(2 * size + 3)) == [(0, size), (size, 2 * size), (2 * size, 2 * size + 3)]
    assert list(pieces(0)) == []
    assert size % 16 == 0
