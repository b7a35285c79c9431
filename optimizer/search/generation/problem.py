"""The problem of a search over generation's plans: the goal, the freedom it leaves, and a function that prices one plan.

As in ``search/problem.py`` the search knows no model and no machine, only ``price``; ``search.py`` binds it to the estimator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from optimizer.base.errors import InvalidPlan
from optimizer.estimate.bounds.lower_bounds import Floors
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.prediction import StagePeak
from optimizer.goal import GenerationGoal
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.techniques import TECHNIQUE_LABELS
from optimizer.search.budgeted import Budgeted, Priced
from optimizer.workload import GenerationWorkload

GenerationPrice = Callable[[GenerationPlan], GenerationPrediction]
GenerationBound = Callable[[GenerationPlan, Sequence[int], Sequence[int]], Floors]
"""Bounds a plan over sizes of batches and numbers of micro-batches, both ascending."""
PricedGenerationPlan = Priced[GenerationPlan, GenerationPrediction]


@dataclass(frozen=True, kw_only=True)
class GenerationProblem(Budgeted[GenerationPlan, GenerationPrediction, GenerationGoal]):
    """Everything the solver may know."""

    workload: GenerationWorkload
    floors: GenerationBound
    """The least that plans can take, with batches of these sizes in so many micro-batches; much cheaper than a price."""
    can_cut_prompts: bool = True
    """True where prompts of any length can run, so that a prefill may be of a part of one."""
    can_attend_on_host: bool = True
    """True where the model lets others attend, so that attention may be computed where keys and values are."""
    find_model_conflict: Callable[[GenerationPlan], InvalidPlan | None] = lambda plan: None
    """The decision of a plan that the model cannot carry out, whatever the work; None where it can all."""
    longest_prefix: int = 0
    """Most of a prompt's first tokens whose keys and values may be made again; 0 where the model cannot."""
    find_load: Callable[[GenerationPlan], StagePeak | None] = lambda plan: None
    """The load of a plan, which depends on its weights alone; much cheaper than a price. None where it is not known."""
    has_copies_beside: bool = True
    """True where copies between host and device run beside compute; else prefetching gains nothing."""

    def permits(self, plan: GenerationPlan) -> bool:
        """Report whether every technique of the plan is allowed, all together can be carried out, its weights were
        profiled, and every pin is kept.
        """
        return self.permits_techniques(plan) and self.goal.pins.broken_by(plan) is None

    def permits_techniques(self, plan: GenerationPlan) -> bool:
        """The same, whatever is pinned."""
        if self.find_conflict(plan) is not None:
            return False
        return all(self.allows(technique) for technique in plan.techniques)

    def may_load(self, plan: GenerationPlan) -> bool:
        """False where it is known without a price that the plan's weights cannot even be loaded."""
        load = self.find_load(plan)
        if load is None:
            return True
        return load.device_peak_bytes <= self.goal.device_budget_bytes and not self.load_over(load, num_copies=1)

    def find_conflict(self, plan: GenerationPlan) -> InvalidPlan | None:
        """Why the plan cannot be carried out here, or not be priced, whatever the goal says of it; None where it can."""
        if not self.is_known(plan.weights.representation):
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
