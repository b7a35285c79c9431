"""Every plan that may fit, with the least that it can take, in the order in which the best of them is looked for."""

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimizer.estimate.bounds.lower_bounds import Floors
from optimizer.plan.generation import GenerationPlan
from optimizer.search.generation.levers import Family, list_families
from optimizer.search.generation.problem import GenerationProblem

MAX_EVERY: Final = 64
"""Up to so many sequences batches of every size are looked at; of more only those that split them evenly."""


Floats = NDArray[np.float64]
_FIRST, _SECOND, _BETWEEN, _NUM_ROWS = 0, 1, 5, 7


class Candidate(NamedTuple):
    """A plan before it is priced."""

    plan: GenerationPlan
    family: Hashable
    """Plans of one family and as many micro-batches differ in their batch alone."""
    key: tuple[float, float]
    """No less than this is what the goal is about, and, of plans alike in that, the second the time of all. Of a plan that makes
    keys and values again, whatever the number of tokens that it does so of."""


class Candidates:
    """The candidates of a problem."""

    def __init__(self, problem: GenerationProblem) -> None:
        self._problem = problem
        pinned = problem.goal.pins.batch_size
        self.sizes = list_batches(problem.workload.num_sequences) if pinned is None else [pinned]
        self._families = list_families(problem)
        rows = [row for index, family in enumerate(self._families) for row in [self._bound(index, family)] if row.size]
        table = np.concatenate(rows, axis=1) if rows else np.zeros((_NUM_ROWS, 0))
        # What is equal stays in the order of the levers.
        self._table = table[:, np.lexsort((table[_SECOND], table[_FIRST]))]

    def __iter__(self) -> Iterator[Candidate]:
        """Those that can be best first."""
        for first, second, family, number, size, _, prefix in self._table.T:
            plan = replace(self._families[int(family)].plan, batch_size=int(size), num_micro_batches=int(number))
            if plan.kv_cache.prefix_tokens:
                plan = replace(plan, kv_cache=replace(plan.kv_cache, prefix_tokens=int(prefix)))
            yield Candidate(
                plan=plan, family=(int(family), int(number), int(prefix)), key=(float(first), float(second))
            )

    def __len__(self) -> int:
        return len(self._table.T)

    @property
    def least_between(self) -> float:
        """The least that is known of batches that are not looked at and may be."""
        if self._problem.goal.pins.batch_size is not None:
            return np.inf
        return float(self._table[_BETWEEN].min(initial=np.inf))

    def _bound(self, index: int, family: Family) -> Floats:
        """Columns of those that may fit."""
        problem = self._problem
        if not problem.may_load(family.plan):
            return np.zeros((_NUM_ROWS, 0))
        floors = problem.floors(family.plan, self.sizes, family.micro_batches)
        sizes, numbers = np.array(self.sizes), np.array(family.micro_batches)[:, None]
        may_fit = (
            ((numbers - 1) * sizes < problem.workload.num_sequences)
            & (floors.device_bytes <= problem.goal.device_budget_bytes)
            & (floors.host_bytes <= problem.host_budget_bytes)
            & (floors.disk_bytes <= problem.disk_budget_bytes)
            & (floors.remote_bytes <= problem.remote_budget_bytes)
        )
        if family.plan.kv_cache.prefix_tokens:
            # Where none is best, it is another family's.
            may_fit &= floors.prefix_tokens > 0
        if not may_fit.any():
            return np.zeros((_NUM_ROWS, 0))
        first, second = self._keys(floors)
        columns = [first, second, np.full(may_fit.shape, index), numbers, sizes, floors.between_s, floors.prefix_tokens]
        return np.array([np.broadcast_to(column, may_fit.shape)[may_fit] for column in columns], dtype=np.float64)

    def _keys(self, floors: Floors) -> tuple[Floats, Floats]:
        """The same as ``Candidate.key``; for the largest batch, all up to the next that is looked at."""
        objective = self._problem.goal.objective
        if objective == "largest_batch":
            return 1.0 - np.array([*self.sizes[1:], self._problem.workload.num_sequences + 1]), floors.total_s
        return floors.prefill_ms if objective == "first_token" else floors.total_s, floors.total_s


def list_batches(num_sequences: int) -> list[int]:
    """Ascending: those that are tried."""
    if num_sequences <= MAX_EVERY:
        return list(range(1, num_sequences + 1))
    found = {1}
    num_passes = 1
    while num_passes <= num_sequences:
        size = -(-num_sequences // num_passes)
        found.add(size)
        # The fewest passes that a smaller batch needs.
        num_passes = -(-num_sequences // (size - 1)) if size > 1 else num_sequences + 1
    return sorted(found)
