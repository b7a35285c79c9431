"""The base of both kinds of problems: a goal with its budgets, what the machine lacks, and a function that prices one plan.

``problem.py`` adds what training leaves free, ``generation/problem.py`` what a generation does. A search knows no model and no
machine, only ``price``; so it can be tested against any function, and what it optimizes is what the estimator predicts.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, Self, TypedDict, TypeVar

from optimizer.base.serialize import WithJson
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.prediction import Prediction, StagePeak, Verdict, stages_over
from optimizer.goal import GenerationGoal, Goal
from optimizer.hardware.machine import NO_COMPILER_FACT, Machine
from optimizer.plan.activations import COMPILED
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import Technique

PlanT = TypeVar("PlanT", bound=Plan | GenerationPlan)
PredictionT = TypeVar("PredictionT", bound=Prediction | GenerationPrediction)
GoalT = TypeVar("GoalT", bound=Goal | GenerationGoal)


@dataclass(frozen=True, kw_only=True)
class Priced(WithJson, Generic[PlanT, PredictionT]):
    """One plan with what it is predicted to cost."""

    label: str
    """``chosen``, a baseline's name, or for points of the frontier what the plan does in a few words."""
    plan: PlanT
    prediction: PredictionT
    verdict: Verdict
    """Against the goal's budgets."""


