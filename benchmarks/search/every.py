"""Every plan of a small problem, by brute force: what a search must find the best of.

Knows nothing of how the search works, only what it may decide (``SearchProblem.permits``) and on which grid it counts shares of
the state and chunks of the loss (``solver/levers.py``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Literal, get_args

from optimizer.base.errors import InvalidPlan
from optimizer.plan.activations import Compression
from optimizer.plan.gradients import GradientsChoice
from optimizer.plan.optimizer_state import StatePlace
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlace
from optimizer.search.arrangements import PerBlock, keep_everything
from optimizer.search.problem import OuterPlan, SearchProblem
from optimizer.search.solver.grid import MAX_PREFETCH, chunk_counts, fraction_steps

_COMPRESSIONS: tuple[Compression, ...] = get_args(Compression)
_AWAY: tuple[Literal["host", "disk", "remote"], ...] = ("host", "disk", "remote")


def every_plan(
    problem: SearchProblem,
    *,
    fractions: Sequence[float] | None = None,
    chunks: Sequence[int] | None = None,
    per_block: PerBlock | None = None,
) -> Iterator[Plan]:
    """All that the problem permits, each once.

    fractions, chunks: shares of the state and counts of chunks instead of those that a search may take. per_block: the blocks.
    """
    blocks = [per_block] if per_block else list(product(problem.choices, repeat=problem.num_blocks))
    seen = set()
    for setting in every_setting(problem, fractions=fractions, chunks=chunks):
        for choices in blocks:
            plan = setting.plan(choices)
            if plan not in seen and problem.permits(plan):
                seen.add(plan)
                yield plan


def every_setting(
    problem: SearchProblem, *, fractions: Sequence[float] | None = None, chunks: Sequence[int] | None = None
) -> Iterator[OuterPlan]:
    steps = fraction_steps(problem.num_blocks)
    fractions = fractions or [step / steps for step in range(1, steps + 1)]
    states: list[tuple[StatePlace, float]] = [("device", 1.0), *product(_AWAY, fractions)]
    homes: list[tuple[WeightsPlace, int]] = [("device", 1), *product(_AWAY, range(MAX_PREFETCH + 1))]
    for base, gradients, state, weights, compress in product(
        problem.settings(),
        get_args(GradientsChoice),
        states,
        homes,
        _COMPRESSIONS,
    ):
        home = replace(
            base,
            gradients=gradients,
            state_place=state[0],
            state_fraction=state[1],
            weights_place=weights[0],
            prefetch=weights[1],
            compress=compress,
        )
        counts = chunks or chunk_counts(base, tokens=problem.workload.sequence_length)
        if not _may_be_permitted(problem, home):
            continue
        for count in counts:
            yield replace(home, num_chunks=count)


def _may_be_permitted(problem: SearchProblem, setting: OuterPlan) -> bool:
    """True if the setting contradicts nothing and itself uses nothing forbidden; its blocks are judged apart."""
    try:
        plan = setting.plan((problem.choices[-1],) * problem.num_blocks)
        kept = setting.plan(keep_everything(problem.num_blocks))
    except InvalidPlan:
        return False
    return problem.find_conflict(plan) is None and all(problem.allows(technique) for technique in kept.techniques)
