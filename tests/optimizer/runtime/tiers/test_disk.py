import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from optimizer.base.errors import DiskFull
from optimizer.base.units import KIB, MIB
from optimizer.runtime.tiers.disk import DiskStore
from optimizer.runtime.tiers.stores import Place
from optimizer.runtime.tiers.tiers import Tiers

CPU = torch.device("cpu")


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """The kernel refuses this process files beyond a size, as a full disk refuses more blocks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    opened = DiskStore(tmp_path / "scratch", growth_bytes=MIB)
    yield opened
    opened.close()


def read(store: DiskStore, place: Place, num_bytes: int, *, offset: int = 0) -> bytes:
    into = bytearray(num_bytes)
    store.read(place, memoryview(into), offset=offset)
    return bytes(into)


def test_ranges_come_back_as_they_were_written(store: DiskStore) -> None:
    first, second = store.take(10_000), store.take(5000)
    store.write(first, memoryview(b"a" * 10_000), offset=0)
    store.write(second, memoryview(b"b" * 5000), offset=0)
    store.write(first, memoryview(b"c" * 100), offset=4000)
    assert read(store, first, 10_000) == b"a" * 4000 + b"c" * 100 + b"a" * 5900
    assert read(store, second, 10, offset=4990) == b"b" * 10


def test_room_is_claimed_in_steps_before_it_is_written_to(store: DiskStore) -> None:
    assert store.file_bytes == 0
    place = store.take(100)
    assert store.file_bytes == MIB
    store.take(MIB)
    assert store.file_bytes == 2 * MIB
    assert read(store, place, 100) == bytes(100)


def test_room_that_was_given_back_is_used_again(store: DiskStore) -> None:
    for _ in range(5):
        places = [store.take(300 * KIB) for _ in range(2)]
        for place in places:
            store.give_back(place)
    assert store.file_bytes == MIB


def test_bytes_in_use_and_their_peak_are_counted(store: DiskStore) -> None:
    first, second = store.take(1000), store.take(500)
    store.give_back(first)
    assert (store.room.used_bytes, store.room.peak_bytes) == (500, 1500)
    store.room.reset_peak()
    assert store.room.peak_bytes == 500
    store.give_back(second)
    assert store.room.used_bytes == 0


def test_the_file_has_no_name_while_it_is_used_and_none_after(tmp_path: Path, store: DiskStore) -> None:
    store.write(store.take(100), memoryview(bytes(100)), offset=0)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_full_disk_is_named_when_room_is_asked_for(store: DiskStore) -> None:
    store.take(MIB)
    with largest_file(3 * MIB // 2), pytest.raises(DiskFull, match=r"is full: 1\.00 MiB more were needed") as caught:
        store.take(MIB)
    assert str(store.folder) in caught.value.message
    assert caught.value.fields["in_use_bytes"] == MIB
    assert "scratch folder" in caught.value.hint


def test_the_last_room_of_a_disk_is_taken_where_a_whole_step_is_not_there(store: DiskStore) -> None:
    store.take(MIB)
    with largest_file(3 * MIB // 2):
        store.take(MIB // 2)
    assert store.file_bytes == 3 * MIB // 2


def test_a_write_that_finds_the_disk_full_is_named_too(store: DiskStore) -> None:
    place = store.take(MIB)
    with largest_file(512 * KIB), pytest.raises(DiskFull, match="is full"):
        store.write(place, memoryview(bytes(MIB)), offset=0)


def test_a_disk_that_fills_while_bytes_are_on_their_way_stops_whoever_asks_for_them(tmp_path: Path) -> None:
    tiers = Tiers(device=CPU, scratch=tmp_path)
    storage = torch.ones(MIB).untyped_storage()
    copy = tiers.offload(storage, category="activations", place="disk")
    tiers.fetch(copy, category="activations").wait()
    del copy
    with largest_file(MIB):
        # The room is there already; the disk refuses what is written to it.
        copy = tiers.offload(storage, category="activations", place="disk")
        with pytest.raises(DiskFull, match="is full"):
            tiers.fetch(copy, category="activations")
    with pytest.raises(DiskFull):
        tiers.offload(storage, category="activations", place="disk")
    tiers.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        DiskStore(tmp_path / "file" / "scratch")
