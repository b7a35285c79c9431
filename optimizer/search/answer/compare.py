"""Plans side by side: what of the table differs, bytes at each plan's peak, milliseconds; and a plan priced after one edit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from optimizer.base.categories import CATEGORIES, Category
from optimizer.base.serialize import WithJson
from optimizer.plan.explain.diff import Cell, Difference, diff_plans, different_cells
from optimizer.plan.pins.training import Pins
from optimizer.plan.plan import Plan
from optimizer.search.budgeted import PlanT, PredictionT, Priced
from optimizer.search.problem import PricedPlan, SearchProblem


@dataclass(frozen=True, kw_only=True)
class BytesAtPeak:
    """Bytes of one category, for each plan."""

    category: Category
    values: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison(WithJson):
    """Several plans for the same work on the same machine."""

    plans: tuple[PricedPlan, ...]
    cells: tuple[Cell, ...]
    """Decisions on which not all agree."""
    bytes_at_peak: tuple[BytesAtPeak, ...]
    """Categories in which not all are alike, each plan at its own peak."""


@dataclass(frozen=True, kw_only=True)
class Repriced(WithJson):
    """A plan after an edit, against what it was. Changes are new minus old."""

    priced: PricedPlan
    differences: tuple[Difference, ...]
    device_change_bytes: int
    """Differences of the peaks' upper ends, which the budget is held to."""
    host_change_bytes: int
    step_change_ms: float
    is_lossless: bool


def compare_plans(problem: SearchProblem, plans: Mapping[str, Plan]) -> Comparison:
    """By label. Raises InvalidPlan for a plan that suits neither the model nor the work."""
    for plan in plans.values():
        problem.check(plan)
    priced = tuple(problem.priced(label, plan, problem.price(plan)) for label, plan in plans.items())
    return Comparison(
        plans=priced,
        cells=different_cells(list(plans.values())),
        bytes_at_peak=list_bytes_at_peak(priced),
    )


def list_bytes_at_peak(priced: Sequence[Priced[PlanT, PredictionT]]) -> tuple[BytesAtPeak, ...]:
    """Categories in which not all plans are alike, each plan at its own peak."""
    sizes = [found.prediction.device_bytes_by_category for found in priced]
    rows = (BytesAtPeak(category=name, values=tuple(of_plan.get(name, 0) for of_plan in sizes)) for name in CATEGORIES)
    return tuple(row for row in rows if len(set(row.values)) > 1)


def reprice(problem: SearchProblem, plan: Plan, *, change: Pins) -> Repriced:
    """The plan with the change made, and what that comes to. What comes on top of tensors is not worked out anew.

    The number of micro-batches follows their size, and the other way round. Raises InvalidPlan where the changed plan cannot be
    carried out.
    """
    changed = change_plan(plan, change)
    problem.check(plan)
    problem.check(changed)
    before, after = problem.price(plan), problem.price(changed)
    return Repriced(
        priced=problem.priced("changed", changed, after, in_detail=False),
        differences=tuple(diff_plans(plan, changed)),
        device_change_bytes=after.device_peak_high_bytes - before.device_peak_high_bytes,
        host_change_bytes=after.host_peak_bytes - before.host_peak_bytes,
        step_change_ms=after.step_ms - before.step_ms,
        is_lossless=changed.is_lossless,
    )


def change_plan(plan: Plan, change: Pins) -> Plan:
    """The plan with the change made. Raises InvalidPlan where that contradicts itself."""
    document = plan.to_json()
    for category, knobs in change.to_json().items():
        document[category].update(knobs)
    blocks = change.blocks(len(plan.activations.per_block))
    if blocks is not None:
        document["activations"]["per_block"] = list(blocks)
    size, steps = change.batch.micro_batch_size, change.batch.accumulation_steps
    if size is not None and steps is None:
        document["batch"]["accumulation_steps"] = max(1, plan.batch.global_batch_size // max(1, size))
    if steps is not None and size is None:
        document["batch"]["micro_batch_size"] = max(1, plan.batch.global_batch_size // max(1, steps))
    changed = Plan.from_json(document)
    if changed.activations.num_offloaded == 0:
        return replace(changed, activations=replace(changed.activations, compress="none"))
    return changed
