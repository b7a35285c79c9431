"""The part of a machine that one of several ranks has: of the host, and of the way there."""

import pytest

from optimizer.base.errors import InvalidInput
from optimizer.hardware.devices import table_machine
from optimizer.hardware.joined import cards_of
from optimizer.hardware.machine import Machine
from optimizer.hardware.share import share_of


@pytest.mark.parametrize(("num_ranks", "factor"), [(1, 1), (2, 2), (4, 4), (8, 4)])
def test_cards_behind_a_switch_share_its_link_to_the_host(num_ranks: int, factor: int) -> None:
    machine = table_machine("RTX 4090", num_devices=8, cards_per_switch=4)
    part = share_of(machine, num_ranks=num_ranks)
    alone = table_machine("RTX 4090").rates
    assert part.rates.host_to_device_bytes_per_s == pytest.approx(alone.host_to_device_bytes_per_s / factor)
    assert part.rates.device_to_host_bytes_per_s == pytest.approx(alone.device_to_host_bytes_per_s / factor)


def test_boards_for_four_cards_have_lanes_for_each_and_larger_ones_switches() -> None:
    four, eight = table_machine("RTX 4090", num_devices=4), table_machine("RTX 4090", num_devices=8)
    assert (four.cards_per_switch, eight.cards_per_switch) == (1, 2)


def test_the_host_updates_faster_where_it_has_channels_for_more_cards_and_shares_that_out() -> None:
    one, two, eight = (table_machine("RTX 4090", num_devices=number) for number in (1, 2, 8))
    rates = [machine.rates.host_optimizer_elements_per_s or 0.0 for machine in (one, two, eight)]
    assert rates[0] == rates[1] == rates[2] / 4
    assert share_of(eight, num_ranks=8).rates.host_optimizer_elements_per_s == pytest.approx(rates[2] / 8)


def test_unlike_cards_count_together() -> None:
    machine = cards_of("6x RTX 3060 12GB, 2x RTX 4090")
    assert machine.cards_per_switch == 2
    rates = {kind.rates.host_optimizer_elements_per_s for kind in machine.kinds}
    assert rates == {table_machine("RTX 4090", num_devices=8).rates.host_optimizer_elements_per_s}


def test_each_of_several_machines_has_switches_of_its_own() -> None:
    machine = cards_of("8x RTX 4090, 2x RTX 3090@office", links={"office": "1Gbit,1ms"})
    here, office = (machine.among({kind.device.name}) for kind in machine.kinds)
    assert (here.cards_per_switch, office.cards_per_switch) == (2, 1)
    assert Machine.from_json(machine.to_json()) == machine


@pytest.mark.parametrize("number", [0, -1, 65])
def test_a_number_of_cards_that_no_switch_has_is_refused(number: int) -> None:
    with pytest.raises(InvalidInput, match="allowed: 1 to 64") as caught:
        table_machine("RTX 4090", num_devices=8, cards_per_switch=number)
    assert caught.value.fields["field"] == "cards_per_switch"
