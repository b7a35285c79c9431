"""The lever of each large part of a plan: the one change that lowers the peak and belongs to that category of memory, priced.

What is listed is one change from the plan (``search/answer/knobs.py``), as pins to be held in a goal: a search fills in the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from optimizer.base.categories import Category
from optimizer.plan.pins.training import pins_of_change
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import techniques_that_lower
from optimizer.search.answer.knobs import list_knobs
from webapp.planning.search.training import TrainingQuestion, problem_of

TECHNIQUES_OF: Final = techniques_that_lower()
"""The changes that make a category smaller."""
MAX_PARTS: Final = 2
"""Number of the largest categories with a lever that are looked at."""


@dataclass(frozen=True, kw_only=True)
class Lever:
    """One change that makes the peak lower."""

    category: Category
    num_bytes: int
    """Bytes of the category at the plan's peak."""
    change: str
    """For people: ``recompute every block``."""
    pins: dict[str, Any]
    """Decisions to hold so that the change is made."""
    is_lossless: bool
    device_change_bytes: int
    step_change_ms: float
    step_share: float
    """The change as a share of the plan's own step."""


def list_levers(question: TrainingQuestion, plan: Plan, bytes_by_category: Mapping[str, int]) -> tuple[Lever, ...]:
    """For the plan's largest parts, the largest first: the changes that take least time for what they save, one lossless and one
    that changes the numbers. A part without such a change has no lever, and the next one is looked at."""
    wanted = {technique for techniques in TECHNIQUES_OF.values() for technique in techniques}
    if plan.layout.ranks:
        return ()
    problem = problem_of(question, plan)
    here = problem.price(plan)
    knobs = list_knobs(problem, plan, prediction=here, is_wanted=lambda technique, _: technique in wanted)
    saving = [knob for knob in knobs if knob.device_change_bytes < 0]
    found: list[Lever] = []
    for category in sorted(TECHNIQUES_OF, key=lambda name: -bytes_by_category.get(name, 0)):
        of_category = [knob for knob in saving if knob.technique in TECHNIQUES_OF[category]]
        for is_lossless in (True, False):
            best = min(
                (knob for knob in of_category if knob.is_lossless == is_lossless),
                key=lambda knob: max(knob.step_change_ms, 0.0) / -knob.device_change_bytes,
                default=None,
            )
            if best is None:
                continue
            found.append(
                Lever(
                    category=category,
                    num_bytes=bytes_by_category.get(category, 0),
                    change=best.change,
                    pins=pins_of_change(plan, best.plan),
                    is_lossless=best.is_lossless,
                    device_change_bytes=best.device_change_bytes,
                    step_change_ms=best.step_change_ms,
                    step_share=best.step_change_ms / here.step_ms,
                )
            )
        if len({lever.category for lever in found}) == MAX_PARTS:
            break
    return tuple(found)
