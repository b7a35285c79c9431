"""Plans of a generation side by side, and one priced after an edit; as ``search/answer/compare.py`` does it of training."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optimizer.base.serialize import WithJson
from optimizer.plan.explain.diff import Difference, diff_plans
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.pins.generation_knobs import change_generation, generation_knobs, knob_value
from optimizer.search.answer.compare import BytesAtPeak, list_bytes_at_peak
from optimizer.search.generation.problem import GenerationProblem, PricedGenerationPlan


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One knob, for each of the plans compared."""

    knob: str
    """Its path in the plan: ``kv_cache.place``."""
    values: tuple[Any, ...]
    """In the order of the plans."""


@dataclass(frozen=True, kw_only=True)
class GenerationComparison(WithJson):
    """Several plans for the same prompts on the same machine."""

    plans: tuple[PricedGenerationPlan, ...]
    decisions: tuple[Decision, ...]
    """Those on which not all agree, in the order of the plan."""
    bytes_at_peak: tuple[BytesAtPeak, ...]
    """Categories in which not all are alike, each plan at its own peak."""


@dataclass(frozen=True, kw_only=True)
class RepricedGeneration(WithJson):
    """A plan after an edit, against what it was. Changes are new minus old."""

    priced: PricedGenerationPlan
    differences: tuple[Difference, ...]
    device_change_bytes: int
    """Differences of the peaks' upper ends, which the budget is held to."""
    host_change_bytes: int
    disk_change_bytes: int
    remote_change_bytes: int
    total_change_s: float
    is_lossless: bool


def compare_generations(problem: GenerationProblem, plans: Mapping[str, GenerationPlan]) -> GenerationComparison:
    """By label. Raises InvalidPlan for a plan that suits neither the model, the machine nor the work."""
    for plan in plans.values():
        problem.check(plan)
    priced = tuple(problem.priced(label, plan) for label, plan in plans.items())
    decisions = [
        Decision(knob=path, values=tuple(knob_value(plan, path) for plan in plans.values())) for path in generation_knobs()
    ]
    return GenerationComparison(
        plans=priced,
        decisions=tuple(decision for decision in decisions if len(set(decision.values)) > 1),
        bytes_at_peak=list_bytes_at_peak(priced),
    )


def reprice_generation(
    problem: GenerationProblem, plan: GenerationPlan, *, change: Mapping[str, Any]
) -> RepricedGeneration:
    """The plan with the change made, and what that comes to. change: as ``change_generation`` takes it.

    Raises InvalidPlan where the plan, or the changed one, cannot be carried out.
    """
    changed = change_generation(plan, change)
    problem.check(plan)
    problem.check(changed)
    before, after = problem.price(plan), problem.price(changed)
    return RepricedGeneration(
        priced=problem.priced("changed", changed),
        differences=tuple(diff_plans(plan, changed)),
        device_change_bytes=after.device_peak_high_bytes - before.device_peak_high_bytes,
        host_change_bytes=after.host_peak_bytes - before.host_peak_bytes,
        disk_change_bytes=after.disk_peak_bytes - before.disk_peak_bytes,
        remote_change_bytes=after.remote_peak_bytes - before.remote_peak_bytes,
        total_change_s=after.total_s - before.total_s,
        is_lossless=changed.is_lossless,
    )
