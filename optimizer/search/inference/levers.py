"""What can be done to a generation's plan, one lever after the other: the one list that a new field of the plan joins.

Every plan is plain generation (fp32, everything on the device) with one choice of each lever, and a batch size. The batch is no
lever here: ``solve.py`` bisects it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, get_args

from optimizer.plan.inference import InferencePlan
from optimizer.plan.weights import FrozenFormat, WeightsDtype
from optimizer.search.inference.problem import InferenceProblem

_MAX_PREFETCH = 8


@dataclass(frozen=True, kw_only=True)
class Lever:
    """One thing that can be decided."""

    name: str
    choices: Callable[[InferencePlan], Iterable[InferencePlan]]
    """The plan with each of them; the plan as it is comes first."""
    only_slows: bool
    """Whether no choice makes a pass of the same batch faster than the first does: what the others bring is room."""


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """A choice of each lever."""

    plan: InferencePlan
    """Of one sequence at a time."""
    fastest: InferencePlan
    """The same with the first choice of each lever that only slows: no pass of this arrangement is faster than its."""


def list_arrangements(problem: InferenceProblem) -> list[Arrangement]:
    """All that the goal, machine and profile allow; those that are their own fastest first, plain generation before all."""
    found = [Arrangement(plan=InferencePlan(), fastest=InferencePlan())]
    for lever in LEVERS:
        found = list(_pull(lever, found))
    found.sort(key=lambda arrangement: arrangement.plan != arrangement.fastest)
    return [arrangement for arrangement in found if problem.permits(arrangement.plan)]


def _pull(lever: Lever, arrangements: Iterable[Arrangement]) -> Iterator[Arrangement]:
    for before in arrangements:
        for plan, fastest in zip(lever.choices(before.plan), lever.choices(before.fastest), strict=False):
            yield Arrangement(plan=plan, fastest=before.fastest if lever.only_slows else fastest)


def _representations(plan: InferencePlan) -> Iterator[InferencePlan]:
    """Each dtype with each way of holding the blocks' matrices."""
    for frozen in get_args(FrozenFormat):
        for dtype in get_args(WeightsDtype):
            yield replace(plan, weights=replace(plan.weights, dtype=dtype, frozen=frozen))


def _places(plan: InferencePlan) -> Iterator[InferencePlan]:
    """Where the blocks' weights live, and how many come ahead of their use."""
    yield plan
    for place in ("host", "disk"):
        for prefetch in range(_MAX_PREFETCH + 1):
            yield replace(plan, weights=replace(plan.weights, place=place, prefetch=prefetch))


LEVERS: Final = (
    Lever(name="representation of the weights", choices=_representations, only_slows=False),
    Lever(name="place of the weights", choices=_places, only_slows=True),
)
