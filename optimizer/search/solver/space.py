"""All that a search decides among: every setting of a problem, on a finite grid, and whether all plans are few enough to try.

Shares of the state and counts of chunks are the two decisions with many values; ``levers.py`` has the values that a search takes.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Final, get_args

from optimizer.plan.activations import OFFLOADING, Compression
from optimizer.plan.gradients import GradientsChoice
from optimizer.plan.optimizer_state import StatePlace
from optimizer.plan.weights import WeightsPlace
from optimizer.search.arrangements import PerBlock
from optimizer.search.problem import OuterPlan, SearchProblem
from optimizer.search.solver.grid import MAX_PREFETCH, chunk_counts, fraction_steps
from optimizer.search.solver.pricebook import PriceBook

MAX_ENUMERATED: Final = 6_000
"""Plans that are all tried where there are no more: a second or two, and the answer is the best for certain."""
MAX_SETTINGS: Final = 1_500
"""With more, nobody counts on: even two blocks make too many plans of them."""


def few_settings(book: PriceBook) -> list[OuterPlan] | None:
    """All settings where all their plans are at most MAX_ENUMERATED, else None."""
    problem = book.problem
    num_arrangements, num_plans = count_arrangements(problem), 0
    if num_arrangements > MAX_ENUMERATED:
        return None
    num_repeated = 0 if "compress" in problem.pinned_levers else _count_without_offload(problem)
    found: list[OuterPlan] = []
    for setting in every_setting(book):
        found.append(setting)
        num_plans += num_arrangements - (num_repeated if setting.compress != "none" else 0)
        if len(found) > MAX_SETTINGS or num_plans > MAX_ENUMERATED:
            return None
    return found


def count_arrangements(problem: SearchProblem) -> int:
    return 1 if problem.pinned_blocks is not None else len(problem.choices) ** problem.num_blocks


def _count_without_offload(problem: SearchProblem) -> int:
    """Arrangements that are the same plan however copies would be compressed."""
    if problem.pinned_blocks is not None:
        return int(not set(problem.pinned_blocks) & set(OFFLOADING))
    return int((len(problem.choices) - len(problem.offloading)) ** problem.num_blocks)


def every_arrangement(problem: SearchProblem) -> Iterator[PerBlock]:
    if problem.pinned_blocks is not None:
        yield problem.pinned_blocks
        return
    yield from product(problem.choices, repeat=problem.num_blocks)


def every_setting(book: PriceBook) -> Iterator[OuterPlan]:
    """All that are permitted, each once; how copies are compressed is part of it only where blocks can be offloaded."""
    problem = book.problem
    for base in problem.settings():
        for gradients, state, weights in product(
            get_args(GradientsChoice), get_args(StatePlace), get_args(WeightsPlace)
        ):
            home = replace(base, gradients=gradients, state_place=state, weights_place=weights)
            if problem.permits_setting(home):
                yield from _variants(book, home)


def _variants(book: PriceBook, home: OuterPlan) -> Iterator[OuterPlan]:
    problem, steps = book.problem, fraction_steps(book.problem.num_blocks)
    free = _has_free_fraction(problem, home)
    fractions = [step / steps for step in range(1, steps + 1)] if free else [home.state_fraction]
    streams = home.brings_weights and "prefetch" not in problem.pinned_levers
    prefetches = list(range(MAX_PREFETCH + 1)) if streams else [home.prefetch]
    for fraction, prefetch, count, compress in product(
        fractions, prefetches, _chunks(problem, home), _compressions(problem, home)
    ):
        yield replace(home, state_fraction=fraction, prefetch=prefetch, num_chunks=count, compress=compress)


def _has_free_fraction(problem: SearchProblem, home: OuterPlan) -> bool:
    """Also beside streamed weights, where those are not trained."""
    if home.state_place == "device" or "state_fraction" in problem.pinned_levers:
        return False
    return problem.permits_setting(replace(home, state_fraction=0.5))


def _chunks(problem: SearchProblem, home: OuterPlan) -> tuple[int, ...]:
    if "num_chunks" in problem.pinned_levers:
        return (home.num_chunks,)
    counts = chunk_counts(home, tokens=problem.workload.sequence_length)
    return tuple(count for count in counts if problem.permits_setting(replace(home, num_chunks=count)))


def _compressions(problem: SearchProblem, home: OuterPlan) -> tuple[Compression, ...]:
    if "compress" in problem.pinned_levers or not problem.offloading or not problem.allows("compress"):
        return (home.compress,)
    found: tuple[Compression, ...] = get_args(Compression)
    return found
