"""Layouts of devices that share a step, with replicas of what they share inside each machine where a network joins several."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from optimizer.hardware.machine import DeviceKind, host_name
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.search.questions.layout_list import makes_replicas
from optimizer.search.questions.uneven.question import UnevenQuestion


def count_replicas(team: Sequence[DeviceKind], *, are_alike: bool) -> int:
    """The replicas that devices of these kinds make, each as large as it can be inside one machine; those of one machine stand
    beside each other. are_alike: whether a replica's devices have to be of one kind.
    """

    def place(kind: DeviceKind) -> str:
        return kind.device.name if are_alike else host_name(kind.device.name)

    counts = [sum(kind.num_devices for kind in kinds) for _, kinds in groupby(team, key=place)]
    return sum(counts) // math.gcd(*counts)


def list_together(
    question: UnevenQuestion, team: Sequence[DeviceKind], local: Sequence[DeviceLayout]
) -> list[DeviceLayout]:
    """The layouts that are tried of all devices of these kinds. local: those whose ranks take steps alone."""
    num_devices = sum(kind.num_devices for kind in team)
    modes = [DeviceLayout(num_devices=num_devices, data=data) for data in question.data_modes]
    flat = [*modes, *(each for each in local if each.num_devices == num_devices)]
    if not question.joining(team).hosts:
        return [*flat, *_list_hybrids(question, team, num_devices)] if question.goal.pins.layout.replicas is not None else flat
    hybrids = _list_hybrids(question, team, num_devices)
    if hybrids and question.goal.pins.layout.data is None:
        # The same within each machine takes half the time on the network.
        flat = [layout for layout in flat if layout.data != "zero1"]
    return [*(_with_homes(question, team, layout) for layout in flat), *hybrids]


def _list_hybrids(question: UnevenQuestion, team: Sequence[DeviceKind], num_devices: int) -> list[DeviceLayout]:
    found, pinned = [], question.goal.pins.layout.replicas
    for data in question.hybrid_modes:
        number = count_replicas(team, are_alike=data == "zero3")
        asked = number if pinned is None else pinned
        if makes_replicas(num_devices, asked, data=data) and asked % number == 0:
            found.append(DeviceLayout(num_devices=num_devices, data=data, replicas=asked))
    return found


def _with_homes(question: UnevenQuestion, team: Sequence[DeviceKind], layout: DeviceLayout) -> DeviceLayout:
    """The layout with a home in each machine for weights that nobody trains and that stream."""
    if layout.shares_state or question.workload.adapter is None or question.goal.pins.layout.replicas is not None:
        return layout
    return replace(layout, replicas=count_replicas(team, are_alike=False))
