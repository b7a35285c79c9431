"""Plans of which no other is both smaller and faster, over the whole range of budgets."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Final, get_args

from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.weights import WeightsPlace
from optimizer.search.answer.pareto import pick_frontier
from optimizer.search.generation.problem import PricedGenerationPlan
from optimizer.search.generation.solve import Book, largest_of

_GROWTH = 4
"""Batch sizes priced for the frontier alone are powers of this."""
_STORED: Final = {"remote": "the remote store"}
_PLACES: Final = get_args(WeightsPlace)


def generation_frontier(book: Book) -> tuple[PricedGenerationPlan, ...]:
    """From small to fast, of all that a search priced and a spread of batch sizes."""
    problem = book.problem
    for plan in _spread(book):
        book.price(plan)
    roomy = [
        (plan, prediction)
        for plan, prediction in book.predictions.items()
        if problem.permits(plan) and problem.fits_elsewhere(prediction)
    ]
    points = pick_frontier(sorted(roomy, key=_by_time), best=None if book.best is None else book.best[1])
    return tuple(problem.priced(generation_label(plan), plan, found, in_detail=False) for plan, found in points)


def _by_time(pair: tuple[GenerationPlan, GenerationPrediction]) -> tuple[float, int, int]:
    plan, prediction = pair
    return prediction.total_s, prediction.device_peak_high_bytes, plan.weights.prefetch


def generation_label(plan: GenerationPlan) -> str:
    """The plan in a few words: ``8 at once, bf16, blocks in int8, weights from host, keys and values in int4 from disk``."""
    return ", ".join(_words(plan))


def _words(plan: GenerationPlan) -> Iterator[str]:
    weights, layout = plan.weights, plan.layout
    if layout.is_cut:
        yield f"cut into {' + '.join(map(str, layout.stage_blocks))} blocks"
    if layout.num_replicas > 1:
        yield f"{layout.num_replicas} copies"
    several = f"{plan.num_micro_batches} times " if plan.num_micro_batches > 1 else ""
    yield f"{several}{plan.batch_size:,} at once"
    if weights.dtype != "fp32":
        yield weights.dtype
    if weights.frozen != "same":
        yield f"blocks in {weights.frozen}"
    if weights.place != "device":
        yield f"weights from {_STORED.get(weights.place, weights.place)}, {weights.prefetch} ahead"
    cache = plan.kv_cache
    if not cache.is_plain:
        form = "" if cache.dtype == "same" else f" in {cache.dtype}"
        place = "" if cache.place == "device" else f" from {_STORED.get(cache.place, cache.place)}"
        attended = ", attended to there" if cache.attention == "host" else ""
        yield f"keys and values{form}{place}{attended}"
    if cache.prefix_tokens:
        yield f"of {cache.prefix_tokens:,} tokens made again"


def _spread(book: Book) -> Iterator[GenerationPlan]:
    """The best plan and plain generation with other batches, and with their weights in other places."""
    problem, pins = book.problem, book.problem.goal.pins
    num_sequences = problem.workload.num_sequences
    plain = GenerationPlan()
    bases = dict.fromkeys([plain, plain if book.best is None else replace(book.best[1], batch_size=1)])
    for base, place in product(bases, _PLACES):
        ahead = plain.weights.prefetch if place == "device" else pins.weights.prefetch or 0
        weights = replace(base.weights, place=place, prefetch=ahead)
        number = 1 if place == "device" else base.num_micro_batches
        arranged = replace(base, weights=weights, num_micro_batches=pins.num_micro_batches or number)
        for size in pins.among("batch_size", _sizes(largest_of(arranged, num_sequences))):
            plan = replace(arranged, batch_size=size)
            if problem.permits(plan):
                yield plan


def _sizes(largest: int) -> Iterator[int]:
    size = 1
    while size < largest:
        yield size
        size *= _GROWTH
    yield max(1, largest)
