"""Links between cards of one machine, as data sheets and people name them."""

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.errors import InvalidInput
from optimizer.hardware.devices import find_device, known_devices, table_machine
from optimizer.hardware.machine import Machine
from optimizer.hardware.peers import (
    LOOPBACK,
    SeveralDevices,
    assumed_link,
    network_link,
    peer_link_of,
    read_devices_text,
    read_network,
    read_peer_link,
    with_devices,
    write_network,
)


@pytest.mark.parametrize(
    ("card", "kind"),
    [
        ("RTX 3090", "nvlink"),
        ("RTX A6000", "nvlink"),
        ("A100 PCIe 80GB", "nvlink"),
        ("H100 SXM", "nvlink"),
        ("V100 32GB", "nvlink"),
        ("RTX 4090", "host"),
        ("RTX 3060 12GB", "host"),
        ("GTX 1660 6GB", "host"),
        ("L40S", "pcie"),
        ("T4", "pcie"),
    ],
)
def test_a_card_has_the_best_link_that_it_can_have(card: str, kind: str) -> None:
    assert peer_link_of(find_device(card)).kind == kind


@pytest.mark.parametrize(
    ("card", "num_cards", "link", "kind", "within"),
    [
        ("RTX 3090", 2, None, "nvlink", None),
        ("RTX 3090", 4, None, "host", "nvlink"),
        ("RTX A6000", 3, None, "pcie", "nvlink"),
        ("RTX 3090", 4, "pcie", "pcie", None),
        ("RTX 4090", 4, None, "host", None),
        ("H100 SXM", 8, None, "nvlink", None),
    ],
)
def test_a_bridge_joins_two_cards_and_all_of_more_exchange_beside_it(
    card: str, num_cards: int, link: str | None, kind: str, within: str | None
) -> None:
    machine = table_machine(card, num_devices=num_cards, peer_link=link)
    assert machine.peers is not None
    assert machine.peers.kind == kind
    assert (None if machine.peers_within is None else machine.peers_within.kind) == within
    assert machine.num_within == (2 if within else 1)


def test_every_card_of_the_table_has_a_link_and_none_is_faster_than_nvlinks_peak() -> None:
    for spec in known_devices().values():
        link = peer_link_of(spec)
        assert 1e9 < link.bytes_per_s <= 900e9
        assert 0 < link.latency_s < 1e-3


@pytest.mark.parametrize(
    ("num_cards", "cards_per_switch", "share"), [(2, 1, 0.65), (4, 1, 0.65), (8, 1, 0.5), (8, 2, 0.5), (4, 2, 0.5), (8, 4, 0.25)]
)
def test_copies_through_the_host_have_what_the_host_and_a_switch_leave(
    num_cards: int, cards_per_switch: int, share: float
) -> None:
    card = find_device("RTX 4090")
    through_host = read_peer_link(card, "host", num_cards=num_cards, cards_per_switch=cards_per_switch)
    between = read_peer_link(card, "pcie", num_cards=num_cards, cards_per_switch=cards_per_switch)
    assert through_host.bytes_per_s == pytest.approx(share * between.bytes_per_s)
    assert read_peer_link(card, "25e9").bytes_per_s == 25e9


@pytest.mark.parametrize(("card", "num_cards", "least", "most"), [("RTX 4090", 4, 14e9, 20e9), ("RTX 5090", 8, 22e9, 30e9)])
def test_exchanges_through_the_host_are_about_as_fast_as_owners_measured(
    card: str, num_cards: int, least: float, most: float
) -> None:
    """18 GB/s for four RTX 4090 (NCCL's issue 1603), 28 for eight RTX 5090 (1639), each card with a link of its own."""
    machine = table_machine(card, num_devices=num_cards, cards_per_switch=1)
    assert machine.peers is not None
    assert least < machine.peers.bytes_per_s < most


