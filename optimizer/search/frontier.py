"""The frontier: plans of which no other is both smaller and faster, over the whole range of budgets."""

from optimizer.estimate.prediction import Prediction
from optimizer.plan.plan import Plan
from optimizer.search.arrangements import Line, keep_everything, summarize
from optimizer.search.pricebook import PriceBook
from optimizer.search.problem import PricedPlan, Setting

MAX_POINTS = 24
NUM_STEPS = 4
"""Plans priced along a line, besides its start."""
MAX_SETTINGS = 6
"""Settings looked at for the spread: enough for a curve, few enough to stay quick."""


def price_spread(book: PriceBook) -> float:
    """Price plans between smallest and fastest, whatever the budget; the step time of the fastest allowed plan of all."""
    problem, depth = book.problem, book.problem.num_blocks
    settings = problem.settings()
    bound_ms = min(book.price(setting, keep_everything(depth)).step_ms for setting in settings)
    for setting in _spread_settings(settings):
        lines = [Line(num_blocks=depth, arrangement="first", num_offload=0)] if problem.allows("recompute") else []
        if problem.allows("offload"):
            lines.append(Line(num_blocks=depth, arrangement="first", num_offload=None))
        for line in lines:
            for step in range(NUM_STEPS + 1):
                book.price(setting, line.per_block(line.max_keep * step // NUM_STEPS))
    return bound_ms


def frontier_of(book: PriceBook) -> tuple[PricedPlan, ...]:
    """From small to fast; thinned to MAX_POINTS, the fastest that fits and both ends always kept."""
    host_ok = [
        pair for pair in book.permitted() if pair[1].host_peak_bytes <= book.problem.host_budget_bytes
    ]  # fastest first
    points: list[tuple[Plan, Prediction]] = []
    for plan, prediction in host_ok:
        if not points or prediction.device_peak_high_bytes < points[-1][1].device_peak_high_bytes:
            points.append((plan, prediction))
    points.reverse()
    best = points.index(book.best) if book.best in points else 0
    return tuple(book.problem.priced(plan_label(plan), plan, prediction) for plan, prediction in _thinned(points, best))


def plan_label(plan: Plan) -> str:
    """The plan in a few words: ``keep 4, recompute 8, micro-batch 2 x 4, bf16``."""
    parts = [summarize(plan.activations.per_block)]
    if plan.batch.accumulation_steps > 1:
        parts.append(f"micro-batch {plan.batch.micro_batch_size} x {plan.batch.accumulation_steps}")
    if plan.weights.dtype != "fp32":
        parts.append(plan.weights.dtype)
    if plan.optimizer_state.bits != 32:
        parts.append(f"{plan.optimizer_state.bits}-bit state")
    return ", ".join(parts)


def _spread_settings(settings: tuple[Setting, ...]) -> list[Setting]:
    """Evenly over the list, whose ends are the most and the least demanding."""
    if len(settings) <= MAX_SETTINGS:
        return list(settings)
    return [settings[index * (len(settings) - 1) // (MAX_SETTINGS - 1)] for index in range(MAX_SETTINGS)]


def _thinned(points: list[tuple[Plan, Prediction]], best: int) -> list[tuple[Plan, Prediction]]:
    if len(points) <= MAX_POINTS:
        return points
    kept = {index * (len(points) - 1) // (MAX_POINTS - 2) for index in range(MAX_POINTS - 1)} | {best}
    return [points[index] for index in sorted(kept)]
