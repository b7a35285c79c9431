import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from optimizer.base.errors import InvalidInput, MissingExtra, RemoteStoreFull, RemoteStoreLost
from optimizer.base.units import MIB
from optimizer.runtime.tiers.remote import EXPIRY_S, VALUE_BYTES, RemoteStore
from optimizer.runtime.tiers.stores import Place
from optimizer.runtime.tiers.tiers import Tiers
from tests.valkey import Valkey

CPU = torch.device("cpu")


@pytest.fixture
def store(remote: Valkey) -> Iterator[RemoteStore]:
    opened = RemoteStore(remote.url, run_id="test")
    yield opened
    opened.close()


@pytest.fixture
def mortal() -> Iterator[Valkey]:
    """A store of the test's own, which it may kill or fill."""
    server = Valkey()
    yield server
    server.close()


def read(store: RemoteStore, place: Place, num_bytes: int, *, offset: int = 0) -> bytes:
    into = bytearray(num_bytes)
    store.read(place, memoryview(into), offset=offset)
    return bytes(into)


def test_bytes_come_back_through_values_of_limited_size(remote: Valkey, store: RemoteStore) -> None:
    data = torch.randint(256, (2 * VALUE_BYTES + 1000,), dtype=torch.uint8).numpy().tobytes()
    place = store.take(len(data))
    store.write(place, memoryview(data), offset=0)
    assert read(store, place, len(data)) == data
    assert len(remote.list_keys()) == 3
    with remote.client() as client:
        assert max(client.strlen(key) for key in client.scan_iter()) == VALUE_BYTES


def test_ranges_across_values_are_written_and_read(store: RemoteStore) -> None:
    place = store.take(2 * VALUE_BYTES)
    store.write(place, memoryview(b"a" * 2 * VALUE_BYTES), offset=0)
    store.write(place, memoryview(b"b" * 100), offset=VALUE_BYTES - 50)
    assert read(store, place, 120, offset=VALUE_BYTES - 60) == b"a" * 10 + b"b" * 100 + b"a" * 10


def test_keys_are_the_runs_own_and_expire(remote: Valkey, store: RemoteStore) -> None:
    store.write(store.take(10), memoryview(bytes(10)), offset=0)
    (key,) = remote.list_keys()
    assert key.startswith(b"headroom:test:")
    with remote.client() as client:
        assert 0 < client.ttl(key) <= EXPIRY_S


def test_what_is_given_back_is_deleted_by_the_next_write(remote: Valkey, store: RemoteStore) -> None:
    first, second = store.take(10), store.take(10)
    store.write(first, memoryview(bytes(10)), offset=0)
    store.give_back(first)
    assert store.room.used_bytes == 10
    store.write(second, memoryview(bytes(10)), offset=0)
    assert len(remote.list_keys()) == 1


def test_closing_deletes_this_runs_keys_and_no_others(remote: Valkey) -> None:
    first, second = RemoteStore(remote.url), RemoteStore(remote.url)
    for opened in (first, second):
        opened.write(opened.take(3 * VALUE_BYTES), memoryview(bytes(3 * VALUE_BYTES)), offset=0)
    assert len(remote.list_keys()) == 6
    first.close()
    assert {key.decode().startswith(second.prefix) for key in remote.list_keys()} == {True}
    second.close()
    assert remote.list_keys() == []


def test_a_full_store_is_named_with_what_was_needed(mortal: Valkey) -> None:
    store = RemoteStore(mortal.url)
    with mortal.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 3 * MIB)
    place = store.take(8 * MIB)
    with pytest.raises(
        RemoteStoreFull, match=r"is full: 2\.00 MiB more were needed, 8\.00 MiB are this run's"
    ) as caught:
        store.write(place, memoryview(bytes(8 * MIB)), offset=0)
    assert caught.value.code == "remote_store_full"
    store.close()
    assert mortal.list_keys() == []


def test_free_room_is_the_stores_limit_less_what_it_uses(mortal: Valkey) -> None:
    store = RemoteStore(mortal.url)
    with mortal.client() as client:
        client.config_set("maxmemory", 64 * MIB)
    assert 32 * MIB < store.free_bytes() < 64 * MIB
    store.close()


def test_a_store_that_is_killed_is_named_and_closing_still_works(mortal: Valkey) -> None:
    store = RemoteStore(mortal.url, timeout_s=1)
    place = store.take(100)
    store.write(place, memoryview(bytes(100)), offset=0)
    mortal.kill()
    with pytest.raises(RemoteStoreLost, match="does not answer") as caught:
        read(store, place, 100)
    assert caught.value.code == "remote_store_lost"
    store.close()


def test_a_store_that_forgot_is_named(remote: Valkey, store: RemoteStore) -> None:
    place = store.take(100)
    store.write(place, memoryview(bytes(100)), offset=0)
    with remote.client() as client:
        client.flushall()
    with pytest.raises(RemoteStoreLost, match="no longer holds 100 B that this run wrote"):
        read(store, place, 100)


