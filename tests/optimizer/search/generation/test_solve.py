"""The solver finds what enumeration finds, whatever the goal, and more memory is never worse."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from optimizer.base.errors import NoFeasiblePlan
from optimizer.estimate.bounds.lower_bounds import Floors
from optimizer.plan.generation import GenerationPlan
from optimizer.search.generation.candidates import MAX_EVERY, list_batches
from optimizer.search.generation.one_device import search_generation
from optimizer.search.generation.problem import GenerationProblem
from optimizer.search.generation.smallest import explain_nothing_fits
from optimizer.search.generation.solve import SETTLED, Book, solve, spread_evenly, value_of
from tests.optimizer.search.generation.synthetic import OBJECTIVES, list_every_plan, make_problem

NUM_PROBLEMS = 300
WITHOUT_END = 10**9


def best_of_all(problem: GenerationProblem) -> float | None:
    fitting = [plan for plan in list_every_plan(problem) if problem.fits(problem.price(plan))]
    return min((value_of(problem, plan, problem.price(plan))[0] for plan in fitting), default=None)


@pytest.mark.breadth
@pytest.mark.parametrize("start", range(0, NUM_PROBLEMS, 50))
def test_it_is_as_good_as_enumeration(start: int) -> None:
    seen = set()
    for seed in range(start, start + 50):
        problem = make_problem(seed)
        best = best_of_all(problem)
        found = solve(Book(problem=problem), patience=WITHOUT_END)
        assert (found is None) == (best is None), seed
        if found is not None:
            assert problem.permits(found.plan), seed
            assert problem.fits(problem.price(found.plan)), seed
            assert value_of(problem, found.plan, problem.price(found.plan))[0] == best, seed
            assert found.bound == best, seed
        seen.add((problem.goal.objective, best is None))
    assert len(seen) > 4


@pytest.mark.breadth
@pytest.mark.parametrize("seed", range(40))
def test_one_that_ends_early_is_nearly_as_good_and_says_how_nearly(seed: int) -> None:
    problem = make_problem(seed)
    problem = replace(problem, goal=replace(problem.goal, objective="throughput"))
    best = best_of_all(problem)
    found = solve(Book(problem=problem), patience=2)
    assert (found is None) == (best is None)
    if found is not None:
        assert found.bound <= best <= problem.price(found.plan).total_s <= best * (1 + SETTLED)


@pytest.mark.parametrize("seed", range(8))
def test_of_many_sequences_no_even_split_is_better_and_the_bound_holds_for_all(seed: int) -> None:
    problem = make_problem(seed, num_sequences=150, has_dips=False)
    problem = replace(problem, goal=replace(problem.goal, objective="throughput", device_budget_bytes=9_000))
    found = solve(Book(problem=problem))
    best = best_of_all(problem)
    if found is None:
        assert best is None
        return
    sizes = list_batches(150)
    fitting = [p for p in list_every_plan(problem) if p.batch_size in sizes and problem.fits(problem.price(p))]
    assert problem.price(found.plan).total_s == min(problem.price(plan).total_s for plan in fitting)
    assert found.bound <= best * (1 + 1e-12)
    assert best <= problem.price(found.plan).total_s


@pytest.mark.breadth
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(6))
def test_more_memory_is_never_worse(seed: int, objective: str) -> None:
    problem = make_problem(seed)
    problem = replace(problem, goal=replace(problem.goal, objective=objective))
    values = []
    for budget_bytes in range(100, 3000, 150):
        larger = problem.with_budget(budget_bytes)
        found = solve(Book(problem=larger))
        if found is not None:
            values.append(value_of(larger, found.plan, larger.price(found.plan))[0])
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize(
    ("gain", "at_most", "size"), [(1e-6, inf, 24), (1e-3, inf, 24), (1e-3, 1 - 31e-3, 31), (1e-2, inf, 31)]
)
def test_sequences_are_spread_evenly_where_little_is_lost(gain: float, at_most: float, size: int) -> None:
    problem = make_problem(0, num_sequences=48)

    def price(plan: GenerationPlan) -> Any:
        bytes_ = 10 * plan.batch_size
        return replace(
            problem.price(plan), total_s=1 - gain * plan.batch_size, device_peak_bytes=bytes_, device_peak_high_bytes=bytes_
        )

    def floors(plan: GenerationPlan, sizes: Sequence[int], micro_batches: Sequence[int]) -> Floors:
        return Floors(*np.zeros((7, len(micro_batches), len(sizes))))

    goal = replace(problem.goal, objective="throughput", device_budget_bytes=310)
    book = Book(problem=replace(problem, goal=goal, price=price, floors=floors))
    found = solve(book, patience=WITHOUT_END)
    assert found.bound == 1 - gain * 31
    assert spread_evenly(book, found.plan, at_most_s=at_most).batch_size == size
    with_pin = replace(goal, pins=replace(goal.pins, batch_size=31))
    pinned = Book(problem=replace(book.problem, goal=with_pin))
    assert spread_evenly(pinned, found.plan).batch_size == 31


def test_the_same_problem_gives_the_same_plan() -> None:
    assert solve(Book(problem=make_problem(3))) == solve(Book(problem=make_problem(3)))


def test_far_fewer_plans_are_priced_than_there_are() -> None:
    problem = make_problem(0, num_sequences=MAX_EVERY)
    problem = replace(problem, goal=replace(problem.goal, allow_lossy=True, forbid=(), device_budget_bytes=9_000))
    book = Book(problem=problem)
    solve(book)
    assert len(book.predictions) < len(list_every_plan(problem)) / 10


def test_even_splits_are_all_counts_of_passes() -> None:
    assert list_batches(10) == list(range(1, 11))
    sizes = list_batches(1000)
    assert sizes == sorted({-(-1000 // passes) for passes in range(1, 1001)})


@functools.cache
def problems_without_a_plan() -> list[GenerationProblem]:
    return [problem for problem in map(make_problem, range(40)) if best_of_all(problem) is None]


@pytest.mark.parametrize("index", range(6))
def test_where_nothing_fits_the_smallest_budget_is_enough_and_a_byte_less_is_not(index: int) -> None:
    problem = problems_without_a_plan()[index]
    with pytest.raises(NoFeasiblePlan, match="smallest feasible") as caught:
        search_generation(problem)
    smallest = caught.value.fields["smallest_feasible_bytes"]
    assert solve(Book(problem=problem.with_budget(smallest))) is not None
    assert solve(Book(problem=problem.with_budget(smallest - 1))) is None
    assert "Raise the budget to" in caught.value.hint


def test_ways_out_that_are_named_were_priced() -> None:
    problem = next(p for p in map(make_problem, range(99)) if "stream_weights" in p.goal.forbid and p.host_budget_bytes > 5000)
    error = explain_nothing_fits(problem.with_budget(1))
    assert "permit 'stream weights block by block' (smallest peak then" in error.hint


def test_the_frontier_is_smaller_at_one_end_and_faster_at_the_other() -> None:
    problem = make_problem(11, num_sequences=40)
    problem = replace(problem, goal=replace(problem.goal, device_budget_bytes=50_000, allow_lossy=True), host_budget_bytes=10_000)
    points = search_generation(problem).frontier
    peaks = [point.prediction.device_peak_high_bytes for point in points]
    times = [point.prediction.total_s for point in points]
    assert peaks == sorted(set(peaks))
    assert times == sorted(set(times), reverse=True)
    assert len(points) > 2
