"""Plans of ranks on devices of several kinds: what all of them do alike, and each kind's best for any number of sequences.

Memory is first that of tensors; where a process then has no room on its card, segments are let grow, and after that the kind's
budget is lowered by what was too much.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final

from optimizer.base.errors import InvalidPlan, NoFeasiblePlan
from optimizer.base.serialize import from_json, to_json
from optimizer.estimate.categories.tensors import list_tensors
from optimizer.estimate.prediction import Prediction, RankPrediction
from optimizer.goal import Goal
from optimizer.hardware.machine import Device, DeviceKind, Machine
from optimizer.plan.allocator import AllocatorPlan
from optimizer.plan.layout import DataParallel, DeviceLayout, RankShare
from optimizer.plan.pins.training import Pins
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.search.check.card_fit import ACCEPTED
from optimizer.search.problem import OUTER_FIELDS, PricedPlan, SearchProblem
from optimizer.search.questions.shares import share_out
from optimizer.search.solver.pricebook import PriceBook, remembering
from optimizer.workload import TrainingWorkload

_STATE_BYTES: Final = 16
"""Gradient, moments and master of a trained element, at most."""
_LITTLE_SHARE: Final = 0.1
"""Part of the smallest device's memory."""
_TRIES: Final = 4
"""Times that shares are dealt out again where a process has no room on its card."""


