"""The frontier: plans of which no other is both smaller and faster, over the whole range of budgets."""

from collections.abc import Iterator

from optimizer.plan.plan import Plan
from optimizer.search.answer.pareto import pick_frontier
from optimizer.search.arrangements import PlanLine, keep_everything, summarize
from optimizer.search.problem import OuterPlan, PricedPlan
from optimizer.search.solver.grid import PREFETCHES
from optimizer.search.solver.levers import variants_of
from optimizer.search.solver.lines import pure_blocks
from optimizer.search.solver.pricebook import PriceBook

NUM_STEPS = 4
"""Plans priced along a line, besides its start."""
MAX_SETTINGS = 4
"""Settings looked at for the spread: enough for a curve, few enough to stay quick."""


def price_spread(book: PriceBook) -> float:
    """Price plans between smallest and fastest, whatever the budget; the step time of the fastest allowed plan of all."""
    settings = book.problem.settings()
    _price_bases(book)
    for setting in _spread_settings(settings):
        _price_along_lines(book, setting)
    for setting in {settings[0]: None, settings[-1]: None}:
        for variant in _spread_variants(book, setting):
            for per_block in pure_blocks(book)[:2]:
                book.price(variant, per_block)
    return book.fastest_permitted_ms


def frontier_of(book: PriceBook, *, device_budget_bytes: int) -> tuple[PricedPlan, ...]:
    """From small to fast; the fastest that fits and both ends always kept. device_budget_bytes: that verdicts are about; the
    book may be of a search with less.
    """
    problem, best = book.problem.with_budget(device_budget_bytes), book.best
    roomy = [pair for pair in book.permitted() if problem.fits_elsewhere(pair[1])]
    points = pick_frontier(roomy, best=None if best is None else best[0])
    return tuple(problem.priced(plan_label(plan), plan, prediction, in_detail=False) for plan, prediction in points)


def plan_label(plan: Plan) -> str:
    """The plan in a few words: ``keep 4, recompute 8, micro-batch 2 x 4, bf16, state on host 50 %``."""
    return ", ".join([summarize(plan.activations.per_block), *_label_outside_blocks(plan)])


def _label_outside_blocks(plan: Plan) -> Iterator[str]:
    weights, state, chunks = plan.weights, plan.optimizer_state, plan.logits_and_loss.num_chunks
    if plan.activations.num_offloaded and plan.activations.compress != "none":
        yield f"copies in {plan.activations.compress}"
    if plan.batch.accumulation_steps > 1:
        yield f"micro-batch {plan.batch.micro_batch_size} x {plan.batch.accumulation_steps}"
    if weights.autocast != "off" or weights.dtype != "fp32":
        yield weights.dtype if weights.autocast == "off" else f"autocast {weights.autocast}"
    if weights.frozen != "same":
        yield f"frozen {weights.frozen}"
    if state.bits != 32:
        yield f"{state.bits}-bit state"
    if chunks > 1:
        yield f"loss in {chunks} chunks"
    if plan.gradients.choice == "consume":
        yield "gradients consumed"
    if plan.gradients.choice == "host":
        yield "gradients on host"
    if state.place != "device":
        yield f"state on {state.place}" + (f" {100 * state.fraction:.0f} %" if state.fraction < 1 else "")
    if weights.place != "device":
        yield f"weights on {weights.place}"


def _price_bases(book: PriceBook) -> None:
    """Keeping everything in each base; where a base can be bounded, only while it may be the fastest of all."""
    kept, relax = keep_everything(book.problem.num_blocks), book.problem.relax
    least_ms = {base: 0.0 if relax is None else relax.base_ms(base) for base in book.problem.settings()}
    fastest_ms = float("inf")
    for base in sorted(least_ms, key=lambda base: (least_ms[base], repr(base))):
        if least_ms[base] < fastest_ms:
            fastest_ms = min(fastest_ms, book.price(base, kept).step_ms)


def _price_along_lines(book: PriceBook, setting: OuterPlan) -> None:
    depth = book.problem.num_blocks
    lines = [PlanLine(num_blocks=depth)] if book.problem.rebuilding else []
    if book.problem.offloading:
        lines.append(PlanLine(num_blocks=depth, num_offload=None))
    for line in lines:
        for step in range(NUM_STEPS + 1):
            book.price(setting, line.per_block(line.length * step // NUM_STEPS))


def _spread_variants(book: PriceBook, base: OuterPlan) -> list[OuterPlan]:
    """Homes, with the fewest and the most chunks, and the most prefetched blocks of those tried first."""
    variants = list(variants_of(book, base))
    most = max((variant.num_chunks for variant in variants), default=1)
    return [
        variant
        for variant in variants
        if variant.num_chunks in (1, most) and (not variant.brings_weights or variant.prefetch == PREFETCHES[0])
    ] or variants


def _spread_settings(settings: tuple[OuterPlan, ...]) -> list[OuterPlan]:
    """Evenly over the list, whose ends are the most and the least demanding."""
    if len(settings) <= MAX_SETTINGS:
        return list(settings)
    return [settings[index * (len(settings) - 1) // (MAX_SETTINGS - 1)] for index in range(MAX_SETTINGS)]