def test_a_part_that_follows_what_the_store_forgot_is_refused(remote: Valkey, store: RemoteStore) -> None:
    """Otherwise it would stand behind zeros, which look like bytes that were written."""
    place = store.take(100)
    store.write(place, memoryview(b"a" * 60), offset=0)
    with remote.client() as client:
        client.flushall()
    with pytest.raises(RemoteStoreLost, match="no longer holds 60 B that this run wrote"):
        store.write(place, memoryview(b"b" * 40), offset=60)
    # Redis took it all the same: what is there now is not what was written.
    with pytest.raises(RemoteStoreLost, match="no longer holds 60 B"):
        read(store, place, 100)


def test_what_was_never_written_is_zeros(store: RemoteStore) -> None:
    place = store.take(VALUE_BYTES + 100)
    store.write(place, memoryview(b"a" * 50), offset=10)
    assert read(store, place, 100) == bytes(10) + b"a" * 50 + bytes(40)
    assert read(store, place, 100, offset=VALUE_BYTES) == bytes(100)


def test_room_that_is_made_at_once_takes_its_bytes_once_however_it_is_filled(
    remote: Valkey, store: RemoteStore
) -> None:
    """Redis gives a value that grows up to twice what it holds."""
    num_bytes = VALUE_BYTES + 500_000
    place = store.take(num_bytes, is_made=True)
    for start in range(0, num_bytes, 50_000):
        part = bytes([start % 251]) * min(50_000, num_bytes - start)
        store.write(place, memoryview(part), offset=start)
        assert read(store, place, len(part), offset=start) == part
    with remote.client() as client:
        held_bytes = sum(client.memory_usage(key) for key in client.scan_iter())
        assert all(0 < client.ttl(key) <= EXPIRY_S for key in client.scan_iter())
    assert num_bytes <= held_bytes < 1.01 * num_bytes


def test_room_that_is_made_at_once_and_is_not_there_is_refused_and_given_back(mortal: Valkey) -> None:
    store = RemoteStore(mortal.url)
    with mortal.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 3 * MIB)
    with pytest.raises(RemoteStoreFull, match=r"is full: 2\.00 MiB more were needed, 8\.00 MiB are this run's"):
        store.take(8 * MIB, is_made=True)
    assert store.room.used_bytes == 0
    store.close()
    assert mortal.list_keys() == []


def test_a_run_that_goes_on_renews_all_that_it_keeps(remote: Valkey) -> None:
    store = RemoteStore(remote.url, renewal_s=0)
    kept, other = store.take(10), store.take(10)
    for place in (kept, other):
        store.write(place, memoryview(bytes(10)), offset=0)
    with remote.client() as client:
        keys = remote.list_keys()
        for key in keys:
            client.expire(key, 100)
        read(store, other, 10)
        assert len(keys) == 2
        assert all(client.ttl(key) > 100 for key in keys)
    store.close()


def test_a_part_of_a_value_that_finds_no_room_is_named_as_plainly_as_a_whole_one(mortal: Valkey) -> None:
    store = RemoteStore(mortal.url)
    place = store.take(VALUE_BYTES)
    with mortal.client() as client:
        client.config_set("maxmemory", 1)
    with pytest.raises(RemoteStoreFull, match=r"is full: 10 B more were needed") as caught:
        store.write(place, memoryview(bytes(10)), offset=0)
    assert "SETRANGE" not in caught.value.message
    store.close()


def test_a_store_that_is_lost_in_the_middle_of_a_step_stops_it(mortal: Valkey) -> None:
    tiers = Tiers(device=CPU, remote_url=mortal.url)
    copy = tiers.offload(torch.ones(1000).untyped_storage(), category="activations", place="remote")
    tiers.fetch(copy, category="activations").wait()
    mortal.kill()
    with pytest.raises(RemoteStoreLost, match="does not answer"):
        tiers.fetch(copy, category="activations")
    tiers.close()


def test_without_an_address_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADROOM_REMOTE_URL", raising=False)
    with pytest.raises(RemoteStoreLost, match="HEADROOM_REMOTE_URL is not set"):
        Tiers(device=CPU).open_store("remote")


def test_an_address_that_is_none_is_refused_without_its_password() -> None:
    with pytest.raises(InvalidInput, match="no address of a store") as caught:
        RemoteStore("http://user:secret@host:1/0")
    assert "secret" not in caught.value.message
    assert "secret" not in str(caught.value.fields)


def test_nothing_that_answers_is_named_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(RemoteStoreLost, match="does not answer"):
        RemoteStore(f"unix://{tmp_path}/none.sock", timeout_s=1)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtra, match="the remote tier needs the package 'redis'") as caught:
        RemoteStore("redis://127.0.0.1:1/0")
    assert caught.value.hint == "pip install 'headroom[redis]'"
