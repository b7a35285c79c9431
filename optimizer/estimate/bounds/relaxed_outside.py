"""Bytes and time of the parts around the blocks, for bounds (``relaxation.py``). Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimizer.base.categories import CATEGORIES
from optimizer.estimate.step.outside_tasks import OutsideTasks
from optimizer.estimate.step.part_prices import PartPrices
from optimizer.estimate.tasks.tasks import Task
from optimizer.plan.activations import BlockChoice
from optimizer.plan.plan import Plan
from optimizer.profile.profile import PART_NAMES, Profile

Numbers = NDArray[np.float64]
_GRADIENTS = CATEGORIES.index("gradients")


@dataclass(frozen=True, kw_only=True)
class RelaxedOutside:
    """Bytes and milliseconds around the blocks for one count of chunks. Bytes by the last block's choice; milliseconds
    by lane, the least of all choices.
    """

    entered: Numbers
    """Bytes that are there before the first block."""
    first_high: Numbers
    """The highest point above the start from the head to the last block's backward, in the first micro-batch."""
    later_high: Numbers
    first_left: Numbers
    """Bytes of ``first_high`` that are left after the last block's backward."""
    later_left: Numbers
    gradients: Numbers
    """The part of ``first_left`` that is gradients, in the first micro-batch without the head's forward."""
    enter_ms: Numbers
    head_ms: Numbers
    first_ms: Numbers
    later_ms: Numbers


def list_relaxed_outside(
    profile: Profile, prices: PartPrices, *, plan: Plan, choices: Sequence[BlockChoice]
) -> RelaxedOutside:
    """Relax what is around the blocks. plan: of which only the number of chunks is looked at. choices: that the last
    block may take.
    """
    if set(prices.compiled.regime.parts).issubset(PART_NAMES):
        # What follows the last block depends on its choice in plain modules only.
        return _list(OutsideTasks.find(profile, prices, plan=plan), prices, ["keep"], places=[0] * len(choices))
    distinct = list(dict.fromkeys(choices))
    return _list(OutsideTasks.find(profile, prices, plan=plan), prices, distinct, places=[distinct.index(c) for c in choices])


def _list(
    tasks: OutsideTasks, prices: PartPrices, choices: Sequence[BlockChoice], *, places: Sequence[int]
) -> RelaxedOutside:
    """Price each distinct choice. places: in ``choices`` of each that is listed."""
    accumulates = "accumulate" if prices.dropped is None else "first"

    def parts(*names: str, is_first: bool = True) -> list[tuple[Task, ...]]:
        return [tuple(tasks.task(name, choice, is_first=is_first) for name in names) for choice in choices]

    enter, head = parts("prologue"), parts("head")
    first = parts("head_backward_first", "norm_backward_first")
    later = parts(f"head_backward_{accumulates}", f"norm_backward_{accumulates}", is_first=False)

    def each(values: Sequence[int]) -> Numbers:
        return np.array(values, dtype=np.float64)[list(places)]

    def ends(back: list[tuple[Task, ...]]) -> tuple[Numbers, Numbers]:
        found = [_rise(*tail, *rest) for tail, rest in zip(head, back, strict=True)]
        return each([high for high, _ in found]), each([left for _, left in found])

    first_high, first_left = ends(first)
    later_high, later_left = ends(later)
    return RelaxedOutside(
        entered=each([task.totals.net for (task,) in enter]),
        first_high=first_high,
        later_high=later_high,
        first_left=first_left,
        later_left=later_left,
        gradients=each([sum(int(task.bytes.net[_GRADIENTS]) for task in pair) for pair in first]),
        enter_ms=_least(enter),
        head_ms=_least(head),
        first_ms=_least(first),
        later_ms=_least(later),
    )


def _rise(*tasks: Task) -> tuple[int, int]:
    """The highest level of tasks in a row above their start, and what they leave."""
    level, top = 0, 0
    for task in tasks:
        top = max(top, level + task.bytes.rise)
        level += task.totals.net
    return top, level


def _least(by_choice: Sequence[tuple[Task, ...]]) -> Numbers:
    """Part by part."""
    least: Numbers = np.array([[task.time.by_lane for task in tasks] for tasks in by_choice]).min(axis=0).sum(axis=0)
    return least
