"""Machines with several kinds of devices: how they are asked for, what each kind brings, and what is refused."""

from dataclasses import replace

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.errors import InvalidInput
from optimizer.base.units import GIB, MIB
from optimizer.hardware.devices import find_device, table_machine
from optimizer.hardware.machine import Machine
from optimizer.hardware.mixed import mixed_machine, play_devices, read_kinds, read_played
from optimizer.hardware.peers import SeveralDevices, link_of_kind


@pytest.fixture
def cpu() -> Machine:
    return make_cpu_machine()


def read(text: str) -> Machine:
    return mixed_machine(read_kinds(text))


@pytest.mark.parametrize("text", ["2x RTX 3060, RTX 4090", "2x RTX 3060 + 1x RTX 4090", "RTX 3060,RTX 4090,RTX 3060"])
def test_kinds_are_counted_however_they_are_written(text: str) -> None:
    assert read_kinds(text) == (
        SeveralDevices(name="RTX 3060 12GB", count=2),
        SeveralDevices(name="RTX 4090", count=1),
    )


def test_each_kind_is_as_the_table_has_it_and_all_share_one_host() -> None:
    machine = read("2x RTX 3060, RTX 4090")
    assert (machine.num_devices, machine.total_devices) == (2, 3)
    for name in ("RTX 3060 12GB", "RTX 4090"):
        alone = table_machine(name, num_others=2)
        found = machine.with_kind(name)
        assert (found.device, found.rates, found.others) == (alone.device, alone.rates, ())
        assert found.host_memory_bytes == machine.host_memory_bytes
    assert machine.with_kind("RTX 4090", num_devices=8).num_devices == 8


def test_one_kind_is_the_machine_that_it_was() -> None:
    assert read("2x RTX 4090") == table_machine("RTX 4090", num_devices=2)


def test_the_slowest_cards_link_is_the_link_of_all() -> None:
    machine = read("RTX 4090, T4")
    assert machine.peers == min(
        (link_of_kind(find_device(name), "host") for name in ("RTX 4090", "T4")), key=lambda link: link.bytes_per_s
    )
    professional = read("A100 80GB, A40")
    assert professional.peers is not None
    assert professional.peers.kind == "pcie"


def test_a_machine_of_several_kinds_comes_back_from_json() -> None:
    machine = read("2x RTX 3060, RTX 4090")
    assert Machine.from_json(machine.to_json()) == machine


def test_a_machine_from_before_there_were_kinds_still_opens() -> None:
    document = table_machine("RTX 4090", num_devices=2).to_json()
    del document["others"]
    assert Machine.from_json(document).kinds[0].num_devices == 2


def test_a_kind_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="device 'T4' is not in .*, which has RTX 3060 12GB, RTX 4090"):
        read("RTX 3060, RTX 4090").with_kind("T4")


def test_kinds_of_one_name_are_refused() -> None:
    machine = read("RTX 3060, RTX 4090")
    twice = replace(machine, others=(*machine.others, *machine.others))
    with pytest.raises(InvalidInput, match=r"machine\.others\[1\]\.device is 'RTX 4090'.*another name than RTX 3060 12GB, RTX"):
        Machine.from_json(twice.to_json())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("RTX 4090, RTX 3090@office", "are in several machines"),
        ("2x RTX 4090, 3", "names no card in one of its parts"),
        ("RTX 4090, GTX 9", "GPU 'GTX 9' is not in the table"),
        ("60x RTX 4090, 5x RTX 3090", "65 devices are asked for; allowed: 1 to 64"),
    ],
)
def test_devices_that_no_machine_has_are_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        read(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [("1", 1), (" 4 ", 4), ("1GiB, 2GiB", (GIB, 2 * GIB)), ("16 MiB,16 MiB", (16 * MIB,) * 2), ("1 GiB", (GIB,))],
)
def test_played_devices_are_a_number_or_the_bytes_of_each(text: str, found: int | tuple[int, ...]) -> None:
    assert read_played(text) == found


@pytest.mark.parametrize("text", ["0", "65", "", "1GiB,", "-1 GiB", "1GiB, 0", "two", ",".join(["1MiB"] * 65)])
def test_played_devices_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: a number from 1 to 64, or the memory of each device such as 1GiB, 2GiB"):
        read_played(text)


def test_played_devices_of_one_size_are_one_kind_and_the_host_keeps_the_rest(cpu: Machine) -> None:
    machine = play_devices(cpu, [GIB, 2 * GIB, GIB])
    counted = {kind.device.name: kind.num_devices for kind in machine.kinds}
    assert counted == {"CPU with 1.00 GiB": 2, "CPU with 2.00 GiB": 1}
    assert all(kind.device.is_capped and kind.rates == cpu.rates for kind in machine.kinds)
    assert machine.host_memory_bytes == cpu.device.memory_bytes + cpu.host_memory_bytes - 4 * GIB
    assert Machine.from_json(machine.to_json()) == machine
    alike = play_devices(cpu, [GIB, GIB])
    assert (alike.num_devices, alike.others) == (2, ())


def test_more_bytes_than_the_machine_has_cannot_be_played(cpu: Machine) -> None:
    with pytest.raises(InvalidInput, match=r"devices with 1\.00 TiB together are to be played; the machine has"):
        play_devices(cpu, [512 * GIB] * 2)


def test_a_real_card_plays_no_devices() -> None:
    machine = table_machine("RTX 4090")
    assert play_devices(machine, [GIB, GIB]) is machine


def test_a_machine_knows_its_largest_devices_and_the_names_of_all() -> None:
    machine = read("2x RTX 3060, RTX 4090")
    largest = machine.of_largest_kind
    assert (largest.device.name, largest.num_devices, largest.others) == ("RTX 4090", 1, ())
    assert machine.most_memory_bytes == largest.device.memory_bytes
    assert machine.device_names == "RTX 3060 12GB and RTX 4090"
    alone = table_machine("RTX 4090")
    assert alone.of_largest_kind is alone
