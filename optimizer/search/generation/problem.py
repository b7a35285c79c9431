"""What a search over generation's plans is given: the goal, the freedom it leaves, and a function that prices one plan.

As in ``search/problem.py`` the search knows no model and no machine, only ``price``; ``search.py`` binds it to the estimator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from optimizer.base.errors import InvalidPlan
from optimizer.base.serialize import to_json
from optimizer.estimate.bounds.generation_floor import Floors
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.prediction import Verdict
from optimizer.goal import GenerationGoal
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.techniques import TECHNIQUE_LABELS, Technique
from optimizer.workload import GenerationWorkload

GenerationPrice = Callable[[GenerationPlan], GenerationPrediction]
GenerationBound = Callable[[GenerationPlan, Sequence[int], Sequence[int]], Floors]
"""Of a plan, sizes of batches and numbers of micro-batches, both ascending."""


@dataclass(frozen=True, kw_only=True)
class PricedGenerationPlan:
    """One plan with what it is predicted to cost."""

    label: str
    """``chosen``, a baseline's name, or for points of the frontier what the plan does in a few words."""
    plan: GenerationPlan
    prediction: GenerationPrediction
    verdict: Verdict
    """Against the goal's budgets."""

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return document


@dataclass(frozen=True, kw_only=True)
class GenerationProblem:
    """Everything the solver may know."""

    workload: GenerationWorkload
    goal: GenerationGoal
    host_budget_bytes: int
    """Cap on bytes on the host tier: the goal's, or what the machine has."""
    price: GenerationPrice
    """Pure: the same plan costs the same, always."""
    floors: GenerationBound
    """The least that plans can take, with batches of these sizes in so many micro-batches; much cheaper than a price."""
    disk_budget_bytes: int = 0
    """The same for the disk tier; 0 where there is none."""
    remote_budget_bytes: int = 0
    """The same for the remote store."""
    unavailable: frozenset[Technique] = frozenset()
    """What the machine cannot do, or has no rate for."""
    representations: frozenset[str] | None = None
    """Those that were profiled and have rates (``WeightsPlan.representation``); None for all."""
    can_cut_prompts: bool = True
    """Whether prompts of any length can run, so that a prefill may be of a part of one."""
    can_attend_on_host: bool = True
    """Whether the model lets others attend, so that attention may be computed where keys and values are."""
    find_model_conflict: Callable[[GenerationPlan], InvalidPlan | None] = lambda plan: None
    """What of a plan the model cannot do, whatever the work; None where it can all."""
    longest_prefix: int = 0
    """Of how many of a prompt's first tokens keys and values may be made again, at most; 0 where the model cannot."""
    has_copies_beside: bool = True
    """Whether copies between host and device run beside compute; else nothing is gained where they come ahead of their use."""
    detail: Callable[[GenerationPlan, GenerationPrediction], GenerationPrediction] | None = None
    """Works out what a price leaves out (``GenerationPrediction.memory``), too slowly to be asked of every plan."""

    def allows(self, technique: Technique) -> bool:
        """Whether the goal and the machine permit it."""
        if technique in self.goal.forbid or technique in self.unavailable:
            return False
        if not self.goal.allows_loss_by(technique):
            return False
        return {"disk": self.disk_budget_bytes > 0, "remote": self.remote_budget_bytes > 0}.get(technique, True)

    def permits(self, plan: GenerationPlan) -> bool:
        """Whether every technique of the plan is allowed, all together can be carried out, its weights were profiled, and every
        pin is kept.
        """
        return self.permits_techniques(plan) and self.goal.pins.broken_by(plan) is None

    def permits_techniques(self, plan: GenerationPlan) -> bool:
        """The same, whatever is pinned."""
        if self.find_conflict(plan) is not None:
            return False
        return all(self.allows(technique) for technique in plan.techniques)

    def _is_known(self, plan: GenerationPlan) -> bool:
        return self.representations is None or plan.weights.representation in self.representations

    def find_conflict(self, plan: GenerationPlan) -> InvalidPlan | None:
        """Why the plan cannot be carried out here, or not be priced, whatever the goal says of it; None where it can."""
        if not self._is_known(plan):
            known = sorted(self.representations or ())
            return InvalidPlan(
                f"plan.weights is {plan.weights.representation}; known of this model on this machine: {', '.join(known)}",
                field="plan.weights",
                value=plan.weights.representation,
                allowed=known,
            )
        if plan.kv_cache.attention == "host" and not self.can_attend_on_host:
            return InvalidPlan(
                "plan.kv_cache.attention is host; this model attends in code of its own, which runs on the device alone",
                field="plan.kv_cache.attention",
                value="host",
                allowed=["device"],
            )
        return plan.find_conflict(self.workload) or self.find_model_conflict(plan)

    def check(self, plan: GenerationPlan) -> None:
        """Raise InvalidPlan where the plan suits neither the model, the machine nor the work."""
        conflict = self.find_conflict(plan)
        if conflict is not None:
            raise conflict
        for technique in plan.techniques:
            if technique in self.unavailable:
                raise InvalidPlan(
                    f"the plan needs {TECHNIQUE_LABELS[technique]!r}, which is not to be had on this machine",
                    field="plan",
                    value=technique,
                    allowed="what the machine has",
                )

    def fits_device(self, prediction: GenerationPrediction) -> bool:
        """Whether even the upper end of the interval honours the budget."""
        return prediction.device_peak_high_bytes <= self.goal.device_budget_bytes

    def fits_elsewhere(self, prediction: GenerationPrediction) -> bool:
        """Whether host, disk and remote store have room."""
        host_bytes = prediction.host_peak_bytes
        if prediction.memory is not None:
            host_bytes = max(host_bytes, prediction.memory.host_pinned.value + prediction.memory.host_pageable.value)
        return (
            host_bytes <= self.host_budget_bytes
            and prediction.disk_peak_bytes <= self.disk_budget_bytes
            and prediction.remote_peak_bytes <= self.remote_budget_bytes
        )

    def fits(self, prediction: GenerationPrediction) -> bool:
        return self.fits_device(prediction) and self.fits_elsewhere(prediction)

    def verdict(self, prediction: GenerationPrediction) -> Verdict:
        """The prediction's own verdict, and ``does_not_fit`` where another tier has no room."""
        if not self.fits_elsewhere(prediction):
            return "does_not_fit"
        return prediction.verdict(self.goal.device_budget_bytes)

    def priced(self, label: str, plan: GenerationPlan, *, in_detail: bool = True) -> PricedGenerationPlan:
        prediction = self.price(plan)
        if in_detail and self.detail is not None and prediction.memory is None:
            prediction = self.detail(plan, prediction)
        return PricedGenerationPlan(label=label, plan=plan, prediction=prediction, verdict=self.verdict(prediction))

    def with_budget(self, device_budget_bytes: int) -> "GenerationProblem":
        return replace(self, goal=replace(self.goal, device_budget_bytes=device_budget_bytes))
