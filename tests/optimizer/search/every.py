"""Every plan of a small problem, for tests that hold the search against trying them all."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from optimizer.errors import InvalidPlan
from optimizer.plan.activations import BlockChoice
from optimizer.plan.plan import Plan
from optimizer.search.problem import SearchProblem, Setting


def every_plan(
    problem: SearchProblem,
    *,
    fractions: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0),
    chunks: tuple[int, ...] = (1, 2, 8),
    per_block: tuple[BlockChoice, ...] | None = None,
) -> Iterator[Plan]:
    """All that the problem permits, with these shares of the state, these counts of chunks and, where given, these blocks."""
    blocks = [per_block] if per_block else list(product(problem.choices, repeat=problem.num_blocks))
    seen = set()
    for setting in every_setting(problem, fractions=fractions, chunks=chunks):
        for per_block in blocks:
            plan = setting.plan(per_block)
            if plan not in seen:
                seen.add(plan)
                yield plan


def every_setting(
    problem: SearchProblem, *, fractions: tuple[float, ...], chunks: tuple[int, ...]
) -> Iterator[Setting]:
    for base, count, gradients, state, weights, compress in product(
        problem.settings(),
        chunks,
        ("keep", "consume", "host"),
        [("device", 1.0), *product(("host", "disk"), fractions)],
        [("device", 1), *product(("host", "disk"), (0, 1, 2))],
        ("none", "bf16", "int8"),
    ):
        setting = replace(
            base,
            num_chunks=count,
            gradients=gradients,
            state_place=state[0],
            state_fraction=state[1],
            weights_place=weights[0],
            prefetch=weights[1],
            compress=compress,
        )
        if problem.choices and _is_permitted(problem, setting):
            yield setting


def _is_permitted(problem: SearchProblem, setting: Setting) -> bool:
    try:
        per_block = problem.pinned_blocks or (problem.choices[-1],) * problem.num_blocks
        return problem.permits(setting.plan(per_block))
    except InvalidPlan:
        return False