@pytest.mark.parametrize("text", ["nvlink", "wire", "-1", "nan"])
def test_a_link_that_a_card_cannot_have_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_peer_link(find_device("RTX 4090"), text)
    assert caught.value.fields["field"] == "peer_link"


def test_devices_are_read_as_a_number_or_with_a_card() -> None:
    assert read_devices_text("2") == SeveralDevices(name="", count=2)
    assert read_devices_text("2x RTX 4090") == SeveralDevices(name="RTX 4090", count=2)
    assert read_devices_text(" 4 x A100 80GB ") == SeveralDevices(name="A100 80GB", count=4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("RTX 4090", "is not understood"),
        ("0", "is not understood"),
        ("x RTX 4090", "is not understood"),
    ],
)
def test_what_is_no_number_of_devices_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        read_devices_text(text)


def test_a_machine_of_several_cards_is_written_and_read_as_json() -> None:
    machine = table_machine("RTX 3090", num_devices=2)
    assert machine.num_devices == 2
    assert Machine.from_json(machine.to_json()) == machine
    assert table_machine("RTX 3090").peers is None


def test_a_measured_machine_is_given_devices_and_an_assumed_link() -> None:
    machine = with_devices(make_cpu_machine(), 4)
    assert (machine.num_devices, machine.peers) == (4, assumed_link(make_cpu_machine()))
    assert machine.peers is not None
    assert machine.peers.kind == "loopback"
    assert with_devices(machine, 2, peer_link="2e9").peers.bytes_per_s == 2e9
    assert with_devices(machine, 1).peers is None


@pytest.mark.parametrize(
    ("text", "bits_per_s", "delay_s"),
    [("200Mbit,20ms", 200e6, 0.02), ("1 Gbit, 1 ms", 1e9, 1e-3), ("2.5gbit,500us", 2.5e9, 5e-4), ("9Kbit,1s", 9e3, 1.0)],
)
def test_a_network_is_a_rate_and_a_delay(text: str, bits_per_s: float, delay_s: float) -> None:
    """Less what the headers of full frames take, and with the time that a message takes between two processes."""
    link = with_devices(make_cpu_machine(), 2, peer_link=text).peers
    assert link == read_peer_link(find_device("RTX 4090"), text) == network_link(bits_per_s=bits_per_s, delay_s=delay_s)
    assert link.kind == "network"
    assert link.bytes_per_s == pytest.approx(bits_per_s / 8 * 1448 / 1514)
    assert link.latency_s == pytest.approx(delay_s + LOOPBACK.latency_s)


@pytest.mark.parametrize("text", ["1bit,1ms", "200Mbit", "200Mbit,20", "1Kbit,1ms", "200Mbit,11s"])
def test_what_is_no_network_is_refused_in_words(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"is no link; allowed: .*(200Mbit,20ms|at most 10 s)"):
        with_devices(make_cpu_machine(), 2, peer_link=text)


@pytest.mark.parametrize(
    ("bytes_per_s", "delay_s", "written"),
    [
        (119.6e6, 2.1e-4, "1Gbit,0.21ms"),
        (117.5e6, 1e-4, "983Mbit,0.1ms"),
        (3e9, 2.26e-5, "25.1Gbit,0.0226ms"),
        (1e6, 0.02, "8.36Mbit,20ms"),
        (2e3, 1.5, "16.7Kbit,1500ms"),
        (1e15, 0.0, "80000Gbit,0ms"),
        (1.0, 60.0, "8Kbit,10000ms"),
    ],
)
def test_a_measured_network_is_written_as_people_do_and_read_back(bytes_per_s: float, delay_s: float, written: str) -> None:
    assert write_network(bytes_per_s=bytes_per_s, delay_s=delay_s) == written
    link = read_network(written)
    if 1e3 < bytes_per_s < 1e13:
        assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=0.005)
        assert link.latency_s == pytest.approx(delay_s + 1e-4, rel=0.005)
