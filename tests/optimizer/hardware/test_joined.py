"""Machines that a network joins: how they are asked for, what each keeps to itself, over which link ranks exchange, and what is
refused.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.errors import InvalidInput
from optimizer.base.units import GIB
from optimizer.hardware.devices import find_device, table_machine
from optimizer.hardware.joined import cards_of, join_machines, read_links
from optimizer.hardware.machine import Machine, host_name
from optimizer.hardware.mixed import mixed_machine, play_devices, read_kinds
from optimizer.hardware.peers import SeveralDevices, link_of_kind, network_link
from optimizer.hardware.share import share_of

LINK = network_link(bits_per_s=1e8, delay_s=0.02)
TEXT, LINKS = "2x RTX 4090, RTX 3060@office", {"office": "100Mbit,20ms"}


def card(name: str, *, at: str, num_devices: int = 1, host_memory_bytes: int = 32 * GIB) -> Machine:
    return replace(table_machine(name, num_devices=num_devices, host_memory_bytes=host_memory_bytes), name=at)


def test_devices_say_which_machine_they_are_in() -> None:
    assert read_kinds("2x RTX 4090, RTX 3060@office + RTX 3060 @ office") == (
        SeveralDevices(name="RTX 4090", count=2),
        SeveralDevices(name="RTX 3060 12GB", count=2, machine="office"),
    )


def test_a_kind_of_device_is_called_by_its_card_and_its_machine() -> None:
    machine = cards_of(TEXT, links=LINKS)
    assert [(kind.device.name, kind.num_devices) for kind in machine.kinds] == [("RTX 4090@here", 2), ("RTX 3060 12GB@office", 1)]
    assert [host_name(kind.device.name) for kind in machine.kinds] == ["here", "office"]
    assert (machine.total_devices, machine.peers, machine.name) == (3, LINK, "here and office")


def test_the_same_card_in_two_machines_is_two_kinds() -> None:
    machine = join_machines([card("RTX 3060", at="a"), card("RTX 3060", at="b")], link=LINK)
    assert [kind.device.name for kind in machine.kinds] == ["RTX 3060 12GB@a", "RTX 3060 12GB@b"]
    assert machine.kinds[0].rates == machine.kinds[1].rates == table_machine("RTX 3060").rates


def test_machines_are_joined_as_they_are_asked_for() -> None:
    here, office = card("RTX 4090", at="here", num_devices=2), card("RTX 3060", at="office")
    assert join_machines([here, office], link=LINK) == cards_of(TEXT, links=LINKS)
    assert cards_of("2x RTX 4090@here, RTX 3060@office", links=LINKS) == cards_of(TEXT, links=LINKS)


def test_devices_of_one_machine_exchange_over_its_own_link_and_all_over_the_network() -> None:
    machine = cards_of(TEXT, links=LINKS)
    inside = machine.among({"RTX 4090@here"})
    assert inside.peers == link_of_kind_of("RTX 4090")
    assert (inside.name, inside.total_devices, inside.hosts) == ("here", 2, ())
    assert machine.among({"RTX 4090@here", "RTX 3060 12GB@office"}) == machine
    assert machine.with_kind("RTX 3060 12GB@office", num_devices=3).peers == LINK


def link_of_kind_of(name: str) -> Any:
    return table_machine(name, num_devices=2).peers


def test_each_rank_has_its_own_machines_host() -> None:
    large = card("RTX 4090", at="a", num_devices=2, host_memory_bytes=64 * GIB)
    small = card("T4", at="b", host_memory_bytes=8 * GIB)
    machine = join_machines([large, small], link=LINK)
    assert machine.host_memory_bytes == 8 * GIB
    parts = [share_of(machine.with_kind(name, num_devices=3), num_ranks=3) for name in ("RTX 4090@a", "T4@b")]
    assert [part.host_memory_bytes for part in parts] == [32 * GIB, 8 * GIB]
    assert parts[1].rates.disk_read_bytes_per_s == small.rates.disk_read_bytes_per_s


def test_ranks_that_the_cpu_plays_share_the_cores_of_their_own_machine_alone() -> None:
    two = replace(play_devices(make_cpu_machine(), [GIB, GIB]), name="a", num_threads=8)
    one = replace(make_cpu_machine(), name="b", num_threads=3)
    machine = join_machines([two, one], link=LINK)
    names = [kind.device.name for kind in machine.kinds]
    assert names == ["CPU with 1.00 GiB@a", f"{one.device.name}@b"]
    parts = [share_of(machine.with_kind(name, num_devices=3), num_ranks=3) for name in names]
    assert [part.num_threads for part in parts] == [4, 3]
    assert [part.device.memory_bytes for part in parts] == [GIB, one.device.memory_bytes]


def test_joined_machines_come_back_from_json() -> None:
    machine = cards_of(TEXT, links=LINKS)
    assert Machine.from_json(machine.to_json()) == machine


def test_machines_whose_devices_are_in_no_host_are_refused() -> None:
    machine = cards_of(TEXT, links=LINKS)
    torn = replace(machine, hosts=machine.hosts[:1])
    with pytest.raises(InvalidInput, match=r"machine\.hosts are joined, with devices RTX 4090@here, .*each of them"):
        Machine.from_json(torn.to_json())


def test_the_largest_device_is_among_those_of_its_own_machine() -> None:
    largest = cards_of(TEXT, links=LINKS).of_largest_kind
    assert (largest.device.name, largest.num_devices) == ("RTX 4090@here", 2)
    assert largest.peers == link_of_kind_of("RTX 4090")


def test_between_three_machines_the_slowest_link_counts() -> None:
    links = read_links(["a=1Gbit,5ms", "b=200Mbit, 1ms"])
    machine = cards_of("RTX 4090, T4@a, T4@b", links=links)
    assert machine.peers == network_link(bits_per_s=2e8, delay_s=0.005)
    assert machine.peers is not None
    assert machine.peers.kind == "network"


def test_the_link_inside_machines_is_the_one_that_is_asked_for() -> None:
    machine = cards_of(TEXT, links=LINKS, peer_link="pcie")
    assert machine.among({"RTX 4090@here"}).peers == link_of_kind(find_device("RTX 4090"), "pcie")



@pytest.mark.parametrize(
    ("devices", "links", "words"),
    [
        (TEXT, [], r"in here, office, and nothing says how office can be reached; write --link office=100Mbit,20ms \("),
        ("T4, T4@a, T4@b", ["a=1Gbit,1ms"], r"how b can be reached; write --link b=100Mbit,20ms"),
        ("T4@a, T4@b", [], r"how a and b can be reached; write --link a=100Mbit,20ms --link b=100Mbit,20ms"),
        (TEXT, ["attic=1Gbit,1ms"], r"a link is given for machine 'attic'; the devices are in here, office: write"),
        (TEXT, ["office=fast"], r"link 'fast' is no network's; allowed: a rate and a delay such as 200Mbit,20ms"),
        (TEXT, ["office"], r"link 'office' is not understood; allowed: a machine and its link such as office=100Mbit,20ms"),
        (TEXT, ["office=1Gbit,1ms", "office=2Gbit,1ms"], r"machine office is given two links, 1Gbit,1ms and 2Gbit,1ms; allowed"),
        ("2x T4@office", [], r"all devices are in one machine, office; leave out @office and its link"),
        ("RTX 4090, T4@", [], r"names no machine behind its @ that can be one"),
        ("RTX 4090, T4@a@b", [], r"names no machine behind its @ that can be one"),
        ("RTX 4090, 2@office", [], r"names no card in one of its parts"),
    ],
)
def test_what_joins_no_machines_is_refused_in_words(devices: str, links: list[str], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        cards_of(devices, links=read_links(links))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: [card("T4", at="a")], "1 machines are to be joined; allowed: 2 or more"),
        (lambda: [card("T4", at="a"), card("T4", at="a")], "machines a, a are to be joined; each needs a name of its own"),
        (lambda: [card("T4", at="a"), card("T4", at="b@c")], "names b@c hold an @, which stands before a machine's name"),
        (
            lambda: [replace(join_machines([card("T4", at="a"), card("T4", at="b")], link=LINK), name="x"), card("T4", at="c")],
            "names T4@a, T4@b hold an @",
        ),
        (lambda: [card("T4", at="a"), replace(make_cpu_machine(), name="b")], "ranks are all on cards, or all on CPUs"),
        (lambda: [card("T4", at="a", num_devices=60), card("T4", at="b", num_devices=5)], "65 devices .* up to 64"),
    ],
)
def test_machines_that_cannot_be_joined_are_refused_in_words(make: Callable[[], list[Machine]], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        join_machines(make(), link=LINK)


def test_a_link_within_a_machine_joins_none() -> None:
    link = link_of_kind_of("T4")
    with pytest.raises(InvalidInput, match="joined by pcie; allowed: a network"):
        join_machines([card("T4", at="a"), card("T4", at="b")], link=link)


def test_one_machine_without_a_name_is_the_machine_that_it_was() -> None:
    assert cards_of("2x RTX 3060, RTX 4090") == mixed_machine(read_kinds("2x RTX 3060, RTX 4090"))
