"""Cuts a machine with several devices into the parts that ranks are priced on, each with one device. Torch-free."""

from dataclasses import replace
from typing import Final

from optimizer.hardware.machine import Device, Machine
from optimizer.hardware.rates import Rates
from optimizer.profile.time_kinds import COMPUTE_KINDS, TimeKind

_SHARED_RATES = (
    "host_optimizer_elements_per_s",
    "disk_write_bytes_per_s",
    "disk_read_bytes_per_s",
    "disk_cached_read_bytes_per_s",
    "remote_write_bytes_per_s",
    "remote_read_bytes_per_s",
)
"""Rates of one host, one disk and one network, which all ranks use at the same moments of their steps."""
_KERNELS: Final = tuple(kind for kind in COMPUTE_KINDS if kind not in ("dispatch", "hooks"))
"""Kinds of time that threads share; Python has one."""


def count_sharing(machine: Machine, *, num_ranks: int) -> int:
    """The ranks at most that share one host, with its disk and its store."""
    return min(num_ranks, machine.devices_per_host or num_ranks)


def share_of(machine: Machine, *, num_ranks: int) -> Machine:
    """A machine with one device, which has its part of the host, the disk and the store to itself.

    Each card keeps its own link to the host, as fast as the table or the probe says, unless a switch stands before several:
    ranks copy at the same moments, and are taken to be behind as few switches as have room for them. On the CPU device ranks
    share memory and cores too: threads are dealt out, and kernels take longer by as much. Ranks in several machines share with
    those of their own machine alone, of which there are at most as many as it has devices.
    Not modelled: host memory that is slower than all links together.
    """
    num_ranks = count_sharing(machine, num_ranks=num_ranks)
    if num_ranks == 1:
        return replace(machine, num_devices=1)
    rates = _share_rates(machine.rates, num_ranks, num_on_switch=min(machine.cards_per_switch, num_ranks))
    shared = replace(
        machine,
        num_devices=1,
        host_memory_bytes=machine.host_memory_bytes // num_ranks,
        disk_free_bytes=machine.disk_free_bytes // num_ranks,
        remote_free_bytes=machine.remote_free_bytes // num_ranks,
        rates=rates,
    )
    if machine.device.kind != "cpu":
        return shared
    num_threads = max(1, machine.num_threads // num_ranks)
    factor = machine.num_threads / num_threads
    return replace(
        shared,
        device=machine.device if machine.device.is_capped else _part_of(machine, num_ranks),
        num_threads=num_threads,
        rates=replace(rates, time_factors={kind: factor * rates.time_factor(kind) for kind in _KERNELS} | _others(rates)),
    )


def _part_of(machine: Machine, num_ranks: int) -> Device:
    return replace(machine.device, memory_bytes=machine.device.memory_bytes // num_ranks)


def _share_rates(rates: Rates, num_ranks: int, *, num_on_switch: int) -> Rates:
    known = {name: getattr(rates, name) for name in _SHARED_RATES}
    return replace(
        rates,
        device_to_host_bytes_per_s=rates.device_to_host_bytes_per_s / num_on_switch,
        host_to_device_bytes_per_s=rates.host_to_device_bytes_per_s / num_on_switch,
        **{name: rate / num_ranks for name, rate in known.items() if rate is not None},
    )


def _others(rates: Rates) -> dict[TimeKind, float]:
    return {kind: factor for kind, factor in rates.time_factors.items() if kind not in _KERNELS}
