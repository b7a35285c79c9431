"""Plans of which no other is both smaller and faster, over the whole range of budgets."""

from collections.abc import Iterator
from dataclasses import replace

from optimizer.plan.inference import InferencePlan
from optimizer.search.inference.levers import list_arrangements
from optimizer.search.inference.problem import PricedInferencePlan
from optimizer.search.inference.solve import Book, largest_of

MAX_POINTS = 24
_GROWTH = 4
"""Batch sizes priced for the frontier alone are powers of this."""


def inference_frontier(book: Book) -> tuple[PricedInferencePlan, ...]:
    """From small to fast, of all that a search priced and a spread of batch sizes at each place of the weights."""
    problem = book.problem
    for plan in _spread(book):
        book.price(plan)
    roomy = [
        (prediction.total_s, prediction.device_peak_high_bytes, plan.weights.prefetch, plan)
        for plan, prediction in book.predictions.items()
        if problem.permits(plan) and problem.fits_elsewhere(prediction)
    ]
    points: list[InferencePlan] = []
    smallest_bytes = None
    for _, peak_bytes, _, plan in sorted(roomy, key=lambda row: row[:3]):
        if smallest_bytes is None or peak_bytes < smallest_bytes:
            smallest_bytes = peak_bytes
            points.append(plan)
    points.reverse()
    best = points.index(book.best[1]) if book.best is not None and book.best[1] in points else 0
    return tuple(problem.priced(inference_label(plan), plan, in_detail=False) for plan in _thinned(points, best))


def inference_label(plan: InferencePlan) -> str:
    """The plan in a few words: ``8 at once, bf16, blocks in int8, weights from host``."""
    return ", ".join(_words(plan))


def _words(plan: InferencePlan) -> Iterator[str]:
    weights = plan.weights
    several = f"{plan.num_micro_batches} times " if plan.num_micro_batches > 1 else ""
    yield f"{several}{plan.batch_size:,} at once"
    if weights.dtype != "fp32":
        yield weights.dtype
    if weights.frozen != "same":
        yield f"blocks in {weights.frozen}"
    if weights.place != "device":
        yield f"weights from {weights.place}, {weights.prefetch} ahead"


def _spread(book: Book) -> Iterator[InferencePlan]:
    num_sequences = book.problem.workload.num_sequences
    for arrangement in list_arrangements(book.problem):
        if arrangement.plan.weights.prefetch > 1:
            continue
        largest = largest_of(arrangement.plan, num_sequences)
        size = 1
        while size < largest:
            yield replace(arrangement.plan, batch_size=size)
            size *= _GROWTH
        yield replace(arrangement.plan, batch_size=largest)


def _thinned(points: list[InferencePlan], best: int) -> list[InferencePlan]:
    if len(points) <= MAX_POINTS:
        return points
    kept = {index * (len(points) - 1) // (MAX_POINTS - 2) for index in range(MAX_POINTS - 1)} | {best}
    return [points[index] for index in sorted(kept)]
