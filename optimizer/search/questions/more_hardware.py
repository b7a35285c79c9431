"""Ways out that need something more than there is: budget, host memory, disk, another card. Each says how much would do.

``alternatives.py`` has those that ask for something else on the same machine.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from optimizer.base.errors import NoFeasiblePlan
from optimizer.base.units import GIB, format_bytes
from optimizer.hardware.devices import (
    ASSUMED_DISK_READ_BYTES_PER_S,
    ASSUMED_DISK_WRITE_BYTES_PER_S,
    known_devices,
    table_machine,
)
from optimizer.hardware.machine import Machine
from optimizer.hardware.rental import PriceList
from optimizer.plan.plan import Plan
from optimizer.search.questions.ways import Asker, WayOut, host_bytes_of, way_out

HOST_SIZES_GIB: Final = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
"""Memory that hosts are sold with."""
MAX_TRIED = 3
"""Amounts and cards, from the least or the cheapest that bounds leave, for which a plan is looked for."""
DISK_STEP_BYTES = 16 * GIB


def list_hardware_ways(asker: Asker, prices: PriceList, *, error: NoFeasiblePlan) -> Iterator[WayOut]:
    """error: says the smallest budget that would do."""
    larger = list(_larger_budget(asker, error))
    yield from larger
    yield from _host_memory(asker)
    yield from _disk(asker)
    if not larger:
        yield from _another_card(asker, prices)


def _larger_budget(asker: Asker, error: NoFeasiblePlan) -> Iterator[WayOut]:
    """A larger budget, if the device itself has room for more than the budget."""
    enough_bytes = -(-int(error.fields["smallest_feasible_bytes"]) // 2**20) * 2**20
    if not asker.goal.device_budget_bytes < enough_bytes <= asker.machine.device.memory_bytes:
        return
    goal = replace(asker.goal, device_budget_bytes=enough_bytes)
    found = asker.ask(goal=replace(goal, pins=asker.representation))
    if found is None and (problem := asker.problem(goal=goal)) is not None:
        found = problem.priced("way out", Plan.from_json(error.fields["smallest_plan"]))
    if found is not None:
        size = format_bytes(enough_bytes)
        change = {"goal": {"device_budget_bytes": enough_bytes}}
        yield way_out("budget", f"a budget of {size}", found, change, flags=f'--budget "{size}"', expense="nothing")


def _host_memory(asker: Asker) -> Iterator[WayOut]:
    """The least amount that hosts are sold with for which a plan is found."""
    given = asker.goal.host_budget_bytes
    has_bytes = asker.machine.host_memory_bytes if given is None else given
    sizes = [size * GIB for size in HOST_SIZES_GIB if size * GIB > has_bytes]

    def problem_of(size_bytes: int) -> dict[str, object]:
        goal = replace(asker.goal, host_budget_bytes=None, pins=asker.representation)
        return {"goal": goal, "machine": replace(asker.machine, host_memory_bytes=size_bytes)}

    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if asker.may(**problem_of(sizes[middle])) else (middle + 1, high)
    for size_bytes in sizes[low : low + MAX_TRIED]:
        found = asker.ask(**problem_of(size_bytes))
        if found is not None:
            size = f"{size_bytes // GIB} GiB"
            words = f"{size} of host memory ({format_bytes(host_bytes_of(found))} used, {format_bytes(has_bytes)} there)"
            change = {"goal": {"host_budget_bytes": size_bytes}}
            yield way_out("host_memory", words, found, change, flags=f"--host-memory {size_bytes // GIB}GiB", expense="hardware")
            return


def _disk(asker: Asker) -> Iterator[WayOut]:
    """So much free disk as a plan then takes, where the machine's disk is too small or it is a card of the table without one."""
    machine = asker.machine
    if machine.rates.disk_write_bytes_per_s is None and machine.rates.source != "table":
        return
    if "disk" in asker.goal.forbid:
        return
    rates = replace(
        machine.rates,
        disk_read_bytes_per_s=machine.rates.disk_read_bytes_per_s or ASSUMED_DISK_READ_BYTES_PER_S,
        disk_write_bytes_per_s=machine.rates.disk_write_bytes_per_s or ASSUMED_DISK_WRITE_BYTES_PER_S,
    )
    wide = replace(machine, rates=rates, disk_free_bytes=2**60)
    found = asker.ask(goal=replace(asker.goal, disk_budget_bytes=None, pins=asker.representation), machine=wide)
    if found is None or not found.prediction.disk_peak_bytes:
        return
    enough_bytes = -(-found.prediction.disk_peak_bytes // DISK_STEP_BYTES) * DISK_STEP_BYTES
    has_bytes = min(machine.disk_free_bytes, asker.goal.disk_budget_bytes or machine.disk_free_bytes)
    if enough_bytes <= has_bytes:
        return
    size = f"{enough_bytes // GIB} GiB"
    words = f"{size} free on an NVMe disk ({format_bytes(has_bytes) if has_bytes else 'none'} there)"
    change = {"goal": {"disk_budget_bytes": enough_bytes}}
    yield way_out("disk", words, found, change, flags=f"--disk {enough_bytes // GIB}GiB", expense="hardware")


def _another_card(asker: Asker, prices: PriceList) -> Iterator[WayOut]:
    """Cards that bounds leave: the cheapest to rent for which a plan is found, then by memory those without a price."""
    cards = sorted(_larger_cards(asker), key=lambda card: card.device.memory_bytes)
    low, high = 0, len(cards)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if asker.may(**_on(asker, cards[middle])) else (middle + 1, high)
    tried_bytes, num_tried = 0, 0
    for card in sorted(cards[low:], key=lambda card: (_per_hour(card, prices), card.device.memory_bytes)):
        if card.device.memory_bytes <= tried_bytes or num_tried >= MAX_TRIED:
            continue
        tried_bytes, num_tried = card.device.memory_bytes, num_tried + 1
        found = asker.ask(**_on(asker, card))
        if found is not None:
            name = card.device.name
            words = f"{name} ({format_bytes(card.device.memory_bytes)} usable{_rent_words(name, prices)})"
            yield way_out("another_card", words, found, {"gpu": name}, flags=f'--gpu "{name}"', expense="hardware")
            return


def _rent_words(name: str, prices: PriceList) -> str:
    rental = prices.rental(name)
    if rental is None:
        return ""
    return f", {rental.currency} {rental.price_per_hour:g}/h, {rental.provider}, price of {rental.date}"


def _larger_cards(asker: Asker) -> Iterator[Machine]:
    machine, more_than_bytes = asker.machine, asker.goal.device_budget_bytes
    if machine.device.kind == "cuda":
        more_than_bytes = max(more_than_bytes, machine.device.memory_bytes)
    for name in known_devices():
        card = table_machine(name, host_memory_bytes=machine.host_memory_bytes, disk_bytes=machine.disk_free_bytes)
        if card.device.memory_bytes > more_than_bytes:
            yield card


def _on(asker: Asker, card: Machine) -> dict[str, object]:
    goal = replace(asker.goal, device_budget_bytes=card.device.memory_bytes, pins=asker.representation)
    return {"goal": goal, "machine": card}


def _per_hour(card: Machine, prices: PriceList) -> float:
    rental = prices.rental(card.device.name)
    return float("inf") if rental is None else rental.price_per_hour