@dataclass(frozen=True, kw_only=True)
class Budgeted(Generic[PlanT, PredictionT, GoalT]):
    """The part of a problem that says which techniques are allowed and which plans fit."""

    goal: GoalT
    host_budget_bytes: int
    """Cap on bytes on the host tier: the goal's, or what the machine has."""
    price: Callable[[PlanT], PredictionT]
    """Pure: the same plan costs the same, always."""
    disk_budget_bytes: int = 0
    """The same for the disk tier; 0 where there is none."""
    remote_budget_bytes: int = 0
    """The same for the remote tier."""
    num_sharing: int = 1
    """Ranks that share a host, each of which has these budgets to itself."""
    unavailable: frozenset[Technique] = frozenset()
    """Techniques the machine cannot do, or has no rate for; without bitsandbytes a measured machine has none for 8-bit state."""
    representations: frozenset[str] | None = None
    """Those that were profiled and have rates (``WeightsPlan.representation``); None for all."""
    detail: Callable[[PlanT, PredictionT], PredictionT] | None = None
    """Works out what a price leaves out (``memory`` of a prediction), too slowly to be asked of every plan."""

    def allows(self, technique: Technique) -> bool:
        """Report whether the goal and the machine permit the technique."""
        if technique in self.goal.forbid or technique in self.unavailable:
            return False
        if not self.goal.allows_loss_by(technique):
            return False
        return {"disk": self.disk_budget_bytes > 0, "remote": self.remote_budget_bytes > 0}.get(technique, True)

    def is_known(self, representation: str) -> bool:
        """Report whether weights of this form were profiled and have rates."""
        return self.representations is None or representation in self.representations

    def fits_device(self, prediction: PredictionT) -> bool:
        """Report whether even the upper end of the interval honours the budget."""
        if isinstance(prediction, Prediction):
            return prediction.fits_within(self.goal.device_budget_bytes)
        return prediction.device_peak_high_bytes <= self.goal.device_budget_bytes

    def fits_elsewhere(self, prediction: PredictionT) -> bool:
        """Report whether host, disk and remote store have room."""
        return self.fits_beside_stages(prediction) and not self.stages_over(prediction)

    def fits_beside_stages(self, prediction: PredictionT) -> bool:
        """The same of steps or passes alone, whatever a job's other stages take."""
        host_bytes = prediction.host_peak_bytes
        if prediction.memory is not None:
            host_bytes = max(host_bytes, prediction.memory.host_pinned.value + prediction.memory.host_pageable.value)
        copies = prediction.num_replicas if isinstance(prediction, GenerationPrediction) else 1
        return self.has_room(
            host_bytes=copies * host_bytes,
            disk_bytes=copies * prediction.disk_peak_bytes,
            remote_bytes=copies * prediction.remote_peak_bytes,
        )

    def has_room(self, *, host_bytes: int, disk_bytes: int, remote_bytes: int) -> bool:
        """Report whether so many bytes are within the budgets of host, disk and remote store."""
        return (
            host_bytes <= self.host_budget_bytes
            and disk_bytes <= self.disk_budget_bytes
            and remote_bytes <= self.remote_budget_bytes
        )

    def stages_over(self, prediction: PredictionT) -> list[str]:
        """Sentences on a job's stages that host or disk have no room for; none where they were not worked out."""
        if isinstance(prediction, GenerationPrediction):
            load = prediction.load
            return [] if load is None else self.load_over(load, num_copies=prediction.num_replicas)
        return prediction.stages_over(
            host_bytes=self.host_budget_bytes, disk_bytes=self.disk_budget_bytes, num_sharing=self.num_sharing
        )

    def load_over(self, load: StagePeak, *, num_copies: int) -> list[str]:
        """Sentences on a generation's load that the host has no room for. num_copies: of the model, which all load at once."""
        return stages_over([load], host_bytes=self.host_budget_bytes // num_copies, disk_bytes=0)

    def fits(self, prediction: PredictionT) -> bool:
        return self.fits_device(prediction) and self.fits_elsewhere(prediction)

    def verdict(self, prediction: PredictionT) -> Verdict:
        """The prediction's own verdict, and ``does_not_fit`` where another tier has no room."""
        if not self.fits_elsewhere(prediction):
            return "does_not_fit"
        return prediction.verdict(self.goal.device_budget_bytes)

    def priced(
        self, label: str, plan: PlanT, prediction: PredictionT | None = None, *, in_detail: bool = True
    ) -> Priced[PlanT, PredictionT]:
        """prediction: the plan's price, where it is at hand."""
        found = self.price(plan) if prediction is None else prediction
        if in_detail and self.detail is not None and found.memory is None:
            found = self.detail(plan, found)
        return Priced(label=label, plan=plan, prediction=found, verdict=self.verdict(found))

    def with_budget(self, device_budget_bytes: int) -> Self:
        return replace(self, goal=replace(self.goal, device_budget_bytes=device_budget_bytes))


class Elsewhere(TypedDict):
    """Fields of a problem."""

    host_budget_bytes: int
    disk_budget_bytes: int
    remote_budget_bytes: int


def budgets_elsewhere(machine: Machine, *, host_bytes: int | None, disk_bytes: int | None) -> Elsewhere:
    """A goal's budgets on the other tiers, where it has any; else what the machine has free there."""
    return {
        "host_budget_bytes": machine.host_memory_bytes if host_bytes is None else host_bytes,
        "disk_budget_bytes": machine.disk_free_bytes if disk_bytes is None else min(disk_bytes, machine.disk_free_bytes),
        "remote_budget_bytes": machine.remote_free_bytes,
    }


def list_unavailable(machine: Machine) -> frozenset[Technique]:
    """Techniques for which the machine has no rate, and compiling where it has no compiler.

    The host's optimizer has a rate in any case: the estimator assumes it.
    """
    rates = machine.rates
    needed: dict[Technique, tuple[object, ...]] = {
        "8bit_optimizer": (rates.optimizer_elements_per_s.get("adamw_8"),),
        "disk": (rates.disk_write_bytes_per_s, rates.disk_read_bytes_per_s),
        "remote": (rates.remote_write_bytes_per_s, rates.remote_read_bytes_per_s),
    }
    missing = {technique for technique, found in needed.items() if not all(found)}
    return frozenset(missing | ({"compile_blocks"} if NO_COMPILER_FACT in machine.facts else set()))


def list_representations(profiled: Iterable[str], machine: Machine) -> frozenset[str]:
    """Profiled representations in the dtypes that the machine has a rate for. fp16 has the profile of bf16."""
    rates = machine.rates.matmul_flops_per_s
    names = {name.replace("bf16", dtype) for name in profiled for dtype in ("bf16", "fp16")}
    weights = {name: name.removesuffix(COMPILED).partition("/")[0] for name in names}
    return frozenset(name for name in names if all(dtype in rates for dtype in weights[name].split("+")))
