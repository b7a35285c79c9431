"""A machine whose cards are of several kinds, put together from what one card of each kind measured."""

from dataclasses import replace
from types import SimpleNamespace

import pynvml
import pytest
import torch

from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.hardware.probe import kinds
from optimizer.hardware.probe.kinds import probe_kinds, with_kinds
from optimizer.hardware.probe.rates.peers import count_on_one_switch


def measured(name: str, *, total_bytes: int | None = None) -> Machine:
    machine = table_machine(name)
    return machine if total_bytes is None else replace(machine, device=replace(machine.device, total_bytes=total_bytes))


def test_places_are_by_kind_and_each_kind_knows_its_cards_numbers() -> None:
    machine = with_kinds([measured("RTX 3060"), measured("RTX 4090")], [[0, 2], [1]])
    assert [(kind.device.name, kind.device.index, kind.device.indices) for kind in machine.kinds] == [
        ("RTX 3060 12GB", 0, (0, 2)),
        ("RTX 4090", 1, (1,)),
    ]
    assert [kind.num_devices for kind in machine.kinds] == [2, 1]
    assert machine.kinds[1].rates == measured("RTX 4090").rates
    assert Machine.from_json(machine.to_json()) == machine


def test_cards_of_one_name_and_several_sizes_are_told_apart_by_their_bytes() -> None:
    sizes = (10 * 2**30, 12 * 2**30)
    machine = with_kinds([measured("RTX 3060", total_bytes=size) for size in sizes], [[0], [1]])
    assert [kind.device.name for kind in machine.kinds] == [f"RTX 3060 12GB ({size} bytes)" for size in sizes]


def test_each_kind_is_measured_by_its_first_card_and_the_link_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    exchanged: list[int] = []

    def probe(device: str) -> Machine:
        asked.append(device)
        return measured({"cuda:0": "RTX 3060", "cuda:1": "RTX 4090"}[device])

    def probe_link(machine: Machine, *, max_s: float) -> None:
        exchanged.append(machine.total_devices)

    monkeypatch.setattr(kinds, "probe_peers", probe_link)
    machine = probe_kinds([[0, 2], [1]], probe=probe)
    assert asked == ["cuda:0", "cuda:1"]
    assert exchanged == [machine.total_devices] == [3]


SINGLE, BRIDGES, HOST = pynvml.NVML_TOPOLOGY_SINGLE, pynvml.NVML_TOPOLOGY_MULTIPLE, pynvml.NVML_TOPOLOGY_HOSTBRIDGE


@pytest.mark.parametrize(
    ("between", "most"),
    [
        ({}, 1),
        ({(0, 1): SINGLE}, 2),
        ({(0, 1): SINGLE, (2, 3): BRIDGES}, 2),
        ({(0, 2): BRIDGES, (0, 3): BRIDGES, (2, 3): SINGLE}, 3),
    ],
)
def test_cards_with_switches_alone_between_them_share_a_link(
    monkeypatch: pytest.MonkeyPatch, between: dict[tuple[int, int], int], most: int
) -> None:
    """The vendor's library is answered for: no test machine has four cards."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=index))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: SimpleNamespace(place=int(uuid.removeprefix("GPU-"))))
    monkeypatch.setattr(
        pynvml,
        "nvmlDeviceGetTopologyCommonAncestor",
        lambda one, other: between.get((min(one.place, other.place), max(one.place, other.place)), HOST),
    )
    assert count_on_one_switch(with_kinds([measured("RTX 3060"), measured("RTX 4090")], [[0, 2], [1, 3]])) == most


def test_without_an_answer_of_the_driver_each_card_has_a_link_of_its_own() -> None:
    assert count_on_one_switch(with_kinds([measured("RTX 3060"), measured("RTX 4090")], [[0], [1]])) == 1
