"""The question that is asked of devices of several kinds, and what is found out about it on the way."""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from optimizer.estimate.categories.tensors import list_tensors
from optimizer.estimate.prediction import Prediction
from optimizer.goal import Goal
from optimizer.hardware.machine import Device, DeviceKind, Machine
from optimizer.plan.devices.layout import DataParallel, DeviceLayout
from optimizer.plan.pins.training import Pins
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.search.problem import PricedPlan, SearchProblem
from optimizer.workload import TrainingWorkload

_STATE_BYTES: Final = 16
"""Gradient, moments and master of a trained element, at most."""
_LITTLE_SHARE: Final = 0.1
"""Part of the smallest device's memory."""
_UNLIKE: Final = ("name", "device", "rates", "num_devices", "facts")
"""Fields of a machine that say nothing of how alike two kinds of its devices are, or are looked at by themselves."""


@dataclass(kw_only=True)
class UnevenQuestion:
    """The question, and what is known of it."""

    profile: Profile
    workload: TrainingWorkload
    goal: Goal
    machine: Machine
    calibration: Mapping[str, Any] | None
    data_modes: tuple[DataParallel, ...]
    """Ways to share state and gradients among all ranks."""
    hybrid_modes: tuple[DataParallel, ...]
    """Ways to share them, or weights too, within each of several replicas."""
    make_problem: Callable[..., SearchProblem]
    """``training_problem`` of ``search/training.py``, with the estimator bound."""
    price: Callable[[Plan], Prediction]
    """The prediction of a plan on its devices by its tensors alone."""
    estimate: Callable[[Plan], Prediction]
    """The same with what the plan's processes take of the devices, which takes far longer."""
    settle: Callable[[Plan], tuple[Plan, Prediction]]
    """The plan with as many steps between synchronizations as it gains by, and its price."""
    find_best: Callable[..., bool]
    """The search of ``search/core.py``, which notes the best plan in the book that it is given."""
    spared_bytes: Mapping[str, int] = field(default_factory=dict)
    """By kind, bytes of each of its devices that are to be left free."""
    budgets: dict[str, int] = field(default_factory=dict)
    """By kind, the budget of each of its devices."""
    sequence_ms: dict[Hashable, float] = field(default_factory=dict)
    """By likeness of a kind, the least time of one sequence of a step."""
    exchange_ms: dict[Hashable, tuple[float, float]] = field(default_factory=dict)
    """By likeness of kinds and layout, the least that ranks wait for each other, and that the network is busy."""
    alone_ms: dict[Hashable, float] = field(default_factory=dict)
    """By likeness of a kind and layout, the least time of a step on its devices alone."""
    decisions: dict[Hashable, list[Pins]] = field(default_factory=dict)
    """By likeness of kinds and layout, what ranks can do alike (``parts.py``)."""
    latest: dict[Hashable, deque[Plan]] = field(default_factory=dict)
    """By likeness of a kind, the latest plans that were found for it, newest first, whatever its share and its team."""
    known: dict[Hashable, tuple[Plan, Prediction] | None] = field(default_factory=dict)
    """The best plan of a kind for a number of sequences, by all that it depends on."""

    def pose(
        self,
        kind: DeviceKind,
        layout: DeviceLayout,
        *,
        num_sequences: int,
        pins: Pins | None = None,
        team: Sequence[DeviceKind] = (),
    ) -> SearchProblem:
        """The problem of ranks that are all on this kind of device, each with so many sequences. team: the kinds that exchange,
        which decides over what link; this one alone unless given.
        """
        name, goal, inside = kind.device.name, self.goal, self.joining([kind, *team])
        if inside.hosts and layout.replicas == 1 and (layout.shares_state or self.workload.adapter is not None):
            # The ranks would have one home for each weight, and no memory of the host is in two machines.
            goal = replace(goal, forbid=(*goal.forbid, "stream_weights"))
        budget_bytes = self.budgets.get(name, self.allowed_bytes(name, kind.device.memory_bytes))
        return self.make_problem(
            self.profile,
            workload=replace(self.workload, global_batch_size=layout.num_devices * num_sequences),
            goal=replace(goal, device_budget_bytes=budget_bytes, pins=pins or goal.pins),
            machine=inside.with_kind(name, num_devices=layout.num_devices),
            # Finished runs have taught what the first kind's times are.
            calibration=self.calibration if kind.device.name == self.machine.device.name else None,
            layout=layout,
        )

    def pose_cut(self, layout: DeviceLayout) -> SearchProblem:
        """The problem of a model that is cut over ranks of several kinds, each of which leaves free what it is to."""
        spared, first = self.spared_bytes, self.machine.device

        def leaving(device: Device) -> Device:
            return replace(device, memory_bytes=max(1, device.memory_bytes - spared.get(device.name, 0)))

        others = tuple(replace(kind, device=leaving(kind.device)) for kind in self.machine.others)
        return self.make_problem(
            self.profile,
            workload=self.workload,
            goal=self.goal,
            machine=replace(self.machine, device=leaving(first), others=others),
            calibration=self.calibration,
            layout=layout,
        )

    def likeness(self, kind: DeviceKind, team: Sequence[DeviceKind] = ()) -> Hashable:
        """The same for kinds that differ in their name and number alone, as the same card in two like machines: what is found of
        one holds of the other. team: as ``pose`` has it.
        """
        name = kind.device.name
        here = self.joining([kind, *team]).with_kind(name)
        return (
            replace(kind.device, name=name.partition("@")[0], index=0, indices=()),
            kind.rates.fingerprint,
            tuple(getattr(here, each.name) for each in fields(here) if each.name not in _UNLIKE),
            self.spared_bytes.get(name, 0),
            name == self.machine.device.name and bool(self.calibration),
        )

    def likeness_of(self, team: Sequence[DeviceKind]) -> Hashable:
        """The same of kinds that exchange, with their numbers."""
        return tuple((self.likeness(kind, team), kind.num_devices) for kind in team)

    def least_sequence_ms(self, kind: DeviceKind) -> float:
        """Least milliseconds of compute for one sequence of a step; 0 if nothing is known."""
        name = self.likeness(kind)
        if name not in self.sequence_ms:
            total = self.workload.global_batch_size
            problem = self.pose(kind, DeviceLayout(), num_sequences=total)
            relax = problem.relax
            times = [] if relax is None else [relax.compute_ms(base) for base in problem.settings()]
            self.sequence_ms[name] = min(times, default=0.0) / total
        return self.sequence_ms[name]

    def joining(self, team: Sequence[DeviceKind]) -> Machine:
        """The machine in which these kinds exchange."""
        return self.machine.among({kind.device.name for kind in team})

    def allowed_bytes(self, name: str, memory_bytes: int) -> int:
        """Bytes that a device of this kind and memory may take."""
        return max(1, min(self.goal.device_budget_bytes, memory_bytes) - self.spared_bytes.get(name, 0))

    def leave_out_what_shares_little(self) -> None:
        """Keep to replicated ranks where shared state and gradients would spare hardly anything, as with adapters."""
        num_bytes = _STATE_BYTES * sum(list_tensors(self.profile).num_elements)
        smallest = min(kind.device.memory_bytes for kind in self.machine.kinds)
        if "replicated" in self.data_modes and num_bytes < _LITTLE_SHARE * smallest:
            self.data_modes = ("replicated",)
            self.hybrid_modes = tuple(data for data in self.hybrid_modes if data == "zero3")

    def priced(self, label: str, plan: Plan) -> PricedPlan:
        """A plan on its devices, in detail."""
        found = self.estimate(plan)
        return PricedPlan(
            label=label, plan=plan, prediction=found, verdict=found.verdict(self.goal.device_budget_bytes)
        )


def speed_of(kind: DeviceKind) -> float:
    """A rough one, to begin with."""
    return max(kind.rates.matmul_flops_per_s.values())


def not_searched(least_ms: float) -> str:
    """Why devices were passed over that cannot be of use."""
    return f"not searched, since no plan of it takes less than {least_ms:.1f} ms"
