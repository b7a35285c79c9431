"""Prices of parts by the two things that all parts of a setting share: the machine, and the fate of gradients. Torch-free."""

from collections.abc import Mapping
from functools import cached_property
from typing import Final

from optimizer.base.categories import Link
from optimizer.estimate.categories.activations import Trip
from optimizer.estimate.categories.gradients import find_dropped, gradient_python_s
from optimizer.estimate.categories.optimizer_state import host_bytes_per_s
from optimizer.estimate.memo import Table
from optimizer.estimate.shape.compiled import CompiledShape
from optimizer.estimate.tasks.change import PartName
from optimizer.estimate.tasks.dropped import Dropped
from optimizer.estimate.tasks.moments import Moments
from optimizer.estimate.tasks.parts import PartTime
from optimizer.estimate.tasks.transfers import Legs
from optimizer.hardware.machine import Machine
from optimizer.hardware.thread_wakeup import wakeup_cost_s
from optimizer.plan.plan import Plan

_PRICES: Final[Table[tuple[bool, Dropped | None, str, str], "PartPrices"]] = Table()


class PartPrices:
    """Prices of one shape's parts on one machine, where gradients go one way."""

    def __init__(self, compiled: CompiledShape, machine: Machine, *, dropped: Dropped | None, leaves_gradients: bool) -> None:
        self.compiled, self.machine = compiled, machine
        self.dropped, self.leaves_gradients = dropped, leaves_gradients
        self.rates_key = f"{machine.device.kind} {machine.rates.fingerprint}"

    @classmethod
    def find(
        cls,
        compiled: CompiledShape,
        *,
        plan: Plan,
        machine: Machine,
        moments: Moments,
        is_first: bool = False,
        drops_all: bool = False,
    ) -> "PartPrices":
        """Find the prices of a plan's parts. plan: of which only what becomes of gradients is looked at. is_first:
        whether updates inside backward make the moments, as in a first step that consumes gradients. The same object
        for all that differ in nothing else. drops_all: every gradient goes as soon as it is complete, and none is copied:
        for bounds.
        """
        dropped = Dropped() if drops_all else find_dropped(plan, moments, is_first=is_first, device_kind=machine.device.kind)
        leaves = plan.gradients.choice == "host" and not drops_all
        key = (leaves, dropped, machine.device.kind, machine.rates.fingerprint)
        return _PRICES.obtain(compiled, key, lambda: cls(compiled, machine, dropped=dropped, leaves_gradients=leaves))

    @classmethod
    def find_adding_up(cls, compiled: CompiledShape, machine: Machine, *, leaves: bool) -> "PartPrices":
        """Find the prices of parts that add to gradients on the device. leaves: whether these then go to the host."""
        key = (leaves, None, machine.device.kind, machine.rates.fingerprint)
        return _PRICES.obtain(compiled, key, lambda: cls(compiled, machine, dropped=None, leaves_gradients=leaves))

    def time(self, part: PartName, *, trip: Trip | None = None) -> PartTime:
        return self.compiled.part_time(part, self.machine, rates_key=self.rates_key, trip=trip)

    def gradients_legs(self, num_bytes: int, *, num_shared: int, is_first: bool) -> Legs:
        """Legs of a part's gradients to the host, where they are added to those of the micro-batches before and measured.

        num_shared: of their tensors, those that threads copy together.
        """
        if num_bytes <= 0:
            return ()
        # Norms are taken in the last micro-batch only, which a single one is too.
        num_passes = 1 if is_first else 3
        host_ms = num_passes * num_bytes / self._host_bytes_per_s * 1000
        num_ops = num_shared * (1 if is_first else 2)
        rates = self.machine.rates
        host_ms += wakeup_cost_s(num_ops, rates, after_s=gradient_python_s(rates), kind="host") * 1000
        return (("copy_out", num_bytes / rates.device_to_host_bytes_per_s * 1000), ("host", host_ms))

    @cached_property
    def _host_bytes_per_s(self) -> float:
        return host_bytes_per_s(self.machine.rates)


def with_gradients(copied: Mapping[Link, int], gradient_bytes: int) -> Mapping[Link, int]:
    """Bytes that a part copies by link, with the gradients that leave."""
    if not gradient_bytes:
        return copied
    return {**copied, "device_to_host": copied.get("device_to_host", 0) + gradient_bytes}
