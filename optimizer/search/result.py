"""The result of a search for a training plan: the chosen plan, what stands beside it, and how far it may be from the best."""

from dataclasses import dataclass
from typing import Any, Final

from optimizer.base.serialize import to_json
from optimizer.search.answer.lever_value import LeftOut
from optimizer.search.problem import PricedPlan

_ROUNDING: Final = 1e-8
"""Share by which a bound may be lower because sums of floats are."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search. ``chosen`` always fits; a search that finds nothing raises instead."""

    chosen: PricedPlan
    baselines: dict[str, PricedPlan]
    """By label, as in ``baselines.list_baselines``."""
    frontier: tuple[PricedPlan, ...]
    """Plans the goal allows of which no other is both smaller and faster, from small to fast; some over the budget."""
    bound_step_ms: float | None
    """No allowed plan that fits is faster; None where no bound is known. One above the chosen plan's time is a fault of ours, and
    is not hidden."""
    unlimited_step_ms: float
    """The fastest allowed plan if device memory were unlimited."""
    explanation: tuple[str, ...]
    """The chosen plan in sentences, and what was left out."""
    left_out: tuple[LeftOut, ...] = ()
    """Levers that were allowed and would not pay at this shape."""

    @property
    def gap(self) -> float | None:
        """Upper bound on how much slower the chosen plan is than the best, as a share; None where no bound holds."""
        step_ms = self.chosen.prediction.step_ms
        if self.bound_step_ms is None or self.bound_step_ms > step_ms:
            return None
        return step_ms / self.bound_step_ms - 1

    @property
    def is_optimal(self) -> bool:
        """True where it is known that no allowed plan is faster, by more than rounding."""
        return self.gap is not None and self.gap <= _ROUNDING

    def to_json(self) -> dict[str, Any]:
        """With ``gap`` and ``is_optimal`` beside the fields."""
        document: dict[str, Any] = to_json(self)
        return {**document, "gap": self.gap, "is_optimal": self.is_optimal}
