"""Ways out where nothing fits, as types: what each is, what it costs whoever takes it, and their order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from optimizer.base.serialize import WithJson
from optimizer.base.units import format_bytes, format_duration
from optimizer.goal import Goal
from optimizer.hardware.machine import Machine
from optimizer.plan.pins.training import Pins
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.search.answer.fitting import Beside, find_fitting, may_fit
from optimizer.search.problem import PricedPlan, SearchProblem
from optimizer.workload import TrainingWorkload

Pose = Callable[[Profile, TrainingWorkload, Goal, Machine], SearchProblem]
"""The question for another model or other work, goal or machine."""
Obtain = Callable[[TrainingWorkload, Goal], Profile | None]
"""The model's profile, as far as this work and this goal need it; None where it is not to be had now."""
Kind = Literal[
    "budget",
    "permit",
    "8bit_optimizer",
    "bf16",
    "bf16_8bit",
    "lossy",
    "smaller_batch",
    "adapters",
    "qlora",
    "shorter_sequence",
    "qlora_shorter",
    "host_memory",
    "disk",
    "another_card",
]
Expense = Literal["nothing", "rounding", "training", "data", "hardware"]
"""The cost of a way besides time, from least to most: the numbers stay; they are rounded; other or fewer weights are trained, or
other batches; less text is seen at once; something has to be there that is not."""
_EXPENSES: tuple[Expense, ...] = ("nothing", "rounding", "training", "data", "hardware")
SLOW_RATIO = 20.0
"""A way that takes so many times longer than the fastest is named one rank later."""


@dataclass(frozen=True, kw_only=True)
class WayOut(WithJson):
    """One change of the request, and a plan that then fits."""

    kind: Kind
    what: str
    """The change in words."""
    sentence: str
    """The same with the plan's peak and the time of its step."""
    change: dict[str, Any]
    """The change to ask for, in the words of a job spec: ``{"workload": {"sequence_length": 512}}``, ``{"gpu": "L4"}``."""
    flags: str
    """The same for ``headroom plan``: ``--sequence-length 512``."""
    expense: Expense
    plan: Plan
    device_peak_bytes: int
    """Upper end of that plan's peak."""
    host_bytes: int
    disk_bytes: int
    step_ms: float
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class Asker:
    """The question, and a way to ask another."""

    pose: Pose
    obtain: Obtain
    workload: TrainingWorkload
    goal: Goal
    machine: Machine
    representation: Pins = field(default_factory=Pins)
    """The form of the numbers that holds least of all that is allowed, pinned: a question that keeps it is answered sooner."""

    _beside: Beside = field(default_factory=dict, repr=False, compare=False)

    def problem(
        self, *, goal: Goal | None = None, machine: Machine | None = None, **work: Any
    ) -> SearchProblem | None:
        """The question where the workload's fields, the goal or the machine are others; None where its profile is not at hand."""
        workload = replace(self.workload, **work)
        goal = replace(self.goal, pins=self.representation) if goal is None else goal
        profile = self.obtain(workload, goal)
        return None if profile is None else self.pose(profile, workload, goal, machine or self.machine)

    def may(self, **asked: Any) -> bool:
        """Report whether bounds leave room for a plan that fits."""
        problem = self.problem(**asked)
        return problem is not None and may_fit(problem)

    def ask(self, **asked: Any) -> PricedPlan | None:
        """A plan that then fits."""
        problem = self.problem(**asked)
        return None if problem is None else find_fitting(problem, beside=self._beside)


def way_out(
    kind: Kind, what: str, found: PricedPlan, change: dict[str, Any], *, flags: str, expense: Expense
) -> WayOut:
    """what: the change in words."""
    prediction = found.prediction
    high_bytes = prediction.device_peak_high_bytes
    return WayOut(
        kind=kind,
        what=what,
        sentence=f"{what}: at most {format_bytes(high_bytes)}, {format_duration(prediction.step_ms / 1000)} a step",
        change=change,
        flags=flags,
        expense=expense,
        plan=found.plan,
        device_peak_bytes=high_bytes,
        host_bytes=host_bytes_of(found),
        disk_bytes=prediction.disk_peak_bytes,
        step_ms=prediction.step_ms,
        tokens_per_s=prediction.tokens_per_s,
    )


def host_bytes_of(found: PricedPlan) -> int:
    """All that a plan takes of the host."""
    memory = found.prediction.memory
    in_process_bytes = 0 if memory is None else memory.host_pinned.value + memory.host_pageable.value
    return max(found.prediction.host_peak_bytes, in_process_bytes)


def rank_ways(ways: Sequence[WayOut]) -> list[WayOut]:
    """Put the least costly first: by expense, and of the same expense by time a token; a very slow one comes a rank later."""
    fastest = max((way.tokens_per_s for way in ways), default=0.0)

    def order(way: WayOut) -> tuple[int, float]:
        is_slow = way.tokens_per_s * SLOW_RATIO < fastest
        return _EXPENSES.index(way.expense) + is_slow, -way.tokens_per_s

    return sorted(ways, key=order)