@dataclass(kw_only=True)
class UnevenQuestion:
    """The question, and what is known of it."""

    profile: Profile
    workload: TrainingWorkload
    goal: Goal
    machine: Machine
    calibration: Mapping[str, Any] | None
    data_modes: tuple[DataParallel, ...]
    make_problem: Callable[..., SearchProblem]
    """``training_problem`` of ``search/training.py``, with the estimator bound."""
    estimate: Callable[[Plan], Prediction]
    """The prediction of a plan on its devices, with what its processes take of them."""
    find_best: Callable[..., bool]
    """The search of ``search/core.py``, which notes the best plan in the book that it is given."""
    spared_bytes: Mapping[str, int] = field(default_factory=dict)
    """By kind, bytes of each of its devices that are to be left free."""
    budgets: dict[str, int] = field(default_factory=dict)
    """By kind, the budget of each of its devices."""
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
        name = kind.device.name
        budget_bytes = self.budgets.get(name, self.allowed_bytes(name, kind.device.memory_bytes))
        return self.make_problem(
            self.profile,
            workload=replace(self.workload, global_batch_size=layout.num_devices * num_sequences),
            goal=replace(self.goal, device_budget_bytes=budget_bytes, pins=pins or self.goal.pins),
            machine=self.joining([kind, *team]).with_kind(name, num_devices=layout.num_devices),
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

    def priced(self, label: str, plan: Plan) -> PricedPlan:
        """A plan on its devices, in detail."""
        found = self.estimate(plan)
        return PricedPlan(
            label=label, plan=plan, prediction=found, verdict=found.verdict(self.goal.device_budget_bytes)
        )


def speed_of(kind: DeviceKind) -> float:
    """A rough one, to begin with."""
    return max(kind.rates.matmul_flops_per_s.values())


def common_decisions(question: UnevenQuestion, team: Sequence[DeviceKind], layout: DeviceLayout) -> list[Pins]:
    """Decisions that all ranks have in common, as each kind would have them for its share of the work, slower kinds first."""
    whole = sum(kind.num_devices * speed_of(kind) for kind in team)
    found: list[Pins] = []
    for kind in reversed(team):
        sequences = max(1, round(question.workload.global_batch_size * speed_of(kind) / whole))
        problem = question.pose(kind, layout, num_sequences=sequences, team=team)
        best = _best_plan(question, problem, polishes=False)
        pins = None if best is None else _pins_of(question.goal.pins, best[0])
        if pins is not None and pins not in found:
            found.append(pins)
    return found


def _pins_of(pins: Pins, plan: Plan) -> Pins:
    """Pin what a plan decides outside its blocks and its batch, beside what is pinned already. Where gradients are summed after
    each micro-batch, all ranks have as many.
    """
    document: dict[str, dict[str, Any]] = to_json(pins)
    for path in OUTER_FIELDS:
        category, _, knob = path.partition(".")
        if category != "batch":
            document[category][knob] = attrgetter(path)(plan)
    if plan.gradients.choice != "keep" or plan.layout.reduces_each_micro_batch:
        document["batch"]["accumulation_steps"] = plan.batch.accumulation_steps
    return from_json(Pins, document, path="goal.pins")


def _best_plan(
    question: UnevenQuestion, problem: SearchProblem, *, polishes: bool
) -> tuple[Plan, Prediction] | None:
    """The best plan by its tensors' bytes; None where nothing fits. polishes: False for nearly the best, in half of the time."""
    book = PriceBook(remembering(problem))
    with suppress(InvalidPlan, NoFeasiblePlan):
        if book.problem.settings() and question.find_best(book, polishes=polishes):
            return book.best
    return None


def find_shared(
    question: UnevenQuestion, team: Sequence[DeviceKind], layout: DeviceLayout, pins: Pins, *, is_equal: bool
) -> PricedPlan | None:
    """The plan with shares by speed, or with equal ones, whose processes all have room on their cards; None if none is found."""
    counts, total = [kind.num_devices for kind in team], question.workload.global_batch_size
    if is_equal and total % layout.num_devices:
        return None
    question.budgets.clear()
    grows = False
    for _ in range(_TRIES):
        parts = _Parts(question=question, team=team, layout=layout, pins=pins)
        equal = [[total // layout.num_devices] * count for count in counts]
        shares = equal if is_equal else parts.share_out(total, counts)
        plan = None if shares is None else parts.plan(shares)
        if plan is None:
            break
        growing = replace(plan, allocator=AllocatorPlan(expandable_segments=True))
        priced = question.priced("shared", growing if grows else plan)
        over = [rank for rank in priced.prediction.ranks if rank.verdict(question.goal.device_budget_bytes) not in ACCEPTED]
        if not over:
            return priced
        if not grows and question.goal.pins.allocator.expandable_segments is None:
            grows = True
            priced = question.priced("shared", growing)
            over = [rank for rank in priced.prediction.ranks if rank.verdict(question.goal.device_budget_bytes) not in ACCEPTED]
            if not over:
                return priced
        for rank in over:
            known = question.budgets.get(rank.device, question.allowed_bytes(rank.device, rank.memory_bytes))
            question.budgets[rank.device] = max(1, min(known, rank.peak_high_bytes) - _too_many(rank))
    question.budgets.clear()
    return None


def _too_many(rank: RankPrediction) -> int:
    """Bytes by which the process is over its card."""
    if rank.memory is None or not rank.memory.total_bytes:
        return max(1, rank.peak_high_bytes - rank.memory_bytes)
    return max(1, rank.memory.process.high - rank.memory.total_bytes)


@dataclass(kw_only=True)
class _Parts:
    """The best plan of each kind for each number of sequences, once what all do alike is decided."""

    question: UnevenQuestion
    team: Sequence[DeviceKind]
    layout: DeviceLayout
    pins: Pins

    def share_out(self, total: int, counts: Sequence[int]) -> list[list[int]] | None:
        """In steps of as many sequences as all ranks have micro-batches, where those are as many on each."""
        unit = self.pins.batch.accumulation_steps or 1
        if total % unit:
            return None
        shares = share_out(total // unit, counts=counts, time_of=lambda kind, size: self._time_ms(kind, unit * size))
        return None if shares is None else [[unit * size for size in sizes] for sizes in shares]

    def plan(self, shares: Sequence[Sequence[int]]) -> Plan | None:
        """The plan of all ranks; None where a share does not fit its device."""
        ranks, plans = [], []
        for index, sizes in enumerate(shares):
            for size in sizes:
                found = self._best(index, size, polishes=True)
                if found is None:
                    return None
                plan = found[0]
                plans.append(plan)
                ranks.append(
                    RankShare(
                        device=self.team[index].device.name,
                        micro_batch_size=plan.batch.micro_batch_size,
                        accumulation_steps=plan.batch.accumulation_steps,
                        per_block=plan.activations.per_block,
                    )
                )
        packing = max((plan.activations.compress for plan in plans), key=lambda compress: compress != "none")
        first = replace(plans[0], activations=replace(plans[0].activations, compress=packing))
        return replace(first, layout=replace(self.layout, ranks=tuple(ranks)))

    def _time_ms(self, kind: int, size: int) -> float:
        found = self._best(kind, size, polishes=False)
        return math.inf if found is None else found[1].step_ms

    def _best(self, kind: int, size: int, *, polishes: bool) -> tuple[Plan, Prediction] | None:
        known, name = self.question.known, self.team[kind].device.name
        link = self.question.joining(self.team).peers
        key = (name, self.question.budgets.get(name), size, self.layout, self.pins, polishes, link)
        if key not in known:
            problem = self.question.pose(self.team[kind], self.layout, num_sequences=size, pins=self.pins, team=self.team)
            known[key] = _best_plan(self.question, problem, polishes=polishes)
        return known[key]
