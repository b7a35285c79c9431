"""Least sizes of a problem's plans, from below, without a price: settings in order of a bound on their peak.

A setting whose bound is over the budget holds nothing that fits, so most of what cannot fit is refused in milliseconds. Looked
at are one sequence at a time, since larger micro-batches hold no less, and the whole batch at once, which sums no gradients; of
homes the strongest for which host, disk and remote store have room, and those stronger ones that may take a part.
"""

from collections.abc import Iterator
from typing import NamedTuple

from optimizer.search.problem import OuterPlan, Relax, SearchProblem
from optimizer.search.solver.grid import all_homes, has_free_fraction, with_chunks, with_prefetch
from optimizer.search.solver.relaxed import least_high_bytes


class Floor(NamedTuple):
    """No plan of the setting has a peak whose upper end is smaller, whatever its blocks do."""

    num_bytes: float
    setting: OuterPlan
    """With all of the state away that may be, and no block fetched ahead unless that is pinned."""


def has_floors(problem: SearchProblem) -> bool:
    """Report whether a problem's plans can be bounded."""
    return problem.relax is not None and problem.pinned_blocks is None and bool(problem.settings())


def list_floors(problem: SearchProblem) -> list[Floor]:
    """Floors, the least first; none where what must leave the device has no room elsewhere. Only where ``has_floors``."""
    assert problem.relax is not None
    found = [floor for base in light_bases(problem) for floor in _floors_of(problem, base, problem.relax)]
    return sorted(found, key=lambda floor: (floor.num_bytes, repr(floor.setting)))


def is_over_floor(problem: SearchProblem) -> bool:
    """Report whether it is known, before any plan is priced, that none fits."""
    if not has_floors(problem):
        return False
    assert problem.relax is not None
    floors = (floor for base in light_bases(problem)[::-1] for floor in _floors_of(problem, base, problem.relax))
    return all(floor.num_bytes > problem.goal.device_budget_bytes for floor in floors)


def light_bases(problem: SearchProblem) -> list[OuterPlan]:
    """Every representation with the least micro-batch, and with the whole batch at once."""
    bases = problem.settings()
    least = min((base.micro_batch_size for base in bases), default=0)
    return [base for base in bases if base.micro_batch_size == least or base.accumulation_steps == 1]


def _floors_of(problem: SearchProblem, base: OuterPlan, relax: Relax) -> Iterator[Floor]:
    for home in sorted(all_homes(problem, base), key=_strongest_first):
        chunked = with_chunks(problem, with_prefetch(problem, home)[-1])
        is_free = has_free_fraction(problem, home)
        counts = tuple(setting.num_chunks for setting in chunked)
        found = relax.setting(home, forms=problem.forms, chunk_counts=counts, state_is_free=is_free)
        share = min(
            share_with_room(found.host_bytes, problem.host_budget_bytes),
            share_with_room(found.disk_bytes, problem.disk_budget_bytes),
            share_with_room(found.remote_bytes, problem.remote_budget_bytes),
        )
        if share == 1.0 or is_free:
            highs_bytes = least_high_bytes(found, share=share)
            yield from (Floor(float(high_bytes), setting) for high_bytes, setting in zip(highs_bytes, chunked, strict=True))
        if share == 1.0:
            return


def share_with_room(needed_bytes: int, budget_bytes: int) -> float:
    """The most that may leave of what would need so much if all of it left."""
    return 1.0 if needed_bytes <= budget_bytes else budget_bytes / needed_bytes


def _strongest_first(home: OuterPlan) -> tuple[bool, bool, int, int]:
    """First those that leave the device; of homes alike in that those with less in stores, which are slower than the host."""
    places = (home.weights_place, home.state_place)
    return (
        home.weights_place == "device",
        home.state_place == "device",
        ("host", "consume", "keep").index(home.gradients),
        places.count("disk") + places.count("remote"),
    )
