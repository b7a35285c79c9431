"""A plan whose whole process has room on its card, where the best plan's tensors alone have. For both kinds of search.

A budget is about tensors; what comes with them (context, workspaces, gaps between tensors) is known once a plan is. What goes
over is taken off the tensors' budget and the search is made again. That is more than needed, as gaps grow with the tensors, so
budgets between the two are tried, until none of them can be worth it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from optimizer.estimate.prediction import CardMemory, Verdict

ACCEPTED = ("fits", "unknown")
"""Unknown is said where something was not modelled, as of a card of unknown kind; a person may still want to try."""
_MAX_BUDGETS = 8
_NEAR = 0.02
"""Budgets as near as this are not distinguished: what comes with the tensors is known no better."""
_AS_GOOD = 0.002
"""Share by which a plan costs no more than another: predictions are no finer."""
_LEAST_STEP = 0.2
"""Share of the gap between two budgets, so that a guess near one of them still brings them together."""


class _Predicted(Protocol):
    @property
    def device_peak_high_bytes(self) -> int: ...

    @property
    def memory(self) -> CardMemory | None: ...


class _Priced(Protocol):
    @property
    def prediction(self) -> Any: ...

    @property
    def verdict(self) -> Verdict: ...


P = TypeVar("P", bound=_Priced)
S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class CardFit(Generic[P, S]):
    """The best plan under some budget for tensors."""

    chosen: P
    """Its verdict is that of the whole budget."""
    source: S
    """The search that the plan came from."""


class Outpaced(Exception):
    """No plan that has room on the card costs as little as was wanted."""

    def __init__(self, best: Any, *, least: float) -> None:
        super().__init__(f"no plan costs less than {least}")
        self.best, self.least = best, least
        """The best plan without regard to the card and what it costs; None and what was wanted where none was looked for."""


def find_room(
    first: CardFit[P, S],
    *,
    budget_bytes: int,
    within: Callable[[int], CardFit[P, S] | None],
    cost: Callable[[P], float] = lambda _: -math.inf,
    most_cost: float = math.inf,
) -> CardFit[P, S] | None:
    """The best plan found that is accepted; None where none was. first: under the whole budget.

    within: the best plan whose tensors take no more than so many bytes, None where there is none. cost: what that search makes
    least, so plans of smaller budgets cost no less. Raises Outpaced once no plan that has room can cost ``most_cost`` or less.
    """
    if first.chosen.verdict in ACCEPTED:
        return first
    fitting: CardFit[P, S] | None = None
    too_large, high_bytes, low_bytes = first, budget_bytes, 0
    for _ in range(_MAX_BUDGETS):
        if cost(too_large.chosen) > most_cost:
            raise Outpaced(too_large.chosen, least=cost(too_large.chosen))
        if fitting is not None and cost(fitting.chosen) <= cost(too_large.chosen) * (1 + _AS_GOOD):
            break
        if fitting is None:
            tried_bytes = _less(too_large.chosen, budget_bytes)
        elif high_bytes - low_bytes <= _NEAR * high_bytes:
            break
        else:
            tried_bytes = low_bytes + int((high_bytes - low_bytes) * _share(fitting.chosen, too_large.chosen, budget_bytes))
        tried = within(tried_bytes) if tried_bytes > 0 else None
        if tried is not None and tried.chosen.verdict in ACCEPTED:
            fitting, low_bytes = tried, tried_bytes
        elif tried is not None:
            too_large, high_bytes = tried, tried_bytes
        elif fitting is None:
            break
        else:
            high_bytes = tried_bytes
    return fitting


def _share(fitting: _Priced, too_large: _Priced, budget_bytes: int) -> float:
    """The point between the two budgets at which nothing would be over and nothing left, were all in proportion."""
    left_bytes, over_bytes = -_bytes_over(fitting, budget_bytes), _bytes_over(too_large, budget_bytes)
    share = left_bytes / max(1, left_bytes + over_bytes)
    return min(1 - _LEAST_STEP, max(_LEAST_STEP, share))


def _less(chosen: _Priced, budget_bytes: int) -> int:
    """The plan's tensors without as much as is over; where that leaves nothing, in proportion to the whole."""
    prediction: _Predicted = chosen.prediction
    tensor_bytes, over_bytes = prediction.device_peak_high_bytes, max(1, _bytes_over(chosen, budget_bytes))
    if over_bytes < tensor_bytes:
        return tensor_bytes - over_bytes
    return tensor_bytes * budget_bytes // (budget_bytes + over_bytes)


def _bytes_over(chosen: _Priced, budget_bytes: int) -> int:
    """Bytes beside the tensors, upper ends, that neither the budget nor the card has room for; below 0 what is left."""
    prediction: _Predicted = chosen.prediction
    memory = prediction.memory
    if memory is None:
        return 0
    over_budget = memory.allocated.high - budget_bytes
    return max(over_budget, memory.process.high - memory.total_bytes) if memory.total_bytes else over_budget
